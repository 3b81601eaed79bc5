"""Rollouts that are played and not trained on, as values and serialized.

Processes send each other groups, and checkpoints store rollouts. Tokens are
concatenated into a few arrays; everything else is JSON. Questions are not
serialized: their addresses find them in the training stream.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from anysearch_jax import budgets, types
from anysearch_jax.environment import observed

# The fields of `RolloutBatch` that are counts.
COUNTS = ("dropped", "resampled", "failed", "stragglers")
# Its plain fields, besides groups, places and counters.
_BATCH_PLAIN = (*COUNTS, "reason", "fingerprint", "fingerprint_max")
# The arrays of a trajectory, which have one length.
_DTYPES = {
  "token_ids": np.int32,
  "authors": np.int8,
  "logps": np.float32,
  "versions": np.int32,
}
_PLAIN = tuple(
  field.name
  for field in dataclasses.fields(types.Trajectory)
  if field.name not in (*_DTYPES, "question", "caps")
)


class RolloutBatch(NamedTuple):
  """A rollout of all processes: its groups in question order.

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

  def with_failed(self, reasons: Sequence[str]) -> RolloutBatch:
    """Returns the counts with more failed episodes, and the first reason."""
    return self._replace(
      failed=self.failed + len(reasons),
      reason=self.reason or next(iter(reasons), ""),
    )


class PackedGroups(NamedTuple):
  """Groups in order, serialized.

  values: JSON. tokens: by name, the arrays of all trajectories, concatenated.
  """

  values: list[Any]
  tokens: dict[str, np.ndarray]


def pack_groups(groups: Sequence[types.Group | None]) -> PackedGroups:
  """Serializes groups; `unpack_groups` restores them. None stays None."""
  trajectories = [t for group in groups if group for t in group.trajectories]
  tokens = {
    name: np.concatenate(
      [np.zeros(0, dtype), *(getattr(t, name) for t in trajectories)],
      dtype=dtype,
    )
    for name, dtype in _DTYPES.items()
  }
  values = [
    None if group is None else [_trajectory(t) for t in group.trajectories]
    for group in groups
  ]
  return PackedGroups(values, tokens)


def unpack_groups(
  packed: PackedGroups, question: Callable[[int, int], types.Question]
) -> list[types.Group | None]:
  """Restores the groups that `pack_groups` serialized.

  Args:
    packed: the result of `pack_groups`, maybe after a round trip through JSON.
    question: returns the question at (rollout, index in the rollout).
  """
  tokens = _tokens_of_each(packed)

  def trajectory(values: dict[str, Any]) -> types.Trajectory:
    address = types.Address(*values["address"])
    arrays = next(tokens)
    return types.Trajectory(
      address=address,
      question=question(address.rollout, address.question),
      budget=values["budget"],
      scaffold=values["scaffold"],
      token_ids=arrays["token_ids"],
      authors=arrays["authors"],
      logps=arrays["logps"],
      versions=arrays["versions"],
      spans=tuple(
        types.Span(types.Author(author), text)
        for author, text in values["spans"]
      ),
      searches=values["searches"],
      queries=tuple(values["queries"]),
      violation=values["violation"],
      outcome=types.Outcome(values["outcome"]),
      reason=values["reason"],
      observations=observed.from_values(values),
      search_ends=tuple(values["search_ends"]),
      caps=budgets.from_record(values.get("caps", {})),
      seconds=values.get("seconds", 0.0),
    )

  def group(values: list[dict[str, Any]] | None) -> types.Group | None:
    if values is None:
      return None
    members = tuple(map(trajectory, values))
    first = members[0]
    return types.Group(
      first.question, first.budget, first.scaffold, members, first.caps
    )

  return [group(values) for values in packed.values]


class StoredRollouts(NamedTuple):
  """Consecutive rollouts, serialized.

  values: JSON. tokens: by name, the arrays of all trajectories, concatenated.
  """

  values: dict[str, Any]
  tokens: dict[str, np.ndarray]


def pack(rollouts: Sequence[RolloutBatch]) -> StoredRollouts:
  """Serializes rollouts; `unpack` restores them."""
  packed = pack_groups([g for c in rollouts for g in c.groups])
  values = {
    "groups": packed.values,
    "rollouts": [_rollout(c) for c in rollouts],
  }
  return StoredRollouts(values, packed.tokens)


def unpack(
  stored: StoredRollouts, question: Callable[[int, int], types.Question]
) -> list[RolloutBatch]:
  """Restores the rollouts that `pack` serialized.

  Args:
    stored: the result of `pack`, after a round trip through JSON.
    question: returns the question at (rollout, index in the rollout).
  """
  packed = PackedGroups(stored.values["groups"], stored.tokens)
  groups = iter(unpack_groups(packed, question))
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


def _rollout(c: RolloutBatch) -> dict[str, Any]:
  return {
    "places": c.places.tolist(),
    "engine": dict(c.engine),
    "search": dict(c.search),
    "plain": {name: getattr(c, name) for name in _BATCH_PLAIN},
  }


def _trajectory(t: types.Trajectory) -> dict[str, Any]:
  values = {name: getattr(t, name) for name in _PLAIN}
  values["observations"] = observed.to_values(t.observations)
  values["spans"] = [[int(span.author), span.text] for span in t.spans]
  values["caps"] = t.caps.record()
  return values | {"tokens": len(t.token_ids)}


def _tokens_of_each(packed: PackedGroups) -> Iterator[dict[str, np.ndarray]]:
  """Yields the arrays of each trajectory in order."""
  arrays = {name: np.asarray(x) for name, x in packed.tokens.items()}
  start = 0
  for group in packed.values:
    for values in group or ():
      here = slice(start, start + values["tokens"])
      start = here.stop
      yield {name: x[here] for name, x in arrays.items()}
