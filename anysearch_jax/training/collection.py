"""Collects a rollout.

If several processes sample, each one plays a share of a rollout, and all of
them get the whole rollout. Every random draw is addressed by rollout, question
and sample, so it does not matter which process plays which question.

With `pipeline.extra_groups` a rollout plays that many more questions than it
keeps, and cancels the slowest groups (stragglers), which is biased against long
episodes. Their questions count as used, so the next rollout begins at the same
question whatever the timing.

Rollouts that are played and not trained on travel as values: processes send
each other groups, and checkpoints store rollouts. Tokens are concatenated into
a few arrays; everything else is JSON. Questions are not stored: their addresses
find them in the training stream.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from anysearch_jax import budgets as budgets_lib
from anysearch_jax import types
from anysearch_jax.algorithms import curriculum
from anysearch_jax.data import dataset_iterator
from anysearch_jax.environment import records
from anysearch_jax.host import counting, loop, processes
from anysearch_jax.rollout import driver
from anysearch_jax.training import timeline as timeline_lib

# What every process counts for its share of a rollout.
_COUNTS = ("dropped", "resampled", "failed")
# The arrays of a trajectory, which have one length.
_DTYPES = {
  "token_ids": np.int32,
  "authors": np.int8,
  "logps": np.float32,
  "versions": np.int32,
}


class QuestionStream(NamedTuple):
  """The training questions, and the size of the rollouts that they fill.

  Attributes:
    questions: in order; they repeat when they end.
    groups: number of groups that a rollout keeps, one for each question.
    samples: number of trajectories of each group.
    extra_groups: number of groups that a rollout plays beyond these, of
      questions of their own.
    searchless: number of samples at the end of each group that get no search.
  """

  questions: Sequence[types.Question]
  groups: int
  samples: int
  extra_groups: int = 0
  searchless: int = 0

  @property
  def per_rollout(self) -> int:
    """The number of questions that a rollout consumes."""
    return self.groups + self.extra_groups

  def question(self, rollout: int, index: int) -> types.Question:
    """Returns the question at an index of a rollout."""
    index_in_run = rollout * self.per_rollout + index
    return self.questions[index_in_run % len(self.questions)]

  def position(self, rollout: int) -> dict[str, int]:
    """Returns the position before a rollout, as plain values."""
    return dataset_iterator.progress(self.questions, rollout * self.per_rollout)


class Collector:
  """Plays rollouts with this process's engine.

  The counters of engine and retriever are read and cleared.

  Args:
    stream: the questions.
    parts: engine, retriever and environment of the episodes.
    timeline: gets the spans of turns and searches.
    slots: limit on the episodes that play at the same time.
    quiet_seconds: time without progress after which a warning is logged.
    prices: the prices that budgets of dollars are charged by.
  """

  def __init__(
    self,
    stream: QuestionStream,
    parts: driver.EpisodeParts,
    timeline: timeline_lib.Timeline,
    *,
    slots: int,
    quiet_seconds: float,
    prices: budgets_lib.Prices,
  ):
    self.stream = stream
    self._parts = parts
    self._timeline = timeline
    self._slots = slots
    self._quiet_seconds = quiet_seconds
    self._prices = parts.environment.prices(prices)

  def collect(
    self, rollout: int, assignment: curriculum.Assignment, scope: loop.Scope
  ) -> RolloutBatch:
    """Plays the questions of one rollout.

    Args:
      rollout: its number.
      assignment: budgets and scaffold of its questions.
      scope: stops its episodes.

    Returns:
      The rollout of all processes, the same in each of them.
    """
    tokens = assignment.tokens
    scaffold = bool(assignment.scaffold)
    if tokens is None:
      tokens = np.full_like(assignment.budgets, budgets_lib.UNCAPPED)
    assignments = [
      driver.Assignment(
        index,
        self.stream.question(rollout, index),
        budgets_lib.Budget(int(searches), int(cap), prices=self._prices),
        scaffold,
      )
      for index, (searches, cap) in enumerate(
        zip(assignment.budgets, tokens, strict=True)
      )
    ]
    # The processes take turns, so that their shares differ by at most a group.
    process = processes.index()
    process_count = processes.count()
    keep = len(range(process, self.stream.groups, process_count))
    playing = loop.Work(
      driver.run_groups(
        assignments[process::process_count] if keep else (),
        self._parts,
        group=self.stream.samples,
        rollout=rollout,
        max_concurrency=self._slots,
        keep=keep if self.stream.extra_groups else None,
        inflight=driver.InFlight(
          self._quiet_seconds, span=functools.partial(self._span, rollout)
        ),
        searchless=self.stream.searchless,
      ),
      scope,
    )
    shares: list[RolloutBatch] = []
    for packed in processes.all_gather(
      lambda: serialize([self._share(playing)])
    ):
      # Tuples of other processes arrive as lists.
      stored = StoredRollouts(*packed)
      shares += deserialize(stored, self.stream.question)
    return self._merged(assignments, shares)

  def _share(self, playing: loop.Work[driver.Rollout]) -> RolloutBatch:
    """Waits for this process's share of a rollout."""
    played = playing.wait()
    engine = _pop_counters(self._parts.engine)
    for name, count in _pop_counters(self._parts.player).items():
      engine[f"agents/{name}"] = count
    return RolloutBatch(
      **played._asdict(),
      places=np.asarray(
        [_question_index(group) for group in played.groups], np.int64
      ),
      stragglers=0,
      engine=engine,
      search=_pop_counters(self._parts.retriever),
    )

  def _span(
    self, rollout: int, request: driver.Request
  ) -> contextlib.AbstractContextManager[None]:
    """Records a turn or a search on the timeline."""
    match request:
      case types.GenerateRequest(address=a, turn=turn):
        return self._timeline.span(
          rollout,
          timeline_lib.TURNS,
          "turn",
          question=a.question,
          sample=a.sample,
          turn=turn,
        )
      case types.SearchRequest(query=query):
        return self._timeline.span(
          rollout, timeline_lib.SEARCHES, "search", query=query
        )
    return contextlib.nullcontext()

  def _merged(
    self,
    assignments: Sequence[driver.Assignment],
    shares: Sequence[RolloutBatch],
  ) -> RolloutBatch:
    """Returns the rollout of which every process played a share."""
    groups = {
      _question_index(group): group
      for share in shares
      for group in share.groups
      if group
    }
    # Pad missing groups with None, at the first indices that are free.
    free_indices = (a.index for a in assignments if a.index not in groups)
    missing_count = self.stream.groups - len(groups)
    places = sorted(
      [*groups, *(next(free_indices) for _ in range(missing_count))]
    )
    counts = {
      name: sum(getattr(share, name) for share in shares) for name in _COUNTS
    }
    engine: Counter[str] = Counter()
    search: Counter[str] = Counter()
    for share in shares:
      # `update` keeps counts of 0, `+` would not.
      engine.update(share.engine)
      search.update(share.search)
    return RolloutBatch(
      groups=[groups.get(place) for place in places],
      places=np.asarray(places),
      **counts,
      stragglers=len(assignments) - len(groups) - counts["dropped"],
      engine=engine,
      search=search,
      reason=next((share.reason for share in shares if share.reason), ""),
    )


