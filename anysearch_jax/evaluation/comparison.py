"""Compares rows on the same questions, episode by episode.

`compare` is the paper's early-stopping analysis of two rows: both discordant
counts, the number of losses that left budget unused, and the net gain.
`pairwise` compares every two rows in every measure.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np

from anysearch_jax.evaluation import columns, inference, measures, metrics

MEASURES = ("accuracy", "tp", "searches", "total_tokens", "cost")


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
  failed: int = 0
  unpaired: int = 0

  def __len__(self) -> int:
    return len(self.ours)


def pair(ours: metrics.Row, theirs: metrics.Row) -> Pairs:
  """Pairs two rows by question, budget and seed.

  Budgets and seeds that only one row has are left out. Raises ValueError if
  there is no common budget and seed, or if each row has questions that the
  other lacks: a difference of accuracies would then compare questions.
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
  rows, keys = _matched(left, right, sides)
  _, *found = np.intersect1d(
    keys[0], keys[1], assume_unique=True, return_indices=True
  )
  first, second = (at[own] for at, own in zip(rows, found, strict=True))
  order = np.lexsort((second, first))
  unpaired = len(left) - len(np.unique(first))
  unpaired += len(right) - len(np.unique(second))
  left, right = left.where(first[order]), right.where(second[order])
  kept = ~(left.ended("failed") | right.ended("failed"))
  return Pairs(
    left.where(kept), right.where(kept), int((~kept).sum()), unpaired
  )


def _matched(
  left: columns.Columns, right: columns.Columns, sides: list[tuple]
) -> tuple[list[np.ndarray], list[np.ndarray]]:
  """Returns the rows of each side, some repeated, and their unique keys."""
  shared = [name for name in left.runs if name in right.runs]
  rows: tuple[list[np.ndarray], ...] = ([], [])
  ranks: tuple[list[np.ndarray], ...] = ([], [])
  for seed in np.intersect1d(left.seed, right.seed):
    own = []
    for c in (left, right):
      # Trainings that both rows have come first, and so are matched.
      order = shared + [name for name in c.runs if name not in shared]
      found = [
        np.flatnonzero((c.seed == seed) & (c.run == c.runs.index(name)))
        for name in order
      ]
      own.append([episodes for episodes in found if len(episodes)])
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


@dataclasses.dataclass(frozen=True)
class Comparison:
  """The paper's early-stopping table for one budget.

  Attributes:
    budget: None: B >= 1 pooled.
    n: number of pairs.
    wins: number of pairs in which only we are right.
    losses: number of pairs in which only they are right.
    losses_unused: number of losses in which we left budget unused.
    net: wins - losses.
    difference: accuracy, ours minus theirs.
    tp_difference: tool productivity, ours minus theirs.
    detectable, tp_detectable: the smallest true difference that would be
      found, see `inference.Effect`.
  """

  budget: int | None
  n: int
  wins: int
  losses: int
  losses_unused: int
  net: int
  difference: inference.Estimate
  tp_difference: inference.Estimate
  detectable: float | None
  tp_detectable: float | None


def compare(pairs: Pairs) -> list[Comparison]:
  """Compares two rows at every common budget, then pooled over B >= 1.

  Episodes weigh alike, whatever their dataset.
  """
  budgets = [int(b) for b in np.unique(pairs.ours.budget)]
  used = [b for b in budgets if b]
  cells = [(b, [b]) for b in budgets] + ([(None, used)] if used else [])
  names = ("accuracy", "tp")
  sums = [measures.sums(side, names) for side in (pairs.ours, pairs.theirs)]
  table = []
  for budget, pool in cells:
    found = (
      side.linearised(names, np.isin(side.budgets, pool)[None]) for side in sums
    )
    accuracy, tp = inference.effects(inference.minus(*found))
    mask = np.isin(pairs.ours.budget, pool)
    wins = mask & (pairs.ours.em > pairs.theirs.em)
    losses = mask & (pairs.ours.em < pairs.theirs.em)
    unused = losses & (pairs.ours.searches < pairs.ours.budget)
    n, won, lost, early = (int(x.sum()) for x in (mask, wins, losses, unused))
    table.append(
      Comparison(
        *(budget, n, won, lost, early, won - lost),
        *(accuracy.estimate, tp.estimate),
        *(accuracy.detectable, tp.detectable),
      )
    )
  return table


