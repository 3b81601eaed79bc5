"""Stops an unhealthy run, and warns of problems that do not stop it.

A warning is logged when a condition begins, and again only after it has ended.
"""

from __future__ import annotations

import functools
import itertools
import logging
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from anysearch_jax import config as config_lib
from anysearch_jax import types
from anysearch_jax.host import processes
from anysearch_jax.policy import architecture as architecture_lib
from anysearch_jax.policy import decoder, sharding
from anysearch_jax.policy.attention import self_attention
from anysearch_jax.training import collection, logprobs, placement

# Tokens of the prompt that are scored: enough to distinguish policies, and
# cheap at any size.
_TOKENS = 128
# By part of an engine (server, device): the mean and the largest distance of a
# token's log-probabilities from the trainer's, in nats.
Gaps = Mapping[str, tuple[float, float]]
_log = logging.getLogger(__name__)
_SHOWN_CHARACTERS = 400  # Of an episode.
# What to do about a policy that earns the same whatever it does.
EQUAL_REWARDS_ADVICE = (
  "Teach it the format first (anysearch demonstrate, then anysearch sft), "
  "raise episode.max_generated if episodes are truncated, or change the reward"
)


class NotFiniteError(RuntimeError):
  """`watch.bad_steps` steps in a row had a non-finite loss or gradient."""


class FailedEpisodesError(RuntimeError):
  """Too many episodes failed because engine or retriever were unavailable."""


def outage(
  rollout: int,
  collected: collection.RolloutBatch,
  *,
  stream: collection.QuestionStream,
  max_failed: float,
) -> str:
  """Returns why a rollout must not be trained on, or "" if it may be.

  Args:
    rollout: its number.
    collected: its groups and counts.
    stream: gives the size of a rollout.
    max_failed: the largest share of episodes that may have failed. A group must
      be left too.
  """
  groups = stream.per_rollout + collected.resampled
  played = (groups - collected.stragglers) * stream.samples
  if collected.failed / played > max_failed:
    sentence = f"more than watch.max_failed, {max_failed:g}"
  elif collected.dropped and not any(collected.groups):
    sentence = "which leaves no group to train on"
  else:
    return ""
  return (
    f"Rollout {rollout}: {collected.failed} of {played} episodes failed, "
    f"{sentence}; the first: {collected.reason or 'no reason was kept.'}"
  )


class WrongWeightsError(RuntimeError):
  """The engine does not sample with the weights that it was given."""


class NoGradientError(RuntimeError):
  """`watch.equal_rollouts` rollouts in a row had no advantage to learn from."""


def describe_rewards(
  values: Mapping[str, float], trajectory: types.Trajectory | None
) -> str:
  """Returns a sentence on the rewards of a rollout, with one of its episodes.

  Args:
    values: metrics of the rollout.
    trajectory: the episode to show; None if there is none.
  """
  names = {
    "right": "reward/em",
    "well formed": "reward/format",
    "truncated": "rollout/truncated",
    "invalid": "rollout/invalid",
  }
  shares = ", ".join(
    f"{values[metric]:.0%} {name}"
    for name, metric in names.items()
    if metric in values
  )
  sentence = (
    f"The mean reward is {values['reward/total']:.3g}; of the episodes "
    f"{shares}, with {values['rollout/searches']:.2g} searches each."
  )
  if trajectory is None:
    return sentence
  text = "".join(span.text for span in trajectory.spans)
  excerpt = text[:_SHOWN_CHARACTERS]
  if len(text) > _SHOWN_CHARACTERS:
    excerpt += "..."
  return (
    f"{sentence} One of them, with {trajectory.budget} searches allowed for "
    f"{trajectory.question.text!r}: {excerpt!r}."
  )


