"""Assigns budgets, samples a rollout and scores it, before it is trained on.

A rollout's budgets depend on the outcomes of all earlier rollouts, trained on
or not: the curriculum records a rollout as soon as it is scored. The assignment
is therefore the same function of earlier outcomes at every `async_level`.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np

from anysearch_jax import config as config_lib
from anysearch_jax import types
from anysearch_jax.algorithms import curriculum as curriculum_lib
from anysearch_jax.algorithms import method as method_lib
from anysearch_jax.host import disk, loop
from anysearch_jax.policy import decoder
from anysearch_jax.rollout import driver, searching
from anysearch_jax.training import collection, health, rewards_and_advantages
from anysearch_jax.training import timeline as timeline_lib

_log = logging.getLogger(__name__)


class SamplerState(NamedTuple):
  """The state of sampling before a rollout.

  counters: totals of the whole run, across resumes. Never modified in place.
  """

  curriculum: curriculum_lib.CurriculumState
  counters: Mapping[str, Counter[str]]


class ScoredRollout(NamedTuple):
  """A scored rollout to train on.

  levels: int32 `[Q]`, the level of each group, as `Assignment.budgets`.
  probabilities: the distribution over levels that Phase II draws from.
  state: the state of sampling after this rollout.
  """

  rollout: int
  scaffold: bool
  levels: np.ndarray
  probabilities: np.ndarray
  collected: collection.RolloutBatch
  scored: rewards_and_advantages.Experience
  state: SamplerState

  @property
  def counted(self) -> collection.RolloutBatch:
    """`collected` with the trajectories that could not be measured as failed.

    A checkpoint stores `collected`, because a resumed run measures again.
    """
    return self.collected.with_failed(self.scored.unmeasured)


class HandedOver(NamedTuple):
  """Weights for an engine.

  params: the parameters.
  scores: the trainer's of the fingerprint's prompt (`health.scores`).
  """

  params: decoder.Params
  scores: np.ndarray


def initial(config: config_lib.ExperimentConfig) -> SamplerState:
  """Returns the state before the first rollout."""
  return SamplerState(
    curriculum_lib.init(config.curriculum, config.seed),
    {"run": Counter(), "engine": Counter()},
  )


class StoppedError(BaseException):
  """`Sampler.stop` was called.

  It is no `Exception`: where all processes sample, each of them stops by
  itself, and does not wait until all have been told.
  """


class Sampler:
  """Samples the rollouts of a run in order; any one thread may call it.

  With several processes, the first one has it alone (`processes.alone`), or
  all have one and call it together, each with an engine of its own.

  Another one may hand over weights meanwhile (`pipeline.partial`). The engine
  scores `prompt`, which tells its weights.

  state: the state of sampling before the next rollout.

  Nothing else uses the engine.
  """

  def __init__(
    self,
    config: config_lib.ExperimentConfig,
    stream: collection.QuestionStream,
    *,
    method: method_lib.TrainedMethod,
    prompt: Sequence[int],
    codec: types.TextCodec,
    engine: types.TrainableEngine,
    retriever: types.Retriever,
    timeline: timeline_lib.Timeline,
  ):
    self.state = initial(config)
    self._config = config
    self._curriculum = config.curriculum
    self._engine = engine
    self._timeline = timeline
    self._method = method
    environment = method.environment
    parts = driver.EpisodeParts(
      engine, retriever, config.episode, codec, environment
    )
    self._collector = collection.Collector(
      stream,
      parts,
      timeline,
      slots=config.engine.slots,
      quiet_seconds=config.watch.quiet_seconds,
      prices=config.evaluation.prices,
    )
    self._fingerprint = health.Fingerprint(
      engine,
      prompt=prompt,
      bound=config.watch.max_fingerprint_gap,
    )
    self._handing = threading.Lock()
    self._scope = loop.Scope(lambda: StoppedError("The sampler was stopped."))

  def set_params(self, rollout: int, weights: HandedOver, version: int) -> None:
    """Gives the engine the weights that sample from `rollout` on.

    Raises:
      types.EngineError: the engine did not take them.
    """
    partial = self._config.pipeline.partial
    track = timeline_lib.WEIGHTS if partial else timeline_lib.SAMPLER
    with (
      self._handing,
      self._timeline.span(rollout, track, "sync", version=version),
    ):
      self.expect(weights.scores, version)
      try:
        self._engine.set_params(jax.block_until_ready(weights.params), version)
      except disk.DiskError:
        raise
      except OSError as error:
        raise types.EngineError(
          f"The weights of version {version} could not be handed over: {error}."
          " Look at the disk or folder (sglang.weights), then start the same "
          "command again."
        ) from error

  def expect(self, scores: np.ndarray, version: int) -> None:
    """Sets `HandedOver.scores` of the engine's weights; `sample` compares."""
    self._fingerprint.expect(scores, version)

  def sample(self, rollout: int) -> ScoredRollout:
    """Plays the next rollout, scores it and records its outcomes.

    Raises:
      StoppedError: `stop` was called.
      types.EngineError: the engine's weights are not those it was given.
    """
    before = after = self._verify(rollout)
    with self._timeline.span(rollout, timeline_lib.SAMPLER, "collect"):
      assignment = self._assign()
      collected = self._collector.collect(rollout, assignment, self._scope)
    # Another run may have replaced the weights meanwhile. If every group
    # failed, there is nothing to train on and the engine may not answer.
    if any(collected.groups):
      after = self._verify(rollout)
      collected.engine.update(["fingerprints"] * (bool(before) + bool(after)))
      if any(not mean <= self._fingerprint.bound for mean, _ in after.values()):
        spoilt = {"failed_rollouts": 1}
        self.state = _counted(self.state, spoilt, collected.engine)
        return self.sample(rollout)  # Without those that were put aside.
    if after:
      both = sorted([*before.items(), *after.items()])
      of_parts = [gap for part, gap in both if part in after]
      collected = collected._replace(
        fingerprint=max(mean for mean, _ in of_parts),
        fingerprint_max=max(largest for _, largest in of_parts),
        # The larger mean of a part comes last.
        gaps={part: mean for part, (mean, _) in both},
      )
    return self._enter(rollout, assignment, collected)

  def score_stored(
    self, first: int, packed: collection.StoredRollouts
  ) -> list[ScoredRollout]:
    """Scores and records the stored rollouts of a checkpoint, from `first` on.

    The result ends before the first rollout that must not be trained on: one
    that is too old for this run's `async_level`, or that had an outage
    (`health.outage`). That one and all later ones are sampled again, because
    later budgets depend on its outcomes.
    """
    stream = self._collector.stream
    played = collection.unpack(packed, stream.question)
    ready: list[ScoredRollout] = []
    most = self._config.watch.max_failed
    for rollout, collected in enumerate(played, start=first):
      left = len(played) - len(ready)
      if outage := health.outage(
        rollout, collected, stream=stream, max_failed=most
      ):
        self.state = discarded(self.state, outage, failed_rollouts=left)
        break
      ages = token_ages(rollout, collected.groups)
      if stale(rollout, ages, bound=self._config.pipeline.async_level):
        why = f"Rollout {rollout} is older than pipeline.async_level allows."
        self.state = discarded(self.state, why, stale_rollouts=left)
        break
      ready.append(self._enter(rollout, self._assign(), collected))
    return ready

  def _verify(self, rollout: int) -> health.Gaps:
    span = self._timeline.span(rollout, timeline_lib.SAMPLER, "fingerprint")
    with span, self._handing:
      return self._fingerprint.check(rollout)

  def stop(self) -> None:
    """Cancels the rollout in progress and all later ones. Thread-safe."""
    self._scope.stop()

  def _assign(self) -> curriculum_lib.Assignment:
    state = self.state.curriculum
    groups = self._collector.stream.per_rollout
    return jax.device_get(
      curriculum_lib.assign(state, num_groups=groups, config=self._curriculum)
    )

  def _enter(
    self,
    rollout: int,
    assignment: curriculum_lib.Assignment,
    collected: collection.RolloutBatch,
  ) -> ScoredRollout:
    """Scores a rollout and records its outcomes in the curriculum."""
    c = self._curriculum
    stream = self._collector.stream
    before = self.state.curriculum
    with self._timeline.span(rollout, timeline_lib.SAMPLER, "score"):
      probabilities = curriculum_lib.distribution(before, config=c)
      levels = np.asarray(assignment.budgets)[collected.places]
      tokens = None
      if assignment.tokens is not None:
        caps = np.asarray(assignment.tokens)[collected.places]
        tokens = np.repeat(caps, stream.samples)
      step = rollout * c.steps_per_rollout
      scored = rewards_and_advantages.score(
        collected.groups,
        levels,
        samples=stream.samples,
        method=self._method,
        objective=self._config.objective,
        progress=method_lib.Progress(rollout, step, c.total_steps),
        run=self._scope.run,
        searchless=stream.searchless,
      )
      # What is played without searches says nothing of the budget.
      searching = np.arange(stream.samples) < stream.samples - stream.searchless
      recorded = curriculum_lib.record(
        before,
        np.repeat(levels, stream.samples),
        scored.em.reshape(-1),
        (scored.valid & searching).reshape(-1),
        config=c,
        tokens=tokens,
      )
    played = stream.per_rollout - collected.stragglers
    self.state = _counted(
      self.state._replace(curriculum=recorded),
      {
        "optimizer_steps": c.steps_per_rollout,
        "trajectories": (played + collected.resampled) * stream.samples,
        "failed": collected.failed + len(scored.unmeasured),
        "dropped_groups": collected.dropped,
        "resampled_groups": collected.resampled,
        "stragglers": collected.stragglers,
        "stale_rollouts": 0,
        "failed_rollouts": 0,
      },
      collected.engine,
    )
    return ScoredRollout(
      *(rollout, bool(assignment.scaffold), levels, np.asarray(probabilities)),
      *(collected, scored, self.state),
    )


