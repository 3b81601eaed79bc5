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

  Attributes:
    curriculum: the state of the budget curriculum.
    counters: totals of the whole run, across resumes, by group of metrics and
      name. Never modified in place.
  """

  curriculum: curriculum_lib.CurriculumState
  counters: Mapping[str, Counter[str]]


class ScoredRollout(NamedTuple):
  """A scored rollout to train on.

  Attributes:
    rollout: its number.
    scaffold: whether the budget was stated before each turn.
    levels: int32 `[Q]`, the level of each group, as `Assignment.budgets`.
    probabilities: the distribution over levels that Phase II draws from.
    collected: its groups as they were played.
    scored: its groups with their rewards and advantages.
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

  Attributes:
    params: the parameters.
    scores: log-probabilities of the fingerprint's prompt under them, as the
      trainer computes them (`health.scores`).
  """

  params: decoder.Params
  scores: np.ndarray


def initial_state(config: config_lib.ExperimentConfig) -> SamplerState:
  """Returns the state before the first rollout."""
  return SamplerState(
    curriculum_lib.init(config.curriculum, config.seed),
    {"run": Counter(), "engine": Counter()},
  )


class StoppedError(BaseException):
  """`Sampler.stop` was called.

  It is no `Exception`, so that where all processes sample, each of them stops
  by itself instead of exchanging the error with the others.
  """


class Sampler:
  """Samples the rollouts of a run in order.

  One thread calls it; with `pipeline.partial`, another one may hand over
  weights meanwhile. With several processes, only the first one has a sampler
  (`processes.alone`), or all have one and call it together, each with an engine
  of its own.

  Attributes:
    state: the state of sampling before the next rollout.

  Args:
    config: the whole configuration.
    stream: the training questions.
    method: the system that is trained, with its environment.
    prompt: ids of a prompt whose scores by the engine tell its weights.
    codec: of the policy.
    engine: samples; nothing else uses it.
    retriever: answers the searches.
    timeline: gets the spans of sampling.
    player: plays the episodes; None: `driver.run_episode` does.
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
    player: driver.Player | None = None,
  ):
    self.state = initial_state(config)
    self._config = config
    self._curriculum = config.curriculum
    self._engine = engine
    self._timeline = timeline
    self._method = method
    environment = method.environment
    parts = driver.EpisodeParts(
      engine,
      retriever,
      config.episode,
      codec,
      environment,
      trains=True,
      player=player,
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

    Args:
      rollout: number of that rollout.
      weights: the parameters, with the trainer's scores.
      version: of the weights.

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
          " Look at the disk or folder (servers.weights), then start the same "
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
    gaps_before = gaps_after = self._verify(rollout)
    with self._timeline.span(rollout, timeline_lib.SAMPLER, "collect"):
      assignment = self._assign()
      collected = self._collector.collect(rollout, assignment, self._scope)
    # Another run may have replaced the weights meanwhile. If every group
    # failed, there is nothing to train on and the engine may not answer.
    if any(collected.groups):
      gaps_after = self._verify(rollout)
      checks = [gaps for gaps in (gaps_before, gaps_after) if gaps]
      collected.engine.update("fingerprints" for _ in checks)
      bound = self._fingerprint.bound
      # A comparison with NaN is False, so NaN is a wrong weight too.
      if not all(mean <= bound for mean, _ in gaps_after.values()):
        counts = {"failed_rollouts": 1}
        self.state = _counted(self.state, counts, collected.engine)
        return self.sample(rollout)  # Without the parts that were put aside.
    if gaps_after:
      by_part = sorted([*gaps_before.items(), *gaps_after.items()])
      part_gaps = [gap for part, gap in by_part if part in gaps_after]
      collected = collected._replace(
        fingerprint=max(mean for mean, _ in part_gaps),
        fingerprint_max=max(largest for _, largest in part_gaps),
        # The larger mean of a part comes last.
        gaps={part: mean for part, (mean, _) in by_part},
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
    played = collection.deserialize(packed, stream.question)
    ready: list[ScoredRollout] = []
    max_failed = self._config.watch.max_failed
    for rollout, collected in enumerate(played, start=first):
      remaining = len(played) - len(ready)
      if outage := health.outage(
        rollout, collected, stream=stream, max_failed=max_failed
      ):
        self.state = count_discarded(
          self.state, outage, failed_rollouts=remaining
        )
        break
      ages = token_ages(rollout, collected.groups)
      if describe_stale(rollout, ages, bound=self._config.pipeline.async_level):
        reason = f"Rollout {rollout} is older than pipeline.async_level allows."
        self.state = count_discarded(
          self.state, reason, stale_rollouts=remaining
        )
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
    config = self._curriculum
    stream = self._collector.stream
    curriculum = self.state.curriculum
    with self._timeline.span(rollout, timeline_lib.SAMPLER, "score"):
      probabilities = curriculum_lib.distribution(curriculum, config=config)
      levels = np.asarray(assignment.budgets)[collected.places]
      tokens = None
      if assignment.tokens is not None:
        caps = np.asarray(assignment.tokens)[collected.places]
        tokens = np.repeat(caps, stream.samples)
      step = rollout * config.steps_per_rollout
      scored = rewards_and_advantages.score(
        collected.groups,
        levels,
        samples=stream.samples,
        method=self._method,
        objective=self._config.objective,
        progress=method_lib.Progress(rollout, step, config.total_steps),
        run=self._scope.run,
        searchless=stream.searchless,
      )
      # What is played without searches says nothing of the budget.
      searching = np.arange(stream.samples) < stream.samples - stream.searchless
      recorded = curriculum_lib.record(
        curriculum,
        np.repeat(levels, stream.samples),
        scored.em.reshape(-1),
        (scored.valid & searching).reshape(-1),
        config=config,
        tokens=tokens,
      )
    played = stream.per_rollout - collected.stragglers
    self.state = _counted(
      self.state._replace(curriculum=recorded),
      {
        "optimizer_steps": config.steps_per_rollout,
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
      rollout=rollout,
      scaffold=bool(assignment.scaffold),
      levels=levels,
      probabilities=np.asarray(probabilities),
      collected=collected,
      scored=scored,
      state=self.state,
    )


def count_discarded(
  state: SamplerState, reason: str, **counts: int
) -> SamplerState:
  """Logs why stored rollouts are sampled again, and counts them."""
  _log.warning(
    "%s Sampling again with the checkpoint's weights: stored rollouts from "
    "this one on, %d in all.",
    reason,
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

  Args:
    sampled: the rollout.
    ages: its `token_ages`.
    config: levels and phases.
  """
  step = sampled.rollout * config.steps_per_rollout
  collected = sampled.counted
  budgets = range(1, config.max_budget + 1)
  # With token levels, a row has all pairs with this number of searches.
  by_searches = sampled.probabilities.reshape(config.max_budget, -1)
  # A fixed budget may be 0, or above `max_budget`.
  levels = sorted({*budgets, *map(int, sampled.levels)})
  caps = [group.caps.tokens for group in collected.groups if group]
  values: dict[str, float] = {
    "rollout": sampled.rollout,
    "step": step + config.steps_per_rollout,
    "phase": 1 if step < config.phase1_steps else 2,
    "scaffold": int(sampled.scaffold),
  }
  for budget in budgets:
    values[f"curriculum/p{budget}"] = float(by_searches[budget - 1].sum())
  for level in levels:
    values[f"curriculum/count{level}"] = int(np.sum(sampled.levels == level))
  for tokens in config.token_levels:
    values[f"curriculum/tokens{tokens}"] = caps.count(tokens)
  values |= rewards_and_advantages.metrics(sampled.scored)
  values |= {
    "rollout/failed": collected.failed,
    "rollout/dropped_groups": collected.dropped,
    "rollout/resampled_groups": collected.resampled,
    "rollout/stragglers": collected.stragglers,
  }
  for group, counts in sampled.state.counters.items():
    for name, count in counts.items():
      values[f"{group}/{name}"] = count
  values["policy/staleness_mean"] = float(ages.mean()) if ages.size else 0.0
  values["policy/staleness_max"] = float(ages.max(initial=0))
  if collected.search:
    values |= searching.metrics(collected.search)
  if collected.engine["fingerprints"]:
    values["rollout/fingerprint"] = collected.fingerprint
    values["rollout/fingerprint_max"] = collected.fingerprint_max
    for part, gap in collected.gaps.items():
      if server := part.partition("://")[2]:
        values[f"engine/server/{server}/fingerprint"] = gap
  if offered := collected.engine["lanes_offered"]:
    values["engine/lanes_occupied"] = collected.engine["lanes_used"] / offered
  return values


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


def describe_stale(rollout: int, ages: np.ndarray, *, bound: int) -> str:
  """Returns why a rollout's tokens must not be trained on, or "".

  The sentence names the oldest version or, if a version is newer than the
  trainer's, the newest.

  Args:
    rollout: number of the rollout.
    ages: of its tokens; they must be in [0, bound], and no version below 0.
    bound: `pipeline.async_level`.
  """
  if np.all((ages >= 0) & (ages <= min(bound, rollout))):
    return ""
  worst = int(ages.min() if ages.min() < 0 else ages.max())
  return (
    f"Rollout {rollout} holds tokens of policy version {rollout - worst}, "
    f"expected {max(0, rollout - bound)} to {rollout} (pipeline.async_level "
    f"{bound}). It was not trained on."
  )