class HealthMonitor:
  """Monitors a run, from one rollout to the next.

  Args:
    config: the limits.
    stream: gives the size of a rollout.
    curriculum: says which budgets have windows.
    warn: is called with each warning.
  """

  def __init__(
    self,
    config: config_lib.WatchConfig,
    *,
    stream: collection.QuestionStream,
    curriculum: config_lib.CurriculumConfig,
    warn: Callable[[str], None] = _log.warning,
  ):
    self._config = config
    self._warn = warn
    self._stream = stream
    self._curriculum = curriculum
    self._bad_steps = 0  # Steps in a row that were not finite.
    self._gap_rollouts = 0  # Rollouts in a row whose log-probs differ too much.
    self._equal_rollouts = 0  # In a row, without an advantage.
    self._warned: set[str] = set()  # Conditions that last since their warning.
    self._last_seen: dict[int, int] = {}  # Budget -> its last rollout.

  def collected(self, rollout: int, collected: collection.RolloutBatch) -> None:
    """Raises FailedEpisodesError, before training, if there was an `outage`."""
    sentence = outage(
      rollout,
      collected,
      stream=self._stream,
      max_failed=self._config.max_failed,
    )
    if sentence:
      raise FailedEpisodesError(
        f"{sentence} It was not trained on. Fix the cause and run the same "
        "command again: it resumes and samples this rollout again."
      )

  def step(
    self,
    rollout: int,
    values: Mapping[str, float],
    dump: Callable[[], pathlib.Path],
  ) -> None:
    """Checks the metrics of an optimizer step of a rollout.

    Args:
      rollout: its number.
      values: metrics of the step.
      dump: is called if they are not finite; writes the rollout's trajectories
        and returns their path.

    Raises:
      NotFiniteError: this is the last of `watch.bad_steps` such steps in a row.
    """
    if values["finite"]:
      self._bad_steps = 0
      return
    self._bad_steps += 1
    difference = values.get("loss/logp_difference", 0.0)
    sentence = (
      f"Rollout {rollout}: loss {values['loss/total']}, log-probabilities of "
      f"engine and trainer {difference} apart, gradient norm "
      f"{values['grad_norm']}. The step was not applied; its trajectories are "
      f"in {dump()}."
    )
    if self._bad_steps >= self._config.bad_steps:
      raise NotFiniteError(
        f"{sentence} That is {self._bad_steps} in a row (watch.bad_steps)."
      )
    self._warn(sentence)

  def rollout(
    self,
    values: Mapping[str, float],
    example: types.Trajectory | None = None,
    *,
    turns_differ: bool = False,
  ) -> None:
    """Checks the metrics of a rollout that was trained on.

    Args:
      values: the metrics.
      example: one of its episodes, for the message of an error.
      turns_differ: whether single turns have advantages of their own.

    Raises:
      WrongWeightsError: the engine's log-probabilities were too far from the
        trainer's in `watch.gap_rollouts` rollouts in a row.
      NoGradientError: there was no advantage in `watch.equal_rollouts` rollouts
        in a row.
    """
    config = self._config
    rollout = int(values["rollout"])
    entropy = values["policy/entropy"]
    kl = values["loss/kl"]
    gap = self._gap(values)
    signs = {
      "entropy": (
        entropy < config.min_entropy,
        f"the policy's entropy is {entropy:.2g} nats a token, below "
        f"{config.min_entropy:g}: it hardly explores any more.",
      ),
      "kl": (
        kl > config.max_kl,
        f"the KL divergence from the start is {kl:.2g}, above "
        f"{config.max_kl:g}.",
      ),
      "gap": (bool(gap), f"{gap}: the engine may have other weights."),
      "advantages": (
        values["policy/advantage_share"] == 0,
        "all advantages are zero, so the policy learns nothing from it.",
      ),
    } | self._stale(values)
    for name, (is_bad, sentence) in signs.items():
      if not is_bad:
        self._warned.discard(name)
      elif name not in self._warned:
        self._warned.add(name)
        self._warn(f"Rollout {rollout}: {sentence}")
    self._gap_rollouts = self._gap_rollouts + 1 if gap else 0
    if self._gap_rollouts >= config.gap_rollouts:
      raise WrongWeightsError(
        f"Rollout {rollout}: {gap}, in {self._gap_rollouts} rollouts in a row "
        "(watch.gap_rollouts). The engine seems to have other weights than the "
        "trainer. Make sure that only this run sends weights to it, then run "
        "the same command again: it resumes and sends them again."
      )

    is_equal = values["policy/advantage_share"] == 0 and not turns_differ
    self._equal_rollouts = self._equal_rollouts + 1 if is_equal else 0
    if 0 < config.equal_rollouts <= self._equal_rollouts:
      raise NoGradientError(
        f"Rollout {rollout}: the rewards of every group were equal in "
        f"{self._equal_rollouts} rollouts in a row (watch.equal_rollouts), so "
        f"nothing is learned. {describe_rewards(values, example)} "
        f"{EQUAL_REWARDS_ADVICE}; --config.watch.equal_rollouts=0 trains on."
      )

  def _gap(self, values: Mapping[str, float]) -> str:
    """Describes a too large gap of log-probabilities; "" if there is none."""
    config = self._config
    # On policy, only numerics separate engine and trainer before the first
    # step. With older weights, training since then separates them too.
    name = "loss/logp_difference"
    if "policy/engine_gap" in values:
      name = "policy/engine_gap"
    mean = values[name]
    far = values[f"{name}_far"]
    largest = values[f"{name}_max"]
    differences = []
    if mean > config.max_gap:
      differences.append(f"by {mean:.2g} a token, more than {config.max_gap:g}")
    if far > config.max_far:
      differences.append(
        f"by more than 1 nat at {far:.2g} of the tokens, above "
        f"{config.max_far:g}"
      )
    if largest > config.max_largest_gap:
      differences.append(
        f"by {largest:.2g} at most, above {config.max_largest_gap:g}"
      )
    if not differences:
      return ""
    return (
      "log-probabilities of sampling and training differ "
      f"{', '.join(differences)}"
    )

  def _stale(self, values: Mapping[str, float]) -> dict[str, tuple[bool, str]]:
    """Finds the accuracy windows that have had no episode for too long."""
    curriculum = self._curriculum
    max_stale = self._config.max_stale
    rollout = int(values["rollout"])
    signs = {}
    for budget in range(1, curriculum.max_budget + 1):
      if values[f"curriculum/count{budget}"] or values["phase"] == 1:
        self._last_seen[budget] = rollout
      age = rollout - self._last_seen.setdefault(budget, rollout)
      signs[f"window {budget}"] = (
        age >= max_stale and curriculum.fixed_budget < 0,
        f"budget {budget} had no episode for {age} rollouts; its accuracy, by "
        "which the curriculum draws budgets, is that of an older policy.",
      )
    return signs