def discarded(state: SamplerState, why: str, **counts: int) -> SamplerState:
  """Logs why stored rollouts are sampled again, and counts them."""
  _log.warning(
    "%s Sampling again with the checkpoint's weights: stored rollouts from "
    "this one on, %d in all.",
    why,
    sum(counts.values()),
  )
  return _counted(state, counts)


def _counted(
  state: SamplerState, run: Mapping[str, int], engine: Mapping[str, int] = {}
) -> SamplerState:
  """Adds counts of the run and of the engine."""
  counters = {name: Counter(c) for name, c in state.counters.items()}
  counters["run"].update(run)
  counters["engine"].update(engine)
  return state._replace(counters=counters)


def metrics(
  sampled: ScoredRollout,
  ages: np.ndarray,
  *,
  config: config_lib.CurriculumConfig,
) -> dict[str, float]:
  """Returns the metrics of a sampled rollout, as one flat record.

  `ages` are its `token_ages`.
  """
  step = sampled.rollout * config.steps_per_rollout
  collected = sampled.counted
  budgets = range(1, config.max_budget + 1)
  of_searches = sampled.probabilities.reshape(config.max_budget, -1)
  # A fixed budget may be 0, or above `max_budget`.
  levels = sorted({*budgets, *map(int, sampled.levels)})
  caps = [group.caps.tokens for group in collected.groups if group]
  out = {
    "rollout": sampled.rollout,
    "step": step + config.steps_per_rollout,
    "phase": 1 if step < config.phase1_steps else 2,
    "scaffold": int(sampled.scaffold),
    # With token levels, of all pairs with this number of searches.
    **{f"curriculum/p{b}": float(of_searches[b - 1].sum()) for b in budgets},
    **{
      f"curriculum/count{b}": int(np.sum(sampled.levels == b)) for b in levels
    },
    **{f"curriculum/tokens{t}": caps.count(t) for t in config.token_levels},
    **rewards_and_advantages.metrics(sampled.scored),
    "rollout/failed": collected.failed,
    "rollout/dropped_groups": collected.dropped,
    "rollout/resampled_groups": collected.resampled,
    "rollout/stragglers": collected.stragglers,
    **{
      f"{group}/{name}": count
      for group, counts in sampled.state.counters.items()
      for name, count in counts.items()
    },
    "policy/staleness_mean": float(ages.mean()) if ages.size else 0.0,
    "policy/staleness_max": float(ages.max(initial=0)),
  }
  if collected.search:
    out |= searching.metrics(collected.search)
  if collected.engine["fingerprints"]:
    out["rollout/fingerprint"] = collected.fingerprint
    out["rollout/fingerprint_max"] = collected.fingerprint_max
    for part, gap in collected.gaps.items():
      if server := part.partition("://")[2]:
        out[f"engine/server/{server}/fingerprint"] = gap
  if offered := collected.engine["lanes_offered"]:
    out["engine/lanes_occupied"] = collected.engine["lanes_used"] / offered
  return out


