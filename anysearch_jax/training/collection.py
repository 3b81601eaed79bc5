"""Collects a rollout: each process plays a share, and then has all of it.

Every random draw is addressed by rollout, question and sample, so it does not
matter which process plays which question.

With `pipeline.extra_groups` a rollout plays that many more questions than it
keeps, and cancels the slowest groups (stragglers). Their questions count as
used: every rollout has its own range of the stream, so the next one begins at
the same question whatever the timing. Cancelling is biased against long
episodes.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from anysearch_jax import budgets as budgets_lib
from anysearch_jax import config as config_lib
from anysearch_jax import types
from anysearch_jax.algorithms import curriculum
from anysearch_jax.data import dataset_iterator
from anysearch_jax.host import counting, processes
from anysearch_jax.rollout import driver, inflight, trainable_engine
from anysearch_jax.training import rollout_buffer
from anysearch_jax.training import timeline as timeline_lib

# What every process counts for its share of a rollout.
_SUMMED = ("dropped", "resampled", "failed")


class QuestionStream(NamedTuple):
  """The training questions, and the size of the rollouts that they fill.

  questions: in order; they repeat when they end.
  groups: that a rollout keeps, one for each question.
  samples: trajectories of each group.
  extra_groups: that a rollout plays beyond these, of questions of their own.
  """

  questions: Sequence[types.Question]
  groups: int
  samples: int
  extra_groups: int = 0

  @property
  def per_rollout(self) -> int:
    """The number of questions that a rollout consumes."""
    return self.groups + self.extra_groups

  def question(self, rollout: int, index: int) -> types.Question:
    """Returns the question at an index of a rollout."""
    at = rollout * self.per_rollout + index
    return self.questions[at % len(self.questions)]

  def position(self, rollout: int) -> dict[str, int]:
    """Returns the position before a rollout, as plain values."""
    return dataset_iterator.progress(self.questions, rollout * self.per_rollout)


class _Share(NamedTuple):
  """What a process sends the others of its share of a rollout.

  values: counts, counters and the reason of the first failure.
  groups: that were kept.
  """

  values: dict[str, Any]
  groups: rollout_buffer.PackedGroups


class Collector:
  """Plays rollouts with this process's engine.

  Args:
    stream: the questions.
    engine: its counters are read and cleared.
    retriever: answers the searches; its counters, if any, are read and cleared.
    codec: tokenizer of the engine's policy.
    config: limits of an episode.
    slots: number of episodes that are played at a time.
    quiet_seconds: see `WatchConfig`.
    timeline: records every turn and search.
    prices: what rewards charge in dollars.
  """

  def __init__(
    self,
    stream: QuestionStream,
    *,
    engine: trainable_engine.TrainableEngine,
    retriever: types.Retriever,
    codec: types.TextCodec,
    config: config_lib.EpisodeConfig,
    slots: int,
    quiet_seconds: float,
    timeline: timeline_lib.Timeline,
    prices: budgets_lib.Prices = budgets_lib.NO_CAPS.prices,
  ):
    self.stream, self._prices = stream, prices
    self._engine, self._retriever = engine, retriever
    self._codec, self._config = codec, config
    self._slots, self._quiet_seconds = slots, quiet_seconds
    self._timeline = timeline

  def collect(
    self,
    rollout: int,
    assignment: curriculum.Assignment,
    *,
    run: Callable[[Coroutine], Any] = asyncio.run,
  ) -> rollout_buffer.RolloutBatch:
    """Plays the questions of one rollout.

    Args:
      rollout: its number.
      assignment: a budget for each question, and which prompt to use.
      run: runs the coroutine that plays the episodes.
    """
    scaffold = bool(assignment.scaffold)
    assignments = [
      driver.Assignment(i, self.stream.question(rollout, i), budget, scaffold)
      for i, budget in enumerate(self._budgets(assignment))
    ]
    shares = processes.all_gather(lambda: self._play(rollout, assignments, run))
    return self._merged(
      assignments,
      # Tuples of other processes arrive as lists.
      [
        _Share(values, rollout_buffer.PackedGroups(*groups))
        for values, groups in shares
      ],
    )

  def _budgets(
    self, assignment: curriculum.Assignment
  ) -> list[budgets_lib.Assigned]:
    """Returns the budget of each group, with the prices of the run."""
    if assignment.cents is not None:
      return [
        budgets_lib.Budget(dollars=cents / 100, prices=self._prices)
        for cents in np.asarray(assignment.cents).tolist()
      ]
    searches = np.asarray(assignment.budgets).tolist()
    if assignment.tokens is None and not self._prices:
      return searches
    tokens = (
      [budgets_lib.UNCAPPED] * len(searches)
      if assignment.tokens is None
      else np.asarray(assignment.tokens).tolist()
    )
    return [
      budgets_lib.Budget(searches=b, tokens=t, prices=self._prices)
      for b, t in zip(searches, tokens, strict=True)
    ]

  def _play(
    self,
    rollout: int,
    assignments: Sequence[driver.Assignment],
    run: Callable[[Coroutine], Any],
  ) -> _Share:
    """Plays this process's share of a rollout."""
    first, count = jax.process_index(), jax.process_count()
    keep = len(range(first, self.stream.groups, count))
    played: driver.Rollout = run(
      driver.run_groups(
        assignments[first::count] if keep else (),
        driver.EpisodeParts(
          engine=_TimedEngine(self._engine, self._timeline),
          retriever=_TimedRetriever(self._retriever, self._timeline, rollout),
          config=self._config,
          codec=self._codec,
        ),
        group=self.stream.samples,
        rollout=rollout,
        max_concurrency=self._slots,
        keep=keep if self.stream.extra_groups else None,
        inflight=inflight.InFlight(self._quiet_seconds),
      )
    )
    values = {
      "dropped": played.dropped,
      "resampled": played.resampled,
      "failed": played.failed,
      "reason": played.reason,
      "engine": dict(_pop_counters(self._engine)),
      "search": dict(_pop_counters(self._retriever)),
    }
    return _Share(values, rollout_buffer.pack_groups(played.groups))

  def _merged(
    self, assignments: Sequence[driver.Assignment], shares: Sequence[_Share]
  ) -> rollout_buffer.RolloutBatch:
    """Returns the rollout of which every process played a share."""
    found = {
      group.trajectories[0].address.question: group
      for share in shares
      for group in rollout_buffer.unpack_groups(
        share.groups, self.stream.question
      )
      if group is not None
    }
    # Pad missing groups with None, at the first indices that are free.
    rest = (a.index for a in assignments if a.index not in found)
    lacking = self.stream.groups - len(found)
    places = sorted([*found, *(next(rest) for _ in range(lacking))])
    counts: Counter[str] = Counter()
    engine: Counter[str] = Counter()
    search: Counter[str] = Counter()
    for share in shares:
      # `update` keeps counts of 0, `+` would not.
      counts.update({name: share.values[name] for name in _SUMMED})
      engine.update(share.values["engine"])
      search.update(share.values["search"])
    reasons = (share.values["reason"] for share in shares)
    return rollout_buffer.RolloutBatch(
      groups=[found.get(place) for place in places],
      places=np.asarray(places),
      dropped=counts["dropped"],
      resampled=counts["resampled"],
      failed=counts["failed"],
      stragglers=len(assignments) - len(found) - counts["dropped"],
      engine=engine,
      search=search,
      reason=next(filter(None, reasons), ""),
    )


