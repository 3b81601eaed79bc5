"""Pairs the episodes of two rows."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

from anysearch_jax.evaluation import columns, metrics


@dataclasses.dataclass(frozen=True, eq=False)
class Pairs:
  """P episodes of two rows that share question, budget and seed.

  Where both rows have as many trainings of a seed, these are matched: equal
  trainings with each other, the others in their order. A single training is
  matched with each of the other row's, and its episodes are then repeated.

  Attributes:
    ours, theirs: P scored episodes each, in the same order.
    failed: number of pairs left out because one of the episodes failed.
    unpaired: number of episodes that only one of the rows has, or that have no
      training to be matched with.
  """

  ours: columns.Columns
  theirs: columns.Columns
  failed: int
  unpaired: int

  def __len__(self) -> int:
    return len(self.ours)

  @property
  def budget(self) -> np.ndarray:
    """The budget of our episodes, int `[P]`."""
    return self.ours.budget

  @functools.cached_property
  def question(self) -> np.ndarray:
    """Index of the question in [0, questions), int `[P]`."""
    return np.unique(self.ours.question, return_inverse=True)[1]

  @functools.cached_property
  def questions(self) -> int:
    """The number of questions."""
    return len(np.unique(self.ours.question))

  @functools.cached_property
  def stratum(self) -> np.ndarray:
    """Index in `datasets` of each question, int `[questions]`."""
    return np.unique(self._dataset_of, return_inverse=True)[1]

  @functools.cached_property
  def datasets(self) -> tuple[str, ...]:
    """The datasets that occur, in the paper's order."""
    return tuple(
      self.ours.datasets[code] for code in np.unique(self._dataset_of)
    )

  @property
  def _dataset_of(self) -> np.ndarray:
    return self.ours.dataset_of[np.unique(self.ours.question)]

  def where(self, mask: np.ndarray) -> Pairs:
    """Returns the pairs of a mask `[P]`; `failed` and `unpaired` become 0."""
    return Pairs(self.ours.where(mask), self.theirs.where(mask), 0, 0)

  def by_dataset(self) -> dict[str, Pairs]:
    """Returns one part for each dataset that occurs, in the paper's order."""
    codes = np.unique(self.ours.dataset)
    return {
      self.ours.datasets[code]: self.where(self.ours.dataset == code)
      for code in codes
    }


def pair(ours: metrics.Row, theirs: metrics.Row) -> Pairs:
  """Pairs two rows by question, budget and seed.

  Budgets and seeds that only one row has are left out. One row's questions must
  be a subset of the other's.

  Raises:
    ValueError: the rows have no common budget and seed, or each has questions
      that the other lacks. In the latter case a difference of accuracies would
      compare questions rather than rows.
  """
  left, right = ours.columns, theirs.columns
  cells = _codes([(c.budget, c.seed) for c in (left, right)])
  common = np.intersect1d(cells[0], cells[1])
  if not len(common):
    raise ValueError(
      f"{ours.label!r} and {theirs.label!r} have no budget and seed in common; "
      "evaluate both at the same budgets with the same seeds."
    )
  left, right = (
    c.where(np.isin(cell, common))
    for c, cell in zip((left, right), cells, strict=True)
  )
  mine, others = (set(c.ids[np.unique(c.question)]) for c in (left, right))
  if not (mine <= others or others <= mine):
    raise ValueError(
      f"{ours.label!r} and {theirs.label!r} were measured on different "
      f"questions: {len(mine - others)} only in the first, "
      f"{len(others - mine)} only in the second, {len(mine & others)} in both. "
      "Expected the same questions, or one set inside the other; evaluate "
      "both on the same questions."
    )
  ids = np.union1d(left.ids, right.ids)
  sides = [
    (np.searchsorted(ids, c.ids)[c.question], c.budget, c.seed)
    for c in (left, right)
  ]
  return _join(left, right, *_matched(left, right, sides))


def _matched(
  left: columns.Columns, right: columns.Columns, sides: list[tuple]
) -> tuple[list[np.ndarray], list[np.ndarray]]:
  """Returns the rows of each side, some repeated, and their unique keys."""
  order = _matching_order(left, right)
  rows: tuple[list[np.ndarray], ...] = ([], [])
  ranks: tuple[list[np.ndarray], ...] = ([], [])
  for seed in np.intersect1d(left.seed, right.seed):
    own = [
      [
        np.flatnonzero((c.seed == seed) & (c.run == c.runs.index(name)))
        for name in names
        if np.any((c.seed == seed) & (c.run == c.runs.index(name)))
      ]
      for c, names in zip((left, right), order, strict=True)
    ]
    width = max(map(len, own))
    for side, found in enumerate(own):
      found = found * width if len(found) == 1 else found
      for rank, episodes in enumerate(found):
        rows[side].append(episodes)
        ranks[side].append(np.full(len(episodes), rank))
  chosen = [np.concatenate(parts) for parts in rows]
  keys = _codes(
    [
      (*(column[at] for column in side), np.concatenate(rank))
      for side, at, rank in zip(sides, chosen, ranks, strict=True)
    ]
  )
  return chosen, keys


def _matching_order(
  left: columns.Columns, right: columns.Columns
) -> tuple[list[str], list[str]]:
  """Returns each row's trainings, those that both have first."""
  shared = [name for name in left.runs if name in right.runs]
  return (
    shared + [name for name in left.runs if name not in shared],
    shared + [name for name in right.runs if name not in shared],
  )


def budgets_of(row: metrics.Row, budget: int, other: int) -> Pairs:
  """Pairs a row's episodes at `budget` with its own at another.

  Pairs have the same question, seed and training.
  """
  left, right = (
    row.columns.where(row.columns.budget == b) for b in (budget, other)
  )
  keys = _codes([(c.question, c.seed, c.run) for c in (left, right)])
  return _join(left, right, [np.arange(len(c)) for c in (left, right)], keys)


def _codes(sides: list[tuple[np.ndarray, ...]]) -> list[np.ndarray]:
  """Maps tuples of values to integers, with equal codes on both sides."""
  codes = [np.zeros(len(side[0]), dtype=np.int64) for side in sides]
  for columns_ in zip(*sides, strict=True):
    values = np.union1d(*columns_)
    codes = [
      code * len(values) + np.searchsorted(values, column)
      for code, column in zip(codes, columns_, strict=True)
    ]
  return codes


def _join(
  left: columns.Columns,
  right: columns.Columns,
  rows: list[np.ndarray],
  keys: list[np.ndarray],
) -> Pairs:
  """Joins `rows` of each side whose keys are equal; keys are unique."""
  _, mine, others = np.intersect1d(
    keys[0], keys[1], assume_unique=True, return_indices=True
  )
  at = rows[0][mine], rows[1][others]
  left_out = sum(
    len(side) - len(np.unique(found))
    for side, found in zip((left, right), at, strict=True)
  )
  order = np.lexsort((at[1], at[0]))
  left, right = left.where(at[0][order]), right.where(at[1][order])
  failed = columns.OUTCOMES.index("failed")
  kept = (left.outcome != failed) & (right.outcome != failed)
  return Pairs(
    left.where(kept), right.where(kept), int((~kept).sum()), left_out
  )
