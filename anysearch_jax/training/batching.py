"""Trajectories into packed arrays of fixed shapes.

A trajectory goes to the shortest row length that holds it. Rows of one length
are packed with several trajectories (segments) and gathered in micro-batches.
Shapes depend on the configuration alone, so a run compiles one train step;
how many micro-batches hold tokens is a number inside it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from anysearch_jax import config as config_lib


@dataclasses.dataclass(frozen=True)
class Example:
  """One token sequence to train on.

  Attributes:
    token_ids: int32 `[T]`.
    weights: float32 `[T]`, weight of each token as a target; 0 where the
      model did not write it. The first token is no target.
    logps: float32 `[T]`, behaviour log-probabilities.
    advantage: of the whole sequence.
  """

  token_ids: np.ndarray
  weights: np.ndarray
  logps: np.ndarray
  advantage: float = 0.0


class Rows(NamedTuple):
  """Micro-batches of one row length; all arrays are `[A, B, T]`.

  At index t stands the prediction of `targets[t]` from `tokens[..t]`:
  `behaviour_logp`, `advantage` and `weight` belong to the target.
  """

  tokens: np.ndarray
  targets: np.ndarray
  positions: np.ndarray
  segment_ids: np.ndarray
  behaviour_logp: np.ndarray
  advantage: np.ndarray
  weight: np.ndarray
  used: np.ndarray  # int32 [], micro-batches that hold tokens.


TrainBatch = tuple[Rows, ...]

_FIELDS = {
  "tokens": np.int32,
  "targets": np.int32,
  "positions": np.int32,
  "segment_ids": np.int32,
  "behaviour_logp": np.float32,
  "advantage": np.float32,
  "weight": np.float32,
}


def pack(
  sequences: Sequence[Example], *, config: config_lib.BatchConfig
) -> TrainBatch:
  """Packs sequences, one `Rows` for each configured row length.

  Raises:
    ValueError: a sequence longer than every row, or more micro-batches than
      the configuration allows.
  """
  lengths = config.row_lengths
  members: list[list[Example]] = [[] for _ in lengths]
  for sequence in sequences:
    size = len(sequence.token_ids) - 1
    fitting = [i for i, length in enumerate(lengths) if length >= size]
    if not fitting:
      raise ValueError(
        f"A trajectory of {size + 1} tokens does not fit the longest training "
        f"row of {lengths[-1]}; raise batch.row_lengths or lower "
        "episode.max_context."
      )
    members[fitting[0]].append(sequence)
  packed = []
  # Longest rows first: what room their micro-batches have left takes shorter
  # sequences, which then need no rows of their own.
  for i in reversed(range(len(lengths))):
    rows, room = _first_fit(members[i], lengths[i])
    b = max(1, config.micro_batch_tokens // lengths[i])
    empty = -len(rows) % b
    rows += [[] for _ in range(empty)]
    room += [lengths[i]] * empty
    for j in reversed(range(i)):
      members[j] = _fill(members[j], rows, room)
    packed.append(_pack_rows(rows, lengths[i], b, config))
  return tuple(reversed(packed))


def _first_fit(
  sequences: Sequence[Example], length: int
) -> tuple[list[list[Example]], list[int]]:
  """First-fit decreasing; the rows and the room left in each."""
  rows: list[list[Example]] = []
  room: list[int] = []
  for sequence in _longest_first(sequences):
    if _fill([sequence], rows, room):
      rows.append([sequence])
      room.append(length - (len(sequence.token_ids) - 1))
  return rows, room


def _fill(
  sequences: Sequence[Example], rows: list[list[Example]], room: list[int]
) -> list[Example]:
  """Puts sequences where there is room, longest first; those left over."""
  left = []
  for sequence in _longest_first(sequences):
    size = len(sequence.token_ids) - 1
    row = next((r for r, free in enumerate(room) if free >= size), None)
    if row is None:
      left.append(sequence)
    else:
      rows[row].append(sequence)
      room[row] -= size
  return left


def _longest_first(sequences: Sequence[Example]) -> list[Example]:
  """Sorted by length; equal lengths keep their order."""
  return sorted(sequences, key=lambda s: -len(s.token_ids))


def _pack_rows(
  rows: Sequence[Sequence[Example]],
  length: int,
  b: int,
  config: config_lib.BatchConfig,
) -> Rows:
  """Writes packed rows into the arrays of their micro-batches of `b` rows."""
  used = len(rows) // b
  if used > config.max_micro_batches:
    raise ValueError(
      f"An optimizer step needs {used} micro-batches of {b} rows x {length} "
      f"tokens, batch.max_micro_batches is {config.max_micro_batches}; raise "
      "it."
    )
  shape = (config.max_micro_batches, b, length)
  arrays = {name: np.zeros(shape, dtype) for name, dtype in _FIELDS.items()}
  flat = {name: a.reshape(-1, length) for name, a in arrays.items()}
  for r, members in enumerate(rows):
    start = 0
    for segment, sequence in enumerate(members, start=1):
      size = len(sequence.token_ids) - 1
      here = np.s_[r, start : start + size]
      flat["tokens"][here] = sequence.token_ids[:-1]
      flat["targets"][here] = sequence.token_ids[1:]
      flat["positions"][here] = np.arange(size)
      flat["segment_ids"][here] = segment
      flat["behaviour_logp"][here] = sequence.logps[1:]
      flat["advantage"][here] = sequence.advantage
      flat["weight"][here] = sequence.weights[1:]
      start += size
  return Rows(**arrays, used=np.int32(used))
