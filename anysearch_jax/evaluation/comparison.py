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
    unpaired: number of episodes that only one of the rows has, or for whose
      training the other row has no match.
  """

  ours: columns.Columns
  theirs: columns.Columns
  failed: int = 0
  unpaired: int = 0

  def __len__(self) -> int:
    return len(self.ours)


def pair(ours: metrics.Row, theirs: metrics.Row) -> Pairs:
  """Pairs two rows by question, budget and seed.

  Budgets and seeds that only one row has are left out.

  Raises:
    ValueError: there is no common budget and seed; or each row has questions
      that the other lacks, so that a difference of accuracies would compare
      questions.
  """
  left = ours.columns
  right = theirs.columns
  left_cells, right_cells = _codes(
    (left.budget, left.seed), (right.budget, right.seed)
  )
  common_cells = np.intersect1d(left_cells, right_cells)
  if not len(common_cells):
    raise ValueError(
      f"{ours.label!r} and {theirs.label!r} have no budget and seed in common; "
      "evaluate both at the same budgets with the same seeds."
    )
  left = left.where(np.isin(left_cells, common_cells))
  right = right.where(np.isin(right_cells, common_cells))
  our_ids = set(left.ids[np.unique(left.question)])
  their_ids = set(right.ids[np.unique(right.question)])
  if not (our_ids <= their_ids or their_ids <= our_ids):
    raise ValueError(
      f"{ours.label!r} and {theirs.label!r} were measured on different "
      f"questions: {len(our_ids - their_ids)} only in the first, "
      f"{len(their_ids - our_ids)} only in the second, "
      f"{len(our_ids & their_ids)} in both. "
      "Expected the same questions, or one set inside the other; evaluate "
      "both on the same questions."
    )
  our_rows, their_rows = _match(left, right)
  order = np.lexsort((their_rows, our_rows))
  unpaired = len(left) - len(np.unique(our_rows))
  unpaired += len(right) - len(np.unique(their_rows))
  left = left.where(our_rows[order])
  right = right.where(their_rows[order])
  scored = ~(left.ended("failed") | right.ended("failed"))
  return Pairs(
    ours=left.where(scored),
    theirs=right.where(scored),
    failed=int((~scored).sum()),
    unpaired=unpaired,
  )


def _match(
  left: columns.Columns, right: columns.Columns
) -> tuple[np.ndarray, np.ndarray]:
  """Returns the indices of paired episodes in each table, int `[P]` each.

  An episode is matched by question, budget, seed and the rank of its training
  among those of its seed.
  """
  left_rows, left_ranks, right_rows, right_ranks = _ranked(left, right)
  ids = np.union1d(left.ids, right.ids)

  def keys(table: columns.Columns, rows: np.ndarray, ranks: np.ndarray):
    question = np.searchsorted(ids, table.ids)[table.question]
    return question[rows], table.budget[rows], table.seed[rows], ranks

  left_keys, right_keys = _codes(
    keys(left, left_rows, left_ranks), keys(right, right_rows, right_ranks)
  )
  _, left_places, right_places = np.intersect1d(
    left_keys, right_keys, assume_unique=True, return_indices=True
  )
  return left_rows[left_places], right_rows[right_places]


def _ranked(
  left: columns.Columns, right: columns.Columns
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
  """Ranks the trainings of each seed, so that equal ranks can be matched.

  Returns:
    Of each table, the indices of its episodes, int; and their trainings' ranks.
    The episodes of a single training are repeated, once for each rank of the
    other table.
  """
  shared = [name for name in left.runs if name in right.runs]
  rows: tuple[list[np.ndarray], ...] = ([], [])
  ranks: tuple[list[np.ndarray], ...] = ([], [])
  for seed in np.intersect1d(left.seed, right.seed):
    sides = [_by_training(table, seed, shared) for table in (left, right)]
    width = max(map(len, sides))
    for side, trainings in enumerate(sides):
      if len(trainings) == 1:
        trainings *= width
      for rank, episodes in enumerate(trainings):
        rows[side].append(episodes)
        ranks[side].append(np.full(len(episodes), rank))
  return (
    np.concatenate(rows[0]),
    np.concatenate(ranks[0]),
    np.concatenate(rows[1]),
    np.concatenate(ranks[1]),
  )


def _by_training(
  table: columns.Columns, seed: int, first: Sequence[str]
) -> list[np.ndarray]:
  """Returns the indices of a seed's episodes by training, `first` ones first.

  Trainings that both rows have come first, and so are matched.
  """
  names = [*first, *(name for name in table.runs if name not in first)]
  trainings = [
    np.flatnonzero((table.seed == seed) & (table.run == table.runs.index(name)))
    for name in names
  ]
  return [episodes for episodes in trainings if len(episodes)]


def _codes(
  left: Sequence[np.ndarray], right: Sequence[np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
  """Maps tuples of values to integers; equal tuples have equal codes.

  `left` and `right` hold one array for each item of the tuples.
  """
  left_code = np.zeros(len(left[0]), dtype=np.int64)
  right_code = np.zeros(len(right[0]), dtype=np.int64)
  for left_column, right_column in zip(left, right, strict=True):
    values = np.union1d(left_column, right_column)
    left_code *= len(values)
    left_code += np.searchsorted(values, left_column)
    right_code *= len(values)
    right_code += np.searchsorted(values, right_column)
  return left_code, right_code


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
  pools: list[tuple[int | None, list[int]]] = [(b, [b]) for b in budgets]
  with_searches = [b for b in budgets if b]
  if with_searches:
    pools.append((None, with_searches))
  names = ("accuracy", "tp")
  our_sums = measures.sums(pairs.ours, names)
  their_sums = measures.sums(pairs.theirs, names)
  table = []
  for budget, pool in pools:
    difference = inference.minus(
      our_sums.linearised(names, np.isin(our_sums.budgets, pool)[None]),
      their_sums.linearised(names, np.isin(their_sums.budgets, pool)[None]),
    )
    accuracy, tp = inference.effects(difference)
    mask = np.isin(pairs.ours.budget, pool)
    wins = mask & (pairs.ours.em > pairs.theirs.em)
    losses = mask & (pairs.ours.em < pairs.theirs.em)
    unused = losses & (pairs.ours.searches < pairs.ours.budget)
    table.append(
      Comparison(
        budget=budget,
        n=int(mask.sum()),
        wins=int(wins.sum()),
        losses=int(losses.sum()),
        losses_unused=int(unused.sum()),
        net=int(wins.sum()) - int(losses.sum()),
        difference=accuracy.estimate,
        tp_difference=tp.estimate,
        detectable=accuracy.detectable,
        tp_detectable=tp.detectable,
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

  Lines are ordered by pair, dataset (all together first), budget (all together
  first) and measure. A single dataset has no lines of its own.

  Args:
    rows: rows with the same questions, see `pair`.
    names: keys of `measures.MEASURES`.

  Raises:
    ValueError: two rows cannot be paired, see `pair`.
  """
  lines = [
    line
    for ours, theirs in itertools.combinations(rows, 2)
    for line in _compare_pair(ours, theirs, names)
  ]
  # Holm's correction within each family, see `Difference.adjusted`.
  families: dict[tuple, list[int]] = {}
  for i, line in enumerate(lines):
    family = line.measure, line.dataset is None, line.budget is None
    families.setdefault(family, []).append(i)
  for indices in families.values():
    p = np.array([lines[i].p for i in indices], dtype=np.float64)
    for i, adjusted in zip(indices, inference.holm(p).tolist(), strict=True):
      if lines[i].p is not None:
        lines[i] = dataclasses.replace(lines[i], adjusted=adjusted)
  return tuple(lines)


