"""Packs trajectories into arrays of fixed shapes.

A trajectory goes to the shortest row length that holds it, or fills free space
in a longer row. A row holds several trajectories (segments), and rows of one
length form micro-batches. Shapes depend on the configuration alone, so a run
compiles one train step; the number of micro-batches that hold tokens is one of
its inputs.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Sequence
from typing import Generic, NamedTuple, TypeVar

import jax
import numpy as np

from anysearch_jax import config as config_lib


@dataclasses.dataclass(frozen=True)
class Example:
  """One token sequence to train on.

  Attributes:
    token_ids: int32 `[T]`.
    weights: float32 `[T]`, loss weight of each token; 0 for tokens that the
      model did not write. The first token is never predicted.
    logps: float32 `[T]`, behaviour log-probabilities.
    advantage: of the whole sequence, or float32 `[T]`, of each token.
    rewards: float32 `[T]`, reward of each token; None if all are 0.
  """

  token_ids: np.ndarray
  weights: np.ndarray
  logps: np.ndarray
  advantage: float | np.ndarray = 0.0
  rewards: np.ndarray | None = None


# Stands for an old log-prob that is the step's own; no log-prob is positive.
OWN = np.inf

# Arrays on the host, on devices, or their shapes and dtypes.
ArrayT = TypeVar("ArrayT", np.ndarray, jax.Array, jax.ShapeDtypeStruct)


class Rows(NamedTuple, Generic[ArrayT]):
  """Micro-batches of one row length; all arrays but `used` are `[A, B, T]`.

  Index t is the prediction of `targets[t]` from `tokens[..t]`. The fields
  `behaviour_logp`, `old_logp`, `advantage` and `weight` belong to the target.
  `old_logp` equals `behaviour_logp` until the trainer replaces it by its own or
  by `OWN`.
  `reward` is packed only for a critic; before the first step the trainer
  replaces it by `advantage`, `old_value` and `returns`. Without a critic the
  last three fields are None.
  """

  tokens: ArrayT
  targets: ArrayT
  positions: ArrayT
  segment_ids: ArrayT
  behaviour_logp: ArrayT
  old_logp: ArrayT
  advantage: ArrayT
  weight: ArrayT
  used: ArrayT  # int32 [], number of micro-batches that hold tokens.
  reward: ArrayT | None = None
  old_value: ArrayT | None = None
  returns: ArrayT | None = None

  @property
  def inputs(self) -> tuple[ArrayT, ArrayT, ArrayT, ArrayT]:
    """What log-probabilities are computed from."""
    return self.tokens, self.targets, self.positions, self.segment_ids

  @property
  def states(self) -> tuple[ArrayT, ArrayT, ArrayT]:
    """What values are computed from."""
    return self.tokens, self.positions, self.segment_ids


# One `Rows` for each configured row length.
HostBatch = tuple[Rows[np.ndarray], ...]
TrainBatch = tuple[Rows[jax.Array], ...]
AbstractBatch = tuple[Rows[jax.ShapeDtypeStruct], ...]


def abstract(
  config: config_lib.BatchConfig, *, multiple: int = 1, rewards: bool = False
) -> AbstractBatch:
  """Returns the shapes and dtypes of every batch that `pack` makes."""

  def rows(length: int) -> Rows[jax.ShapeDtypeStruct]:
    b = config.rows(length, multiple)
    shape = (config.max_micro_batches, b, length)
    ids = jax.ShapeDtypeStruct(shape, np.int32)
    values = jax.ShapeDtypeStruct(shape, np.float32)
    return Rows(
      tokens=ids,
      targets=ids,
      positions=ids,
      segment_ids=ids,
      behaviour_logp=values,
      old_logp=values,
      advantage=values,
      weight=values,
      used=jax.ShapeDtypeStruct((), np.int32),
      reward=values if rewards else None,
    )

  return tuple(rows(length) for length in config.row_lengths)


def pack(
  sequences: Sequence[Example],
  *,
  config: config_lib.BatchConfig,
  multiple: int = 1,
  rewards: bool = False,
) -> HostBatch:
  """Packs sequences, one `Rows` for each configured row length.

  Args:
    sequences: at least one token each.
    config: the shapes, and how many segments a row may hold.
    multiple: the number of devices that rows are sharded over; a micro-batch
      has a multiple of it.
    rewards: whether to pack the tokens' rewards too.

  Raises:
    ValueError: a sequence is longer than every row, or needs more micro-batches
      than the configuration allows.
  """
  batch: HostBatch = jax.tree.map(
    lambda x: np.zeros(x.shape, x.dtype),
    abstract(config, multiple=multiple, rewards=rewards),
  )
  # Predictions of each: all tokens but the first.
  sizes = [len(s.token_ids) - 1 for s in sequences]
  found = _places(sizes, config=config, multiple=multiple)
  for sequence, size, place in zip(sequences, sizes, found, strict=True):
    rows = batch[place.bucket]
    a, b = divmod(place.row, rows.tokens.shape[1])
    here = np.s_[a, b, place.start : place.start + size]
    rows.tokens[here] = sequence.token_ids[:-1]
    rows.targets[here] = sequence.token_ids[1:]
    rows.positions[here] = np.arange(size)
    rows.segment_ids[here] = place.segment
    rows.behaviour_logp[here] = sequence.logps[1:]
    rows.old_logp[here] = sequence.logps[1:]
    advantage = np.broadcast_to(sequence.advantage, size + 1)
    rows.advantage[here] = advantage[1:]
    rows.weight[here] = sequence.weights[1:]
    if rows.reward is not None and sequence.rewards is not None:
      rows.reward[here] = sequence.rewards[1:]
    rows.used[()] = max(rows.used, a + 1)
  return batch


class _Place(NamedTuple):
  """The position of a sequence's predictions in a batch.

  bucket: index of its `Rows`. row: index over all micro-batches of the bucket.
  start: the first index in the row. segment: its id in the row, from 1.
  """

  bucket: int
  row: int
  start: int
  segment: int


@dataclasses.dataclass
class _Row:
  """The tokens and segments that a row holds so far."""

  tokens: int = 0
  segments: int = 0


def _places(
  sizes: Sequence[int], *, config: config_lib.BatchConfig, multiple: int
) -> list[_Place]:
  """Assigns sequences of `sizes` predictions to rows by first-fit decreasing.

  Returns the place of each sequence, in the order of `sizes`.
  """
  lengths = config.row_lengths
  waiting: list[list[int]] = [[] for _ in lengths]
  # The sort is stable: sequences of equal length keep their order.
  for n in sorted(range(len(sizes)), key=lambda n: -sizes[n]):
    if sizes[n] > lengths[-1]:
      raise ValueError(
        f"A trajectory of {sizes[n] + 1} tokens does not fit the longest "
        f"training row of {lengths[-1]}; raise batch.row_lengths or lower "
        "episode.max_context."
      )
    waiting[bisect.bisect_left(lengths, sizes[n])].append(n)
  found: dict[int, _Place] = {}

  def put(n: int, bucket: int, rows: Sequence[_Row]) -> bool:
    """Puts sequence `n` into the first row with room; False if none has."""
    for r, row in enumerate(rows):
      fits = row.tokens + sizes[n] <= lengths[bucket]
      if fits and row.segments < config.max_segments:
        found[n] = _Place(bucket, r, row.tokens, row.segments + 1)
        row.tokens += sizes[n]
        row.segments += 1
        return True
    return False

  # Longest rows first: shorter sequences fill the space left in their
  # micro-batches, whose padding would be computed anyway.
  for bucket in reversed(range(len(lengths))):
    rows: list[_Row] = []
    for n in waiting[bucket]:
      if not put(n, bucket, rows):
        rows.append(_Row())
        put(n, bucket, rows)
    b = config.rows(lengths[bucket], multiple)
    rows += [_Row() for _ in range(-len(rows) % b)]
    if len(rows) > config.max_micro_batches * b:
      raise ValueError(
        f"An optimizer step needs {len(rows) // b} micro-batches of {b} rows x "
        f"{lengths[bucket]} tokens, batch.max_micro_batches is "
        f"{config.max_micro_batches}; raise it."
      )
    for shorter in reversed(waiting[:bucket]):
      shorter[:] = [n for n in shorter if not put(n, bucket, rows)]
  return [found[n] for n in range(len(sizes))]