class Fingerprint:
  """Compares the engine's log-probabilities of a prompt with the trainer's.

  An engine may have wrong weights, because a server loaded only some of them or
  because another run replaced them. A `types.ScoringEngine` scores the prompt
  before and after each rollout; this uses no random numbers and leaves its
  cache unchanged. Other engines are not checked.

  Attributes:
    bound: `watch.max_fingerprint_gap`, nats a token.

  Args:
    engine: the engine that samples.
    prompt: its first tokens are scored.
    bound: as above.
  """

  def __init__(
    self, engine: types.TrainableEngine, *, prompt: Sequence[int], bound: float
  ):
    self.bound = bound
    self._ids = prompt[:_TOKENS]
    self._engine = engine if isinstance(engine, types.ScoringEngine) else None
    self._expected = np.zeros(0, np.float32)
    self._version = 0

  def expect(self, expected: np.ndarray, version: int) -> None:
    """Sets the trainer's `scores` of the prompt with weights of a version."""
    self._expected = expected
    self._version = version

  def check(self, rollout: int) -> Gaps:
    """Makes the engine score the prompt, and compares the result.

    Parts of a `types.FleetEngine` that have other weights are put aside if the
    others have the right ones; their gaps are above `bound`. Parts that join
    later are compared before they sample.

    Args:
      rollout: its number, for the error.

    Returns:
      The gaps of all parts; {} if the engine cannot score.

    Raises:
      EngineError: the engine's weights are not those of `expect`.
    """
    engine = self._engine
    expected = self._expected
    if engine is None or not expected.size:
      return {}

    def gap(scores: Sequence[float]) -> tuple[float, float]:
      differences = _difference(np.asarray(scores), expected)
      return float(np.mean(differences)), float(np.max(differences))

    def own_gaps() -> list[list]:
      return [[*gap(x), part] for part, x in engine.scores(self._ids).items()]

    def describe(mean: float, largest: float) -> str:
      if mean <= self.bound:  # False for NaN.
        return ""
      return (
        f"scores the prompt of the first question {mean:.2g} nats a token "
        f"({largest:.2g} at most) away from the trainer's policy"
      )

    # Processes exchange their gaps, so that all of them raise the same error.
    gathered = itertools.chain.from_iterable(processes.all_gather(own_gaps))
    # Of a part that several processes scored, the largest gap comes last.
    gaps = {part: (mean, largest) for mean, largest, part in sorted(gathered)}
    right_means = [mean for mean, _ in gaps.values() if mean <= self.bound]
    for part, (mean, largest) in gaps.items():
      reason = describe(mean, largest)
      if not reason:
        continue
      if right_means and isinstance(engine, types.FleetEngine):
        largest_right_mean = max(right_means)
        engine.put_aside(
          part, f"it {reason}, the others {largest_right_mean:.2g}"
        )
        continue
      raise types.EngineError(
        f"Rollout {rollout}: {part} of the engine {reason} of version "
        f"{self._version}, expected {self.bound:g} at most "
        "(watch.max_fingerprint_gap): it has other weights than it was given. "
        "Nothing that it sampled in this rollout was trained on. Make sure "
        "that only this run sends weights to it, then run the same command "
        "again: it resumes and sends them again."
      )
    if isinstance(engine, types.FleetEngine):
      engine.expect(self._ids, lambda scores: describe(*gap(scores)))
    return gaps


