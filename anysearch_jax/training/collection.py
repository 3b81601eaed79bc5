"""Collecting a rollout: each process plays a share, all of them get it whole.

Every draw is addressed by rollout, question and sample, so who plays what
changes nothing.

With `pipeline.extra_groups` a rollout plays that many questions more than it
keeps, and gives up the slowest. They are used up all the same: every rollout
has its own stretch of the stream, so where the next one begins does not depend
on time. Long episodes are given up more often than short ones.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from anysearch_jax import config as config_lib
from anysearch_jax import types
from anysearch_jax.algorithms import curriculum
from anysearch_jax.host import processes
from anysearch_jax.rollout import driver, inflight
from anysearch_jax.training import packed_groups
from anysearch_jax.training import timeline as timeline_lib

# The counts of `Collected`.
COUNTS = ("dropped", "resampled", "failed", "stragglers")
# What a process tells the others of its share, besides groups and counters.
_PLAIN = ("dropped", "resampled", "failed", "reason")


class Engine(types.Engine, Protocol):
  """An engine that can be given other weights between rollouts.

  It begins with the policy that training starts from, as version 0.

  counters: what it counted since they were last cleared.

  It may also have `scores(token_ids)`, which gives the log-probabilities of all
  tokens but the first at temperature 1, a list for each of its parts (servers,
  devices) by name. Weights are verified by it (`fingerprint`).
  """

  counters: Counter[str]

  def set_params(self, params: Any, version: int) -> None:
    """Samples with these weights from now on."""
    ...


class Collected(NamedTuple):
  """A rollout of all processes, `config.questions` groups in question order.

  groups: None where one was dropped.
  places: int `[Q]`, the place of each in the rollout's assignment.
  dropped, resampled, failed: as in `driver.Rollout`.
  stragglers: groups that were given up.
  engine, search: what engines and retrievers counted meanwhile.
  reason: why the first of the failed ones failed.
  fingerprint, fingerprint_max: nats between engine and trainer, see
    `fingerprint.Gap`.
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
  """How many questions a rollout uses up."""
  return config.questions + config.pipeline.extra_groups


def question(
  stream: Sequence[types.Question],
  rollout: int,
  place: int,
  *,
  config: config_lib.ExperimentConfig,
) -> types.Question:
  """The question at a place of a rollout; after the last comes the first."""
  return stream[(rollout * questions(config) + place) % len(stream)]


def collect(
  rollout: int,
  assignment: curriculum.Assignment,
  *,
  config: config_lib.ExperimentConfig,
  stream: Sequence[types.Question],
  engine: Engine,
  retriever: types.Retriever,
  codec: types.TextCodec,
  timeline: timeline_lib.Timeline,
  run: Callable[[Coroutine], Any] = asyncio.run,
) -> Collected:
  """Plays the questions of one rollout.

  Args:
    rollout: its number.
    assignment: a budget for each of its `questions`, and the prompt.
    config: of the run.
    stream: the questions of training.
    engine: this process's own; its counters are taken from it.
    retriever: answers the searches; its counters are taken if it has any.
    codec: the text side of the engine's policy.
    timeline: gets a span of every turn and search.
    run: runs the coroutine that plays.
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

  shares = processes.share(play)
  found = {
    group.trajectories[0].address.question: group
    for _, packed in shares
    for group in packed_groups.unpack(
      packed_groups.Packed(*packed),
      lambda rollout, place: question(stream, rollout, place, config=config),
    )
  }
  # Places that stay empty are filled up with groups that are not there.
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


def _taken(part: Any) -> Counter[str]:
  """What a part has counted so far; it counts from 0 again."""
  counters = getattr(part, "counters", Counter())
  counts = Counter(counters)
  counters.clear()
  return counts


class _TimedEngine:
  """An engine whose turns are put on record."""

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
  """A retriever whose searches are put on record."""

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