def _compare_pair(
  ours: metrics.Row, theirs: metrics.Row, names: Sequence[str]
) -> list[Difference]:
  """Returns the lines of `pairwise` for two rows."""
  pairs = pair(ours, theirs)
  if not len(pairs):
    return []
  our_sums = measures.sums(pairs.ours, names)
  their_sums = measures.sums(pairs.theirs, names)
  budgets = np.array(our_sums.budgets)
  # The first pool is of all B >= 1.
  pools = np.concatenate([budgets[None] >= 1, np.eye(len(budgets), dtype=bool)])
  by_dataset = [
    inference.minus(
      our_part.linearised(names, pools), their_part.linearised(names, pools)
    )
    for our_part, their_part in zip(
      our_sums.by_dataset(), their_sums.by_dataset(), strict=True
    )
  ]
  differences = [inference.average(by_dataset)]
  datasets: list[str | None] = [None]
  if len(by_dataset) > 1:
    differences += by_dataset
    datasets += our_sums.datasets
  tables = {None: pairs.ours} | columns.by_dataset(pairs.ours)
  effects = itertools.chain.from_iterable(map(inference.effects, differences))
  trainings = len(our_sums.runs), len(their_sums.runs)
  lines = []
  for dataset, budget in itertools.product(datasets, (None, *our_sums.budgets)):
    played = tables[dataset].budget
    in_pool = played >= 1 if budget is None else played == budget
    for name in names:
      effect = next(effects)
      lines.append(
        Difference(
          ours=ours.label,
          theirs=theirs.label,
          measure=name,
          dataset=dataset,
          budget=budget,
          n=int(in_pool.sum()),
          trainings=trainings,
          estimate=effect.estimate,
          detectable=effect.detectable,
          p=effect.p,
        )
      )
  return lines
