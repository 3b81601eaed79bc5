"""Assigns budgets, samples a rollout and scores it, before it is trained on.

A rollout's budgets depend on the outcomes of all earlier rollouts, trained on
or not: the curriculum records a rollout as soon as it is scored. The assignment
is therefore the same function of earlier outcomes at every `async_level`.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np

from anysearch_jax import budgets as budgets_lib
from anysearch_jax import config as config_lib
from anysearch_jax import types
from anysearch_jax.algorithms import curriculum as curriculum_lib
from anysearch_jax.host import loop
from anysearch_jax.methods import method as method_lib
from anysearch_jax.policy import decoder
from anysearch_jax.rollout import searching
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


class Settings(NamedTuple):
  """How budgets are assigned and rollouts scored.

  curriculum: assigns budgets.
  method: what is trained.
  objective: sets how advantages are normalised.
  async_level: `pipeline.async_level`, the largest age of a stored rollout.
  max_failed: `watch.max_failed`, the largest share of a stored rollout's
    episodes that failed.
  """

  curriculum: config_lib.CurriculumConfig
  method: method_lib.TrainedMethod
  objective: config_lib.ObjectiveConfig
  async_level: int
  max_failed: float


class StoppedError(BaseException):
  """`Sampler.stop` was called.

  It is no `Exception`: the processes of a run stop each by itself, and do not
  wait until all have been told.
  """


class Sampler:
  """Samples the rollouts of a run in order; any one thread may call it.

  Args:
    engine: gets new weights between rollouts; only this sampler may use it.
    collector: plays rollouts with the engine.
    fingerprint: verifies the engine's weights.
    settings: how budgets are assigned and rollouts scored.
    state: the state of sampling before the first rollout to sample.
    timeline: records durations.
  """

  def __init__(
    self,
    engine: types.TrainableEngine,
    collector: collection.Collector,
    fingerprint: health.Fingerprint,
    *,
    settings: Settings,
    state: SamplerState,
    timeline: timeline_lib.Timeline,
  ):
    self.state = state
    self._engine, self._collector = engine, collector
    self._fingerprint = fingerprint
    self._settings = settings
    self._timeline = timeline
    self._scope = loop.Scope(lambda: StoppedError("The sampler was stopped."))

  def set_params(
    self, rollout: int, params: decoder.Params, version: int
  ) -> None:
    """Gives the engine the weights that sample from `rollout` on."""
    with self._timeline.span(
      rollout, timeline_lib.SAMPLER, "sync", version=version
    ):
      self.expect(params, version)
      self._engine.set_params(jax.block_until_ready(params), version)

  def expect(self, params: decoder.Params, version: int) -> None:
    """Sets the weights that the engine should have; `sample` verifies them."""
    self._fingerprint.expect(params, version)

  def sample(self, rollout: int) -> ScoredRollout:
    """Plays the next rollout, scores it and records its outcomes.

    Raises:
      StoppedError: `stop` was called.
      types.EngineError: the engine's weights are not those it was given.
    """
    before = self._verify(rollout)
    with self._timeline.span(rollout, timeline_lib.SAMPLER, "collect"):
      assignment = self._assign()
      collected = self._collector.collect(rollout, assignment, self._scope)
    # Another run may have replaced the weights meanwhile. If every group
    # failed, there is nothing to train on and the engine may not answer.
    after = self._verify(rollout) if any(collected.groups) else before
    if after.parts:
      collected.engine.update(fingerprints=bool(before.parts) + 1)
      collected = collected._replace(
        fingerprint=max(before.mean, after.mean),
        fingerprint_max=max(before.largest, after.largest),
      )
    return self._enter(rollout, assignment, collected)

  def score_played(
    self, rollout: int, collected: collection.RolloutBatch
  ) -> ScoredRollout:
    """Scores and records the next rollout, played before a resume."""
    return self._enter(rollout, self._assign(), collected)

  def score_stored(
    self, first: int, packed: collection.StoredRollouts
  ) -> list[ScoredRollout]:
    """Scores and records the stored rollouts of a checkpoint, from `first` on.

    The result ends before the first rollout that must not be trained on: one
    that is too old for this run's `async_level`, or that had an outage
    (`health.outage`). That one and all later ones are sampled again, because
    later budgets depend on its outcomes.
    """
    level, stream = self._settings.async_level, self._collector.stream
    played = collection.unpack(packed, stream.question)
    ready: list[ScoredRollout] = []
    for rollout, collected in enumerate(played, start=first):
      ages = token_ages(rollout, collected.groups)
      outage = health.outage(
        rollout,
        collected,
        stream=stream,
        max_failed=self._settings.max_failed,
      )
      if outage:
        self.discard_stored(outage, failed_rollouts=len(played) - len(ready))
        break
      if not holds(rollout, ages, bound=level):
        self.discard_stored(
          f"Rollout {rollout} is older than pipeline.async_level allows.",
          stale_rollouts=len(played) - len(ready),
        )
        break
      ready.append(self.score_played(rollout, collected))
    return ready

  def discard_stored(self, why: str, **counts: int) -> None:
    """Logs why stored rollouts are sampled again, and counts them."""
    _log.warning(
      "%s Sampling again with the checkpoint's weights: stored rollouts from "
      "this one on, %d in all.",
      why,
      sum(counts.values()),
    )
    counters = {name: Counter(c) for name, c in self.state.counters.items()}
    counters["run"].update(counts)
    self.state = self.state._replace(counters=counters)

  def _verify(self, rollout: int) -> health.Gap:
    with self._timeline.span(rollout, timeline_lib.SAMPLER, "fingerprint"):
      return self._fingerprint.check(rollout)

  def stop(self) -> None:
    """Cancels the rollout in progress and all later ones. Thread-safe."""
    self._scope.stop()

  def _assign(self) -> curriculum_lib.Assignment:
    return jax.device_get(
      curriculum_lib.assign(
        self.state.curriculum,
        num_groups=self._collector.stream.per_rollout,
        config=self._settings.curriculum,
      )
    )

  def _enter(
    self,
    rollout: int,
    assignment: curriculum_lib.Assignment,
    collected: collection.RolloutBatch,
  ) -> ScoredRollout:
    """Scores a rollout and records its outcomes in the curriculum."""
    settings, stream = self._settings, self._collector.stream
    with self._timeline.span(rollout, timeline_lib.SAMPLER, "score"):
      probabilities = curriculum_lib.distribution(
        self.state.curriculum, config=settings.curriculum
      )
      levels = np.asarray(assignment.budgets)[collected.places]
      searches = levels
      if assignment.cents is not None:
        searches = np.full_like(levels, budgets_lib.UNCAPPED)
      scored = rewards_and_advantages.score(
        collected.groups,
        searches,
        samples=stream.samples,
        method=settings.method,
        objective=settings.objective,
        progress=progress(rollout, settings.curriculum),
        run=self._scope.run,
      )
      recorded = curriculum_lib.record(
        self.state.curriculum,
        np.repeat(levels, stream.samples),
        scored.em.reshape(-1),
        scored.valid.reshape(-1),
        config=settings.curriculum,
        tokens=_tokens(assignment, collected.places, stream.samples),
      )
      known = collected.with_failed(scored.unmeasured)
      self.state = SamplerState(recorded, self._counted(known))
    return ScoredRollout(
      rollout,
      bool(assignment.scaffold),
      levels,
      np.asarray(probabilities),
      collected,
      scored,
      self.state,
    )

  def _counted(
    self, collected: collection.RolloutBatch
  ) -> Mapping[str, Counter[str]]:
    """Returns the counters after adding a rollout."""
    counters = {name: Counter(c) for name, c in self.state.counters.items()}
    stream = self._collector.stream
    played = stream.per_rollout - collected.stragglers
    counters["run"].update(
      optimizer_steps=self._settings.curriculum.steps_per_rollout,
      trajectories=(played + collected.resampled) * stream.samples,
      failed=collected.failed,
      dropped_groups=collected.dropped,
      resampled_groups=collected.resampled,
      stragglers=collected.stragglers,
      stale_rollouts=0,
      failed_rollouts=0,
    )
    counters["engine"].update(collected.engine)
    return counters


def _tokens(
  assignment: curriculum_lib.Assignment, places: np.ndarray, samples: int
) -> np.ndarray | None:
  """Returns the cap on tokens of each trajectory; None if none is assigned."""
  if assignment.tokens is None:
    return None
  return np.repeat(np.asarray(assignment.tokens)[places], samples)


def progress(
  rollout: int, config: config_lib.CurriculumConfig
) -> method_lib.Progress:
  """Returns how far a training is when `rollout`, from 0, is scored."""
  step = rollout * config.steps_per_rollout
  return method_lib.Progress(rollout, step, config.total_steps)


def drawn(budgets: np.ndarray, *, max_budget: int) -> dict[str, int]:
  """Counts the groups of each budget in a rollout.

  Args:
    budgets: int `[Q]`. A fixed budget may be 0, or above `max_budget`.
    max_budget: the result has every budget from 1 to this one, even without a
      group.
  """
  levels = sorted({*range(1, max_budget + 1), *map(int, budgets)})
  return {f"curriculum/count{b}": int(np.sum(budgets == b)) for b in levels}


def drawn_tokens(
  groups: Sequence[types.Group | None], levels: Sequence[int]
) -> dict[str, int]:
  """Counts the kept groups of each token level in a rollout."""
  caps = [group.caps.tokens for group in groups if group]
  return {f"curriculum/tokens{t}": caps.count(t) for t in levels}


def metrics(
  sampled: ScoredRollout, *, config: config_lib.CurriculumConfig
) -> dict[str, float]:
  """Returns the metrics of a sampled rollout, as one flat record."""
  step = sampled.rollout * config.steps_per_rollout
  collected = sampled.counted
  levels = range(1, config.max_budget + 1)
  of_searches = sampled.probabilities.reshape(config.max_budget, -1)
  out = {
    "rollout": sampled.rollout,
    "step": step + config.steps_per_rollout,
    "phase": 1 if step < config.phase1_steps else 2,
    "scaffold": int(sampled.scaffold),
    # With token levels, of all pairs with this number of searches.
    **{f"curriculum/p{b}": float(of_searches[b - 1].sum()) for b in levels},
    **drawn(sampled.levels, max_budget=config.max_budget),
    **drawn_tokens(sampled.collected.groups, config.token_levels),
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
  }
  if collected.search:
    out |= searching.metrics(collected.search)
  if collected.engine["fingerprints"]:
    out["rollout/fingerprint"] = collected.fingerprint
    out["rollout/fingerprint_max"] = collected.fingerprint_max
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


def holds(rollout: int, ages: np.ndarray, *, bound: int) -> bool:
  """Whether all ages are in [0, bound], and no version is below 0."""
  return bool(np.all((ages >= 0) & (ages <= min(bound, rollout))))


def check_ages(rollout: int, ages: np.ndarray, *, bound: int) -> None:
  """Checks the ages of a rollout's tokens.

  Raises:
    StaleError: an age is out of bounds. It names the oldest version or, if a
      version is newer than the trainer's, the newest.
  """
  if not holds(rollout, ages, bound=bound):
    worst = int(ages.min() if ages.min() < 0 else ages.max())
    raise StaleError(
      f"Rollout {rollout} holds tokens of policy version {rollout - worst}, "
      f"expected {max(0, rollout - bound)} to {rollout} (pipeline.async_level "
      f"{bound}). It was not trained on."
    )


def age_metrics(ages: np.ndarray) -> dict[str, float]:
  """Returns mean and maximum of the ages; 0 if there is no token."""
  ages = ages if ages.size else np.zeros(1)
  return {
    "policy/staleness_mean": float(ages.mean()),
    "policy/staleness_max": float(ages.max()),
  }