@dataclasses.dataclass(frozen=True)
class Difference:
  """The difference of two rows in one measure, on their common episodes.

  Attributes:
    ours, theirs: labels of the rows.
    measure: key of `measures.MEASURES`.
    dataset: name; None: the average over all, with equal weights, as in the
      paper.
    budget: None: all B >= 1 pooled.
    n: number of pairs of episodes.
    trainings: number of trainings of each row.
    estimate: ours minus theirs. The interval covers the choice of questions
      and, for a row of several trainings, that of trainings; a row of one
      training is that policy only.
    detectable: the smallest true difference that would be found, see
      `inference.Effect`.
    p: p value of no difference, where the interval just reaches zero; None
      unless both rows have `inference.DECIDING` trainings.
    adjusted: `p` after Holm's correction over its family: all pairs of rows, in
      this measure, at this level of detail (everything pooled; by budget; by
      dataset; by both).
  """

  ours: str
  theirs: str
  measure: str
  dataset: str | None
  budget: int | None
  n: int
  trainings: tuple[int, int]
  estimate: inference.Estimate
  detectable: float | None
  p: float | None
  adjusted: float | None = None


def pairwise(
  rows: Sequence[metrics.Row], names: Sequence[str] = MEASURES
) -> tuple[Difference, ...]:
  """Compares every two rows, the earlier minus the later.

  The rows have the same questions, see `pair`; `names` are keys of
  `measures.MEASURES`. Lines are ordered by pair, dataset (all together first),
  budget (all together first) and measure. One dataset has no lines of its own.
  Raises as `pair`.
  """
  found = [
    line
    for ours, theirs in itertools.combinations(rows, 2)
    for line in _compared(ours, theirs, names)
  ]
  families: dict[tuple, list[int]] = {}
  for place, line in enumerate(found):
    level = line.measure, line.dataset is None, line.budget is None
    families.setdefault(level, []).append(place)
  for places in families.values():
    p = np.array([found[i].p for i in places], dtype=np.float64)
    for i, adjusted in zip(places, inference.holm(p).tolist(), strict=True):
      if found[i].p is not None:
        found[i] = dataclasses.replace(found[i], adjusted=adjusted)
  return tuple(found)


def _compared(
  ours: metrics.Row, theirs: metrics.Row, names: Sequence[str]
) -> list[Difference]:
  pairs = pair(ours, theirs)
  if not len(pairs):
    return []
  first, second = (
    measures.sums(side, names) for side in (pairs.ours, pairs.theirs)
  )
  budgets = np.array(first.budgets)
  # The first pool is of all B >= 1.
  pools = np.concatenate([budgets[None] >= 1, np.eye(len(budgets), dtype=bool)])
  parts = [
    inference.minus(a.linearised(names, pools), b.linearised(names, pools))
    for a, b in zip(first.by_dataset(), second.by_dataset(), strict=True)
  ]
  several = len(parts) > 1
  shown = [inference.average(parts), *(parts if several else ())]
  effects = [effect for part in shown for effect in inference.effects(part)]
  sets = [None, *(first.datasets if several else ())]
  by_set = {None: pairs.ours} | columns.by_dataset(pairs.ours)
  cells = [
    (dataset, budget, int((at >= 1 if budget is None else at == budget).sum()))
    for dataset, budget in itertools.product(sets, (None, *first.budgets))
    for at in [by_set[dataset].budget]
  ]
  return [
    Difference(
      *(ours.label, theirs.label, name, *cell),
      (len(first.runs), len(second.runs)),
      *(effect.estimate, effect.detectable, effect.p),
    )
    for (cell, name), effect in zip(
      itertools.product(cells, names), effects, strict=True
    )
  ]
