"""Groups as plain values and flat arrays, to be kept or sent.

Tokens lie end to end in a few arrays, everything else is JSON. Questions stay
in the stream that they came from.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from anysearch_jax import types

# Arrays of a trajectory, all of one length.
_DTYPES = {
  "token_ids": np.int32,
  "authors": np.int8,
  "logps": np.float32,
  "versions": np.int32,
}
# What JSON does not bring back by itself, lists instead of tuples aside.
_BACK = {
  "address": lambda values: types.Address(*values),
  "spans": lambda values: tuple(
    types.Span(types.Author(author), text) for author, text in values
  ),
  "outcome": types.Outcome,
  "documents": lambda values: tuple(
    tuple(types.Document(*document) for document in found) for found in values
  ),
}
_PLAIN = tuple(
  field.name
  for field in dataclasses.fields(types.Trajectory)
  if field.name not in (*_DTYPES, "question")
)


class Packed(NamedTuple):
  """Groups in order.

  values: JSON. tokens: flat arrays by name, of all trajectories in order.
  """

  values: list[Any]
  tokens: dict[str, np.ndarray]


def pack(groups: Sequence[types.Group | None]) -> Packed:
  """What `unpack` makes the same groups of; None stays None."""
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
  """The groups.

  Args:
    packed: as `pack` made it, values after a round trip through JSON or not.
    question: by the number of a rollout and the question's place in it.
  """
  pieces = _pieces(packed)

  def trajectory(values: dict[str, Any]) -> types.Trajectory:
    address = types.Address(*values["address"])
    return types.Trajectory(
      question=question(address.rollout, address.question),
      **next(pieces),
      **{name: _BACK.get(name, _tuples)(values[name]) for name in _PLAIN},
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


def _pieces(packed: Packed) -> Iterator[dict[str, np.ndarray]]:
  """The arrays of each trajectory in turn."""
  arrays = {name: np.asarray(x) for name, x in packed.tokens.items()}
  start = 0
  for group in packed.values:
    for values in group or ():
      here = slice(start, start + values["tokens"])
      start = here.stop
      yield {name: x[here] for name, x in arrays.items()}


def _tuples(value: Any) -> Any:
  """Lists are tuples in a trajectory."""
  if isinstance(value, list | tuple):
    return tuple(map(_tuples, value))
  return value
