"""Stops an unhealthy run, and warns of problems that do not stop it.

A warning is logged when a condition begins, and again only after it has ended.
"""

from __future__ import annotations

import logging
import pathlib
from collections.abc import Callable, Mapping

from anysearch_jax import config as config_lib
from anysearch_jax.training import collection, rollout_buffer

_log = logging.getLogger(__name__)


class NotFiniteError(RuntimeError):
  """`watch.bad_steps` steps in a row had a non-finite loss or gradient."""


class FailedEpisodesError(RuntimeError):
  """Too many episodes failed because engine or retriever were unavailable."""


def outage(
  rollout: int,
  collected: rollout_buffer.RolloutBatch,
  *,
  stream: collection.QuestionStream,
  max_failed: float,
) -> str:
  """Returns why a rollout must not be trained on, or "" if it may be.

  Args:
    rollout: its number.
    collected: its episodes.
    stream: gives the size of a rollout.
    max_failed: `watch.max_failed`, the largest share of failed episodes. A
      rollout that failures left without a group must not be trained on either.
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


class HealthMonitor:
  """Monitors the health of a run, from one rollout to the next.

  Args:
    config: limits.
    stream: gives the size of a rollout.
    curriculum: its budgets have windows, which may become stale.
    warn: called with the sentence of each warning.
  """

  def __init__(
    self,
    config: config_lib.WatchConfig,
    *,
    stream: collection.QuestionStream,
    curriculum: config_lib.CurriculumConfig,
    warn: Callable[[str], None] = _log.warning,
  ):
    self._config, self._warn = config, warn
    self._stream, self._curriculum = stream, curriculum
    self._bad = 0  # Steps in a row that were not finite.
    self._apart = 0  # Rollouts in a row whose log-probs differ too much.
    self._on: set[str] = set()  # Conditions that were warned of and last.
    self._last_seen: dict[int, int] = {}  # Budget -> its last rollout.

  def collected(
    self, rollout: int, collected: rollout_buffer.RolloutBatch
  ) -> None:
    """Checks a rollout's episodes before it is trained on.

    Raises:
      FailedEpisodesError: the rollout had an `outage`.
    """
    if found := outage(
      rollout,
      collected,
      stream=self._stream,
      max_failed=self._config.max_failed,
    ):
      raise FailedEpisodesError(
        f"{found} It was not trained on. Fix the cause and run the same "
        "command again: it resumes and samples this rollout again."
      )

  def step(
    self,
    rollout: int,
    values: Mapping[str, float],
    dump: Callable[[], pathlib.Path],
  ) -> None:
    """Checks the metrics of an optimizer step.

    Args:
      rollout: number of the step's rollout.
      values: metrics of the step.
      dump: writes the rollout's trajectories and returns their path.

    Raises:
      NotFiniteError: this was the last of `watch.bad_steps` non-finite steps in
        a row.
    """
    if values["finite"]:
      self._bad = 0
      return
    self._bad += 1
    sentence = (
      f"Rollout {rollout}: loss {values['loss/total']}, gradient norm "
      f"{values['grad_norm']}. The step was not applied; its trajectories are "
      f"in {dump()}."
    )
    if self._bad >= self._config.bad_steps:
      raise NotFiniteError(
        f"{sentence} That is {self._bad} in a row (watch.bad_steps)."
      )
    self._warn(sentence)

  def rollout(self, values: Mapping[str, float]) -> None:
    """Checks the metrics of a rollout that was trained on.

    Raises:
      WrongWeightsError: in this and the rollouts before it, in
        `watch.gap_rollouts` altogether, the engine's log-probabilities were
        too far from the trainer's.
    """
    c, rollout = self._config, int(values["rollout"])
    entropy, kl = values["policy/entropy"], values["loss/kl"]
    apart = self._gap(values)
    signs = {
      "entropy": (
        entropy < c.min_entropy,
        f"the policy's entropy is {entropy:.2g} nats a token, below "
        f"{c.min_entropy:g}: it hardly explores any more.",
      ),
      "kl": (
        kl > c.max_kl,
        f"the KL divergence from the start is {kl:.2g}, above {c.max_kl:g}.",
      ),
      "gap": (bool(apart), f"{apart}: the engine may have other weights."),
      "advantages": (
        values["policy/advantage_share"] == 0,
        "all advantages are zero, so the policy learns nothing from it.",
      ),
    } | self._stale(values)
    for name, (on, sentence) in signs.items():
      if on and name not in self._on:
        self._warn(f"Rollout {rollout}: {sentence}")
      (self._on.add if on else self._on.discard)(name)
    self._apart = self._apart + 1 if apart else 0
    if self._apart >= c.gap_rollouts:
      raise WrongWeightsError(
        f"Rollout {rollout}: {apart}, in {self._apart} rollouts in a row "
        "(watch.gap_rollouts). The engine seems to have other weights than the "
        "trainer. Make sure that only this run sends weights to it, then run "
        "the same command again: it resumes and sends them again."
      )

  def _gap(self, values: Mapping[str, float]) -> str:
    """Describes a too large gap of log-probabilities; "" if there is none."""
    c = self._config
    # On policy, only numerics separate engine and trainer before the first
    # step. With older weights, training since then separates them too.
    name = "loss/logp_difference"
    if "policy/engine_gap" in values:
      name = "policy/engine_gap"
    mean, far, largest = (values[name + x] for x in ("", "_far", "_max"))
    found = []
    if mean > c.max_gap:
      found.append(f"by {mean:.2g} a token, more than {c.max_gap:g}")
    if far > c.max_far:
      found.append(
        f"by more than 1 nat at {far:.2g} of the tokens, above {c.max_far:g}"
      )
    if largest > c.max_largest_gap:
      found.append(f"by {largest:.2g} at most, above {c.max_largest_gap:g}")
    if not found:
      return ""
    return (
      f"log-probabilities of sampling and training differ {', '.join(found)}"
    )

  def _stale(self, values: Mapping[str, float]) -> dict[str, tuple[bool, str]]:
    """Finds the accuracy windows that have had no episode for too long."""
    c, bound = self._curriculum, self._config.max_stale
    rollout, signs = int(values["rollout"]), {}
    for budget in range(1, c.max_budget + 1):
      if values[f"curriculum/count{budget}"] or values["phase"] == 1:
        self._last_seen[budget] = rollout
      age = rollout - self._last_seen.setdefault(budget, rollout)
      signs[f"window {budget}"] = (
        age >= bound and c.fixed_budget < 0,
        f"budget {budget} had no episode for {age} rollouts; its accuracy, by "
        "which the curriculum draws budgets, is that of an older policy.",
      )
    return signs