def _question_index(group: types.Group) -> int:
  """Returns the index of a group's question in its rollout."""
  return group.trajectories[0].address.question


def _pop_counters(part: object) -> Counter[str]:
  """Returns a part's counters and resets them to 0."""
  counters = counting.counters(part)
  counts = Counter(counters)
  counters.clear()
  return counts


class RolloutBatch(NamedTuple):
  """A rollout of all processes: its groups in question order.

  Attributes:
    groups: None where a group was dropped.
    places: int `[Q]`, the index of each group in the rollout's assignment.
    dropped, resampled, failed: as in `driver.Rollout`.
    stragglers: number of groups that were cancelled because they were slow.
    engine, search: counters of engines and retrievers during the rollout.
    reason: why the first failed episode failed; "" if none did.
    fingerprint, fingerprint_max: mean and largest distance of log-probabilities
      between engine and trainer in nats.
    gaps: the mean distance of each part of the engine, see `health.Gaps`.
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
  gaps: Mapping[str, float] = {}

  def with_failed(self, reasons: Sequence[str]) -> RolloutBatch:
    """Returns the counts with more failed episodes, and the first reason."""
    return self._replace(
      failed=self.failed + len(reasons),
      reason=self.reason or next(iter(reasons), ""),
    )


_FIELDS = tuple(field.name for field in dataclasses.fields(types.Trajectory))
# The fields of a batch that are JSON as they are.
_MEASURED = ("fingerprint", "fingerprint_max", "gaps")
_PLAIN = (*_COUNTS, "stragglers", "reason", *_MEASURED)


class StoredRollouts(NamedTuple):
  """Consecutive rollouts, serialized.

  Attributes:
    values: JSON values.
    tokens: by name, the arrays of all trajectories, concatenated.
  """

  values: dict[str, Any]
  tokens: dict[str, np.ndarray]


def serialize(rollouts: Sequence[RolloutBatch]) -> StoredRollouts:
  """Serializes rollouts; `deserialize` restores them."""
  trajectories: list[types.Trajectory] = []
  group_values: list[list[dict[str, Any]] | None] = []
  rollout_values = []
  for batch in rollouts:
    for group in batch.groups:
      members = group.trajectories if group else ()
      trajectories += members
      group_values.append([_values(t) for t in members] if group else None)
    rollout_values.append(
      {
        "places": batch.places.tolist(),
        "engine": dict(batch.engine),
        "search": dict(batch.search),
        "plain": {name: getattr(batch, name) for name in _PLAIN},
      }
    )
  tokens = {
    name: np.concatenate(
      [np.zeros(0, dtype), *(getattr(t, name) for t in trajectories)],
      dtype=dtype,
    )
    for name, dtype in _DTYPES.items()
  }
  recorded = [t.experts for t in trajectories if t.experts is not None]
  if recorded:
    unknown = functools.partial(types.unrecorded_experts, like=recorded[0])
    tokens["experts"] = np.concatenate(
      [
        unknown(len(t.token_ids)) if t.experts is None else t.experts
        for t in trajectories
      ]
    )
  values = {"groups": group_values, "rollouts": rollout_values}
  return StoredRollouts(values, tokens)


def deserialize(
  stored: StoredRollouts, question: Callable[[int, int], types.Question]
) -> list[RolloutBatch]:
  """Restores rollouts that `serialize` serialized.

  Args:
    stored: what `serialize` returned.
    question: returns the question at (rollout, index in the rollout).
  """
  arrays = {name: np.asarray(x) for name, x in stored.tokens.items()}
  start = 0

  def trajectory(values: dict[str, Any]) -> types.Trajectory:
    nonlocal start
    tokens = slice(start, start + values["tokens"])
    start = tokens.stop
    address = types.Address(*values["address"])
    restored: dict[str, Any] = {name: x[tokens] for name, x in arrays.items()}
    restored |= {
      "address": address,
      "question": question(address.rollout, address.question),
      "spans": tuple(
        types.Span(types.Author(author), text)
        for author, text in values["spans"]
      ),
      "queries": tuple(values["queries"]),
      "outcome": types.Outcome(values["outcome"]),
      "observations": records.observations(values["observations"]),
      "search_ends": tuple(values["search_ends"]),
      "servers": tuple(values.get("servers", ())),
      "segment_starts": tuple(values.get("segment_starts", (0,))),
      "caps": budgets_lib.from_record(values.get("caps", {})),
    }
    # Fields that an earlier version did not store keep their defaults.
    plain = {name: values[name] for name in _FIELDS if name in values}
    return types.Trajectory(**plain | restored)

  def group(values: list[dict[str, Any]] | None) -> types.Group | None:
    if values is None:
      return None
    members = tuple(map(trajectory, values))
    first = members[0]
    return types.Group(
      first.question, first.budget, first.scaffold, members, first.caps
    )

  groups = map(group, stored.values["groups"])
  return [
    RolloutBatch(
      groups=[next(groups) for _ in values["places"]],
      places=np.asarray(values["places"], np.int64),
      engine=Counter(values["engine"]),
      search=Counter(values["search"]),
      **values["plain"],
    )
    for values in stored.values["rollouts"]
  ]


def _values(t: types.Trajectory) -> dict[str, Any]:
  """Returns a trajectory as JSON, without its arrays and its question."""
  left_out = {*_DTYPES, "experts", "question"}
  values = {n: getattr(t, n) for n in _FIELDS if n not in left_out}
  return values | {
    "observations": records.observation_values(t.observations),
    "spans": [[int(span.author), span.text] for span in t.spans],
    "caps": t.caps.record(),
    "tokens": len(t.token_ids),
  }
