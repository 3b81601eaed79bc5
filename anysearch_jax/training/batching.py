"""Packs trajectories into arrays of fixed shapes.

A trajectory goes to the shortest row length that holds it, or fills free space
in a longer row. A row holds several trajectories (segments), and rows of one
length form micro-batches. Shapes depend on the configuration alone, so a run
compiles one train step; the number of micro-batches that hold tokens is one of
its inputs.
"""

from __future__ import annotations

import bisect
import itertools
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

  def split(self, starts: Sequence[int]) -> list[Example]:
    """Returns the parts that begin at these indices, ascending from 0."""
    if len(starts) == 1:
      return [self]
    parts = []
    for start, stop in itertools.pairwise([*starts, len(self.token_ids)]):
      values = {
        name: value[start:stop] if isinstance(value, np.ndarray) else value
        for name, value in self._asdict().items()
      }
      parts.append(Example(**values))
    return parts


# Stands for an old log-prob that is the step's own; no log-prob is positive.
OWN = np.inf

# Arrays on the host, on devices, or their shapes and dtypes.
ArrayT = TypeVar("ArrayT", np.ndarray, jax.Array, jax.ShapeDtypeStruct)


class Rows(NamedTuple, Generic[ArrayT]):
  """Micro-batches of one row length; arrays are `[A, B, T]`.

  Index t is the prediction of `targets[t]` from `tokens[..t]`. A is the number
  of micro-batches.

  Attributes:
    tokens: int32, ids.
    targets: int32, the id after each of `tokens`.
    positions: int32, index of the token in its trajectory.
    segment_ids: int32, from 1 in each row; 0 is padding.
    behaviour_logp: log-probability of the target when it was sampled.
    old_logp: the same under the old policy. It equals `behaviour_logp` until
      the trainer replaces it by its own or by `OWN`.
    advantage: of the target.
    weight: of the target in the loss; 0 if the model did not write it.
    used: int32 `[]`, number of micro-batches that hold tokens.
    reward: of the target; packed only for a critic. Before the first step, the
      trainer replaces it by `advantage`, `old_value` and `returns`.
    old_value: the critic's value before the rollout's first step.
    returns: the critic's target.
    experts: `[A, B, T, L, K]`, experts of `tokens`; packed only if choices of
      experts are recorded.
    exact: log-probability of the target by the engine's program, with
      `engine.exact`.
  """

  tokens: ArrayT
  targets: ArrayT
  positions: ArrayT
  segment_ids: ArrayT
  behaviour_logp: ArrayT
  old_logp: ArrayT
  advantage: ArrayT
  weight: ArrayT
  used: ArrayT
  reward: ArrayT | None = None
  old_value: ArrayT | None = None
  returns: ArrayT | None = None
  experts: ArrayT | None = None
  exact: ArrayT | None = None

  @property
  def inputs(self) -> tuple[Any, ...]:
    """The arrays of `logprobs.token_logprobs`, from `tokens` to `recorded`.

    Tokens with a weight are scored.
    """
    return (
      self.tokens,
      self.targets,
      self.positions,
      self.segment_ids,
      self.weight != 0,
      self.experts,
    )

  @property
  def states(self) -> tuple[ArrayT, ArrayT, ArrayT]:
    """The arrays that values are computed from."""
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
  """Returns the shapes and dtypes of every batch that `pack` makes.

  Args:
    config, multiple, rewards, experts: as for `pack`.
  """

  def rows(length: int) -> Rows[jax.ShapeDtypeStruct]:
    row_count = config.rows(length, multiple)
    shape = (config.max_micro_batches, row_count, length)
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
    sequences: the examples.
    config: the shapes, and the limit on segments in a row.
    multiple: number of devices that the rows of a micro-batch are sharded over;
      their number is a multiple of it.
    rewards: whether to pack the tokens' rewards too.
    experts: shape and dtype of a token's recorded experts
      (`policy.experts.record`), to pack them too; None leaves them out.

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
  # The number of predictions of each: all tokens but the first.
  sizes = [len(sequence.token_ids) - 1 for sequence in sequences]
  rows_by_length = _packed(sizes, config=config, multiple=multiple)
  for rows, members_by_row in zip(batch, rows_by_length, strict=True):
    rows_per_batch = rows.tokens.shape[1]
    rows.used[()] = len(members_by_row) // rows_per_batch
    for index, members in enumerate(members_by_row):
      micro_batch, row = divmod(index, rows_per_batch)
      start = 0
      for segment, i in enumerate(members, 1):
        sequence = sequences[i]
        stop = start + sizes[i]
        span = np.s_[micro_batch, row, start:stop]
        start = stop
        rows.tokens[span] = sequence.token_ids[:-1]
        rows.targets[span] = sequence.token_ids[1:]
        rows.positions[span] = np.arange(sizes[i])
        rows.segment_ids[span] = segment
        rows.behaviour_logp[span] = sequence.logps[1:]
        rows.old_logp[span] = sequence.logps[1:]
        advantage = np.broadcast_to(sequence.advantage, sizes[i] + 1)
        rows.advantage[span] = advantage[1:]
        rows.weight[span] = sequence.weights[1:]
        if rows.reward is not None and sequence.rewards is not None:
          rows.reward[span] = sequence.rewards[1:]
        if rows.experts is not None and sequence.experts is not None:
          rows.experts[span] = sequence.experts[:-1]
  return batch