class StaleError(RuntimeError):
  """A rollout holds tokens whose age is out of bounds."""


def token_ages(
  rollout: int, groups: Iterable[types.Group | None]
) -> np.ndarray:
  """Returns the ages of the tokens that are trained on, int `[tokens]`.

  Version v of the policy is the weights after training on v rollouts. A token
  of rollout k that was sampled with version v has age k - v, in rollouts.
  """
  versions = [
    t.versions[t.authors == types.Author.MODEL]
    for group in groups
    if group
    for t in group.trajectories
    if not t.failed
  ]
  return rollout - np.concatenate([np.zeros(0, np.int32), *versions])


def stale(rollout: int, ages: np.ndarray, *, bound: int) -> str:
  """Returns why a rollout's tokens must not be trained on, or "".

  Their ages must be in [0, bound], and no version below 0. The sentence names
  the oldest version or, if a version is newer than the trainer's, the newest.
  """
  if np.all((ages >= 0) & (ages <= min(bound, rollout))):
    return ""
  worst = int(ages.min() if ages.min() < 0 else ages.max())
  return (
    f"Rollout {rollout} holds tokens of policy version {rollout - worst}, "
    f"expected {max(0, rollout - bound)} to {rollout} (pipeline.async_level "
    f"{bound}). It was not trained on."
  )