def _pop_counters(part: object) -> Counter[str]:
  """Returns a part's counters and resets them to 0."""
  counters = counting.counters(part)
  counts = Counter(counters)
  counters.clear()
  return counts


class _TimedEngine:
  """An engine whose turns are recorded on the timeline."""

  def __init__(self, engine: types.Engine, timeline: timeline_lib.Timeline):
    self._engine = engine
    self._timeline = timeline

  async def generate(self, request: types.GenerateRequest) -> types.Generation:
    a = request.address
    with self._timeline.span(
      a.rollout,
      timeline_lib.TURNS,
      "turn",
      question=a.question,
      sample=a.sample,
      turn=request.turn,
    ):
      return await self._engine.generate(request)

  def release(self, address: types.Address) -> None:
    self._engine.release(address)


class _TimedRetriever:
  """A retriever whose searches are recorded on the timeline."""

  def __init__(
    self,
    retriever: types.Retriever,
    timeline: timeline_lib.Timeline,
    rollout: int,
  ):
    self._retriever = retriever
    self._timeline = timeline
    self._rollout = rollout

  async def search(
    self, request: types.SearchRequest
  ) -> Sequence[types.Passage]:
    with self._timeline.span(
      self._rollout, timeline_lib.SEARCHES, "search", query=request.query
    ):
      return await self._retriever.search(request)