def scores(
  params: decoder.Params,
  prompt: Sequence[int],
  *,
  a: architecture_lib.Architecture,
  placed: placement.Placement,
) -> np.ndarray:
  """Scores the beginning of a prompt on the training mesh.

  All processes call this together.

  Args:
    params: of the policy, on the training mesh.
    prompt: ids; the first 128 are scored.
    a: the architecture, with its adapters.
    placed: the training mesh and the dtype of computation.

  Returns:
    Log-probabilities of all tokens but the first, float32 `[T - 1]`.
  """
  ids = np.asarray(prompt[:_TOKENS], np.int32)
  if len(ids) < 2:
    return np.zeros(0, np.float32)
  mesh_arguments: dict[str, Any] = {}
  if placed.trainer.size > 1:
    layout = sharding.Layout(placed.trainer)
    mesh_arguments = {"layout": layout, "rows": placed.row_multiple}
  logps = _score(params, ids, a=a, dtype=placed.dtype, **mesh_arguments)
  return np.asarray(processes.to_replicated(logps))


def _difference(scores: np.ndarray, expected: np.ndarray) -> np.ndarray:
  """Returns the distance of each token's log-probabilities.

  It is 0 where both are NaN: the engine then has the weights that it was given,
  and `HealthMonitor` reports that they are not finite. One NaN alone stays NaN.
  """
  both_nan = np.isnan(scores) & np.isnan(expected)
  return np.where(both_nan, 0.0, np.abs(scores - expected))


@functools.partial(jax.jit, static_argnames=("a", "dtype", "layout", "rows"))
def _score(
  params: decoder.Params,
  ids: jax.Array,
  *,
  a: architecture_lib.Architecture,
  dtype: Any,
  layout: sharding.Layout | None = None,
  rows: int = 1,
) -> jax.Array:
  """Scores all tokens but the first with the trainer's forward pass.

  A mesh shards rows and positions, so it gets the same row `rows` times, padded
  to a multiple of its context axis.
  """
  count = len(ids) - 1
  attention = "xla"
  if layout is not None and layout.context:
    attention = self_attention.GATHERED
    ids = jnp.pad(ids, (0, -count % layout.mesh.shape["context"]))
  tokens, targets = (jnp.tile(x, (rows, 1)) for x in (ids[:-1], ids[1:]))
  segments = jnp.where(jnp.arange(tokens.shape[1]) < count, 1, 0)
  logps, _ = logprobs.token_logprobs(
    params,
    a,
    tokens,
    targets,
    jnp.tile(jnp.arange(tokens.shape[1]), (rows, 1)),
    jnp.tile(segments, (rows, 1)),
    compute=decoder.Compute(dtype=dtype, layout=layout, attention=attention),
  )
  return logps[0, :count]