def rescored(
  batch: HostBatch, score: Callable[[list[np.ndarray]], list[np.ndarray]]
) -> list[np.ndarray]:
  """Scores the packed sequences again.

  Args:
    batch: the packed sequences.
    score: maps sequences, int32 `[T]`, to their log-probabilities, float32
      `[T - 1]`.

  Returns:
    float32 `[A, B, T]` for each of the `Rows`, 0 in padding.
  """
  exact = [np.zeros_like(rows.old_logp) for rows in batch]
  slots = []
  sequences = []
  for rows, scores in zip(batch, exact, strict=True):
    for row in np.ndindex(rows.tokens.shape[:2]):
      segment_ids = rows.segment_ids[row]
      for segment in np.unique(segment_ids[segment_ids > 0]):
        members = segment_ids == segment
        # The last token of a sequence is only a target.
        last = rows.targets[row][members][-1:]
        sequences.append(np.append(rows.tokens[row][members], last))
        slots.append((scores[row], members))
  for (row_scores, members), logps in zip(slots, score(sequences), strict=True):
    row_scores[members] = logps
  return exact


def micro_batches(
  sizes: Sequence[int], *, config: config_lib.BatchConfig, multiple: int = 1
) -> tuple[int, ...]:
  """Returns how many micro-batches of each row length `pack` fills.

  Args:
    sizes: numbers of predictions: all tokens of a sequence but the first.
    config, multiple: as for `pack`.

  Raises:
    ValueError: as `pack`.
  """
  packed = _packed(sizes, config=config, multiple=multiple)
  return tuple(
    len(rows) // config.rows(length, multiple)
    for rows, length in zip(packed, config.row_lengths, strict=True)
  )


# Indices of the sequences in a row.
_Row = list[int]


def _packed(
  sizes: Sequence[int], *, config: config_lib.BatchConfig, multiple: int
) -> list[list[_Row]]:
  """Assigns sequences of `sizes` predictions to rows of each length.

  Rows fill micro-batches, the last one with empty rows.
  """
  lengths = config.row_lengths
  max_segments = config.max_segments
  waiting: list[_Row] = [[] for _ in lengths]
  # The sort is stable: sequences of equal length keep their order.
  for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
    if sizes[i] > lengths[-1]:
      raise ValueError(
        f"A trajectory of {sizes[i] + 1} tokens does not fit the longest "
        f"training row of {lengths[-1]}; raise batch.row_lengths or lower "
        "episode.max_context."
      )
    waiting[bisect.bisect_left(lengths, sizes[i])].append(i)
  packed: list[list[_Row]] = []
  # Longest rows first: shorter sequences fill the space left in their
  # micro-batches, whose padding would be computed anyway.
  for length in reversed(lengths):
    rows: list[_Row] = []
    _best_fit(rows, waiting.pop(), sizes, length, max_segments, grows=True)
    b = config.rows(length, multiple)
    rows += [[] for _ in range(-len(rows) % b)]
    if len(rows) > config.max_micro_batches * b:
      raise ValueError(
        f"An optimizer step needs {len(rows) // b} micro-batches of {b} rows x "
        f"{length} tokens, batch.max_micro_batches is "
        f"{config.max_micro_batches}; raise it."
      )
    for shorter in reversed(waiting):
      shorter[:] = _best_fit(rows, shorter, sizes, length, max_segments)
    packed.insert(0, rows)
  return packed


def _best_fit(
  rows: list[_Row],
  waiting: _Row,
  sizes: Sequence[int],
  length: int,
  max_segments: int,
  *,
  grows: bool = False,
) -> _Row:
  """Puts each sequence into the fullest row with room for it.

  Args:
    rows: indices of the sequences in each row; the function adds to them.
    waiting: indices of the sequences to place.
    sizes: number of predictions of each sequence.
    length: tokens of a row.
    max_segments: limit on the sequences in a row.
    grows: whether sequences that no row has room for get new rows.

  Returns:
    The indices of the sequences that no row has room for.
  """
  # By the tokens left in them: the rows that may take another sequence.
  free = sorted(
    (length - sum(sizes[i] for i in row), r)
    for r, row in enumerate(rows)
    if len(row) < max_segments
  )
  unplaced = []
  for i in waiting:
    tightest = bisect.bisect_left(free, (sizes[i], 0))
    if tightest < len(free):
      room, r = free.pop(tightest)
    elif grows:
      room = length
      r = len(rows)
      rows.append([])
    else:
      unplaced.append(i)
      continue
    rows[r].append(i)
    if len(rows[r]) < max_segments:
      bisect.insort(free, (room - sizes[i], r))
  return unplaced
