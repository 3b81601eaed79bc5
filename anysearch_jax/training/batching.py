"""Packs trajectories into arrays of fixed shapes.

A trajectory goes to the shortest row length that holds it, or fills free space
in a longer row. A row holds several trajectories (segments), and rows of one
length form micro-batches. Shapes depend on the configuration alone, so a run
compiles one train step; the number of micro-batches that hold tokens is one of
its inputs.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import numpy as np

from anysearch_jax import config as config_lib


class Example(NamedTuple):
  """One token sequence to train on.

  Attributes:
    token_ids: int32 `[T]`.
    weights: float32 `[T]`, loss weight of each token; 0 for tokens that the
      model did not write. The first token is never predicted.
    logps: float32 `[T]`, behaviour log-probabilities.
    advantage: of the whole sequence, or float32 `[T]`, of each token.
    rewards: float32 `[T]`, reward of each token; None if all are 0.
    experts: `[T, L, K]`, see `types.Trajectory`.
  """

  token_ids: np.ndarray
  weights: np.ndarray
  logps: np.ndarray
  advantage: float | np.ndarray = 0.0
  rewards: np.ndarray | None = None
  experts: np.ndarray | None = None


# Stands for an old log-prob that is the step's own; no log-prob is positive.
OWN = np.inf

# Arrays on the host, on devices, or their shapes and dtypes.
ArrayT = TypeVar("ArrayT", np.ndarray, jax.Array, jax.ShapeDtypeStruct)


class Rows(NamedTuple, Generic[ArrayT]):
  """Micro-batches of one row length; all arrays but `used` are `[A, B, T]`.

  Index t is the prediction of `targets[t]` from `tokens[..t]`, to which
  `behaviour_logp`, `old_logp`, `advantage` and `weight` belong. `old_logp`
  equals `behaviour_logp` until the trainer replaces it by its own or by `OWN`.
  `reward` is packed only for a critic; before the first step the trainer
  replaces it by `advantage`, `old_value` and `returns`. `experts`, of `tokens`,
  `[A, B, T, L, K]`, is packed only if choices of experts are recorded. `exact`,
  with `engine.exact`, are log-probabilities by the engine's program.
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
  experts: ArrayT | None = None
  exact: ArrayT | None = None

  @property
  def inputs(self) -> tuple[Any, ...]:
    """What log-probabilities are computed from, and where: at the weights."""
    scored = self.weight != 0
    of = self.segment_ids
    return self.tokens, self.targets, self.positions, of, scored, self.experts

  @property
  def states(self) -> tuple[ArrayT, ArrayT, ArrayT]:
    """What values are computed from."""
    return self.tokens, self.positions, self.segment_ids


# One `Rows` for each configured row length.
HostBatch = tuple[Rows[np.ndarray], ...]
TrainBatch = tuple[Rows[jax.Array], ...]
AbstractBatch = tuple[Rows[jax.ShapeDtypeStruct], ...]


def abstract(
  config: config_lib.BatchConfig,
  *,
  multiple: int = 1,
  rewards: bool = False,
  experts: jax.ShapeDtypeStruct | None = None,
) -> AbstractBatch:
  """Returns the shapes and dtypes of every batch that `pack` makes."""

  def rows(length: int) -> Rows[jax.ShapeDtypeStruct]:
    b = config.rows(length, multiple)
    shape = (config.max_micro_batches, b, length)
    ids = jax.ShapeDtypeStruct(shape, np.int32)
    values = jax.ShapeDtypeStruct(shape, np.float32)
    return Rows(
      *(ids, ids, ids, ids, values, values, values, values),
      used=jax.ShapeDtypeStruct((), np.int32),
      reward=values if rewards else None,
      experts=experts
      and jax.ShapeDtypeStruct((*shape, *experts.shape), experts.dtype),
    )

  return tuple(rows(length) for length in config.row_lengths)


