"""Serializes groups to plain values and flat arrays, to save or send them.

Tokens are concatenated into a few arrays; everything else is JSON. Questions
are not serialized: their addresses find them in the training stream.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from anysearch_jax import types

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
  if field.name not in (*_DTYPES, "question")
)


class Packed(NamedTuple):
  """Groups in order, serialized.

  values: JSON. tokens: by name, the arrays of all trajectories, concatenated.
  """

  values: list[Any]
  tokens: dict[str, np.ndarray]


def pack(groups: Sequence[types.Group | None]) -> Packed:
  """Serializes groups; `unpack` restores them. None stays None."""
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
  return Packed(values, tokens)


def unpack(
  packed: Packed, question: Callable[[int, int], types.Question]
) -> list[types.Group | None]:
  """Restores the groups that `pack` serialized.

  Args:
    packed: the result of `pack`, possibly after a round trip through JSON.
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
      documents=tuple(
        tuple(types.Document(*document) for document in found)
        for found in values["documents"]
      ),
      search_ends=tuple(values["search_ends"]),
    )

  def group(values: list[dict[str, Any]] | None) -> types.Group | None:
    if values is None:
      return None
    members = tuple(map(trajectory, values))
    first = members[0]
    return types.Group(first.question, first.budget, first.scaffold, members)

  return [group(values) for values in packed.values]


def _trajectory(t: types.Trajectory) -> dict[str, Any]:
  values = {name: getattr(t, name) for name in _PLAIN}
  values["spans"] = [[int(span.author), span.text] for span in t.spans]
  return values | {"tokens": len(t.token_ids)}


def _tokens_of_each(packed: Packed) -> Iterator[dict[str, np.ndarray]]:
  """Yields the arrays of each trajectory in order."""
  arrays = {name: np.asarray(x) for name, x in packed.tokens.items()}
  start = 0
  for group in packed.values:
    for values in group or ():
      here = slice(start, start + values["tokens"])
      start = here.stop
      yield {name: x[here] for name, x in arrays.items()}
