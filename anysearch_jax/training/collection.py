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

from anysearch_jax import config as config_lib
from anysearch_jax import types
from anysearch_jax.algorithms import curriculum
from anysearch_jax.host import processes
from anysearch_jax.rollout import driver, inflight
from anysearch_jax.training import packed_groups
from anysearch_jax.training import timeline as timeline_lib

# The fields of `Collected` that are counts.
COUNTS = ("dropped", "resampled", "failed", "stragglers")
# What a process sends the others of its share, besides groups and counters.
_PLAIN = ("dropped", "resampled", "failed", "reason")


class Collected(NamedTuple):
  """A rollout of all processes: `config.questions` groups in question order.

  groups: None where a group was dropped.
  places: int `[Q]`, the index of each group in the rollout's assignment.
  dropped, resampled, failed: as in `driver.Rollout`.
  stragglers: number of groups that were cancelled because they were slow.
  engine, search: counters of engines and retrievers during the rollout.
  reason: why the first failed episode failed; "" if none did.
  fingerprint, fingerprint_max: mean and largest distance of log-probabilities
    between engine and trainer in nats, see `fingerprint.Gap`.
  """

  groups: list[types.Group | None]
  places: np.ndarray
  dropped: int
  resampled: int
  failed: int
  stragglers: int
  engine: Counter[str]
  search: Counter[str]
  reason: str = ""
  fingerprint: float = 0.0
  fingerprint_max: float = 0.0


def questions(config: config_lib.ExperimentConfig) -> int:
  """Returns the number of questions that a rollout consumes."""
  return config.questions + config.pipeline.extra_groups


def question(
  stream: Sequence[types.Question],
  rollout: int,
  place: int,
  *,
  config: config_lib.ExperimentConfig,
) -> types.Question:
  """Returns the question at an index of a rollout; the stream repeats."""
  return stream[(rollout * questions(config) + place) % len(stream)]


def collect(
  rollout: int,
  assignment: curriculum.Assignment,
  *,
  config: config_lib.ExperimentConfig,
  stream: Sequence[types.Question],
  engine: types.TrainableEngine,
  retriever: types.Retriever,
  codec: types.TextCodec,
  timeline: timeline_lib.Timeline,
  run: Callable[[Coroutine], Any] = asyncio.run,
) -> Collected:
  """Plays the questions of one rollout.

  Args:
    rollout: its number.
    assignment: a budget for each of its `questions`, and which prompt to use.
    config: of the run.
    stream: the training questions.
    engine: this process's engine; its counters are read and cleared.
    retriever: answers the searches; its counters, if any, are read and cleared.
    codec: tokenizer of the engine's policy.
    timeline: records every turn and search.
    run: runs the coroutine that plays the episodes.
  """
  first, count = jax.process_index(), jax.process_count()
  keep = len(range(first, config.questions, count))
  scaffold = bool(assignment.scaffold)
  assignments = [
    driver.Assignment(
      i,
      question(stream, rollout, i, config=config),
      int(budget),
      scaffold,
    )
    for i, budget in enumerate(np.asarray(assignment.budgets))
  ]

  def play() -> tuple[dict[str, Any], packed_groups.Packed]:
    played = run(
      driver.run_groups(
        assignments[first::count] if keep else (),
        group=config.group,
        rollout=rollout,
        engine=_TimedEngine(engine, timeline),
        retriever=_TimedRetriever(retriever, timeline, rollout),
        config=config.episode,
        codec=codec,
        max_concurrency=config.engine.slots,
        keep=keep if config.pipeline.extra_groups else None,
        inflight=inflight.InFlight(config.watch.quiet_seconds),
      )
    )
    values = {
      **{name: getattr(played, name) for name in _PLAIN},
      "engine": dict(_taken(engine)),
      "search": dict(_taken(retriever)),
    }
    return values, packed_groups.pack(played.groups)

  shares = processes.all_gather(play)
  found = {
    group.trajectories[0].address.question: group
    for _, packed in shares
    for group in packed_groups.unpack(
      packed_groups.Packed(*packed),
      lambda rollout, place: question(stream, rollout, place, config=config),
    )
  }
  # Pad missing groups with None, at the first indices that are free.
  rest = (a.index for a in assignments if a.index not in found)
  lacking = config.questions - len(found)
  places = sorted([*found, *(next(rest) for _ in range(lacking))])
  dropped, resampled, failed = (
    sum(values[name] for values, _ in shares)
    for name in ("dropped", "resampled", "failed")
  )
  engine_counts, search_counts = Counter(), Counter()
  for values, _ in shares:
    engine_counts.update(values["engine"])
    search_counts.update(values["search"])
  return Collected(
    groups=[found.get(place) for place in places],
    places=np.asarray(places),
    dropped=dropped,
    resampled=resampled,
    failed=failed,
    stragglers=len(assignments) - len(found) - dropped,
    engine=engine_counts,
    search=search_counts,
    reason=next((v["reason"] for v, _ in shares if v["reason"]), ""),
  )


def _taken(part: object) -> Counter[str]:
  """Returns a part's counters and resets them to 0."""
  counters = types.counters(part)
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