def pack(
  sequences: Sequence[Example],
  *,
  config: config_lib.BatchConfig,
  multiple: int = 1,
  rewards: bool = False,
  experts: jax.ShapeDtypeStruct | None = None,
) -> HostBatch:
  """Packs sequences of a token or more, one `Rows` for each row length.

  Args:
    sequences: what is packed.
    config: the shapes, and how many segments a row may hold.
    multiple: a micro-batch has a multiple of so many rows, the number of
      devices that these are sharded over.
    rewards: whether to pack the tokens' rewards too.
    experts: a token's recorded experts (`policy.experts.record`), to pack them
      too; None leaves them out.

  Raises:
    ValueError: a sequence is longer than every row, or needs more micro-batches
      than the configuration allows.
  """
  batch: HostBatch = jax.tree.map(
    lambda x: np.zeros(x.shape, x.dtype),
    abstract(config, multiple=multiple, rewards=rewards, experts=experts),
  )
  for rows in batch:
    if rows.experts is not None:  # No token has a record yet.
      rows.experts[...] = np.iinfo(rows.experts.dtype).max
  # Predictions of each: all tokens but the first.
  sizes = [len(s.token_ids) - 1 for s in sequences]
  found = _packed(sizes, config=config, multiple=multiple)
  for rows, packed in zip(batch, found, strict=True):
    b = rows.tokens.shape[1]
    rows.used[()] = len(packed) // b
    for r, row in enumerate(packed):
      start = 0
      for segment, n in enumerate(row, 1):
        sequence = sequences[n]
        stop = start + sizes[n]
        here = np.s_[r // b, r % b, start:stop]
        start = stop
        rows.tokens[here] = sequence.token_ids[:-1]
        rows.targets[here] = sequence.token_ids[1:]
        rows.positions[here] = np.arange(sizes[n])
        rows.segment_ids[here] = segment
        rows.behaviour_logp[here] = sequence.logps[1:]
        rows.old_logp[here] = sequence.logps[1:]
        advantage = np.broadcast_to(sequence.advantage, sizes[n] + 1)
        rows.advantage[here] = advantage[1:]
        rows.weight[here] = sequence.weights[1:]
        if rows.reward is not None and sequence.rewards is not None:
          rows.reward[here] = sequence.rewards[1:]
        if rows.experts is not None and sequence.experts is not None:
          rows.experts[here] = sequence.experts[:-1]
  return batch


def rescored(
  batch: HostBatch, score: Callable[[list[np.ndarray]], list[np.ndarray]]
) -> list[np.ndarray]:
  """Scores the packed sequences; returns `[A, B, T]` of each of the `Rows`.

  `score` maps sequences, int32 `[T]`, to float32 `[T - 1]`. Padding has 0.
  """
  out = [np.zeros_like(rows.old_logp) for rows in batch]
  places = []
  sequences = []
  for rows, row in zip(batch, out, strict=True):
    for a, b in np.ndindex(rows.tokens.shape[:2]):
      ids = rows.segment_ids[a, b]
      for here in (ids == segment for segment in np.unique(ids[ids > 0])):
        last = rows.targets[a, b, here][-1:]
        sequences.append(np.append(rows.tokens[a, b, here], last))
        places.append((row[a, b], here))
  for (at, here), found in zip(places, score(sequences), strict=True):
    at[here] = found
  return out


def micro_batches(
  sizes: Sequence[int], *, config: config_lib.BatchConfig, multiple: int = 1
) -> tuple[int, ...]:
  """Returns how many micro-batches of each row length `pack` fills, or raises.

  `sizes` are numbers of predictions: all tokens of a sequence but the first.
  """
  packed = _packed(sizes, config=config, multiple=multiple)
  return tuple(
    len(rows) // config.rows(length, multiple)
    for rows, length in zip(packed, config.row_lengths, strict=True)
  )


# The sequences in a row, as indices.
_Row = list[int]


def _packed(
  sizes: Sequence[int], *, config: config_lib.BatchConfig, multiple: int
) -> list[list[_Row]]:
  """Assigns sequences of `sizes` predictions to rows of each length.

  Rows fill micro-batches, the last one with empty rows.
  """
  lengths = config.row_lengths
  most = config.max_segments
  waiting: list[_Row] = [[] for _ in lengths]
  # The sort is stable: sequences of equal length keep their order.
  for n in sorted(range(len(sizes)), key=lambda n: -sizes[n]):
    if sizes[n] > lengths[-1]:
      raise ValueError(
        f"A trajectory of {sizes[n] + 1} tokens does not fit the longest "
        f"training row of {lengths[-1]}; raise batch.row_lengths or lower "
        "episode.max_context."
      )
    waiting[bisect.bisect_left(lengths, sizes[n])].append(n)
  packed: list[list[_Row]] = []
  # Longest rows first: shorter sequences fill the space left in their
  # micro-batches, whose padding would be computed anyway.
  for length in reversed(lengths):
    rows: list[_Row] = []
    _best_fit(rows, waiting.pop(), sizes, length, most, grows=True)
    b = config.rows(length, multiple)
    rows += [[] for _ in range(-len(rows) % b)]
    if len(rows) > config.max_micro_batches * b:
      raise ValueError(
        f"An optimizer step needs {len(rows) // b} micro-batches of {b} rows x "
        f"{length} tokens, batch.max_micro_batches is "
        f"{config.max_micro_batches}; raise it."
      )
    for shorter in reversed(waiting):
      shorter[:] = _best_fit(rows, shorter, sizes, length, most)
    packed.insert(0, rows)
  return packed


def _best_fit(
  rows: list[_Row],
  waiting: _Row,
  sizes: Sequence[int],
  length: int,
  most: int,
  *,
  grows: bool = False,
) -> _Row:
  """Puts each sequence into the fullest row with room for it.

  Returns those that no row has room for; with `grows`, they get new rows.
  """
  free = sorted(
    (length - sum(sizes[n] for n in row), r)
    for r, row in enumerate(rows)
    if len(row) < most
  )
  rest = []
  for n in waiting:
    place = bisect.bisect_left(free, (sizes[n], 0))
    if place < len(free):
      room, r = free.pop(place)
    elif grows:
      room = length
      r = len(rows)
      rows.append([])
    else:
      rest.append(n)
      continue
    rows[r].append(n)
    if len(rows[r]) < most:
      bisect.insort(free, (room - sizes[n], r))
  return rest
