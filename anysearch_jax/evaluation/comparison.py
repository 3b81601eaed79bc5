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
  first = ours.columns
  second = theirs.columns
  first_cells, second_cells = _codes(
    (first.budget, first.seed), (second.budget, second.seed)
  )
  common_cells = np.intersect1d(first_cells, second_cells)
  if not len(common_cells):
    raise ValueError(
      f"{ours.label!r} and {theirs.label!r} have no budget and seed in common; "
      "evaluate both at the same budgets with the same seeds."
    )
  first = first.where(np.isin(first_cells, common_cells))
  second = second.where(np.isin(second_cells, common_cells))
  our_ids = set(first.ids[np.unique(first.question)])
  their_ids = set(second.ids[np.unique(second.question)])
  if not (our_ids <= their_ids or their_ids <= our_ids):
    raise ValueError(
      f"{ours.label!r} and {theirs.label!r} were measured on different "
      f"questions: {len(our_ids - their_ids)} only in the first, "
      f"{len(their_ids - our_ids)} only in the second, "
      f"{len(our_ids & their_ids)} in both. "
      "Expected the same questions, or one set inside the other; evaluate "
      "both on the same questions."
    )
  our_rows, their_rows = _match(first, second)
  order = np.lexsort((their_rows, our_rows))
  unpaired = len(first) - len(np.unique(our_rows))
  unpaired += len(second) - len(np.unique(their_rows))
  first = first.where(our_rows[order])
  second = second.where(their_rows[order])
  scored = ~(first.ended("failed") | second.ended("failed"))
  return Pairs(
    ours=first.where(scored),
    theirs=second.where(scored),
    failed=int((~scored).sum()),
    unpaired=unpaired,
  )


def _match(
  first: columns.Columns, second: columns.Columns
) -> tuple[np.ndarray, np.ndarray]:
  """Returns the indices of paired episodes in each table, int `[P]` each.

  An episode is matched by question, budget, seed and the rank of its training
  among those of its seed.
  """
  first_rows, first_ranks, second_rows, second_ranks = _ranked(first, second)
  ids = np.union1d(first.ids, second.ids)
  first_question = np.searchsorted(ids, first.ids)[first.question]
  second_question = np.searchsorted(ids, second.ids)[second.question]
  first_keys, second_keys = _codes(
    (
      first_question[first_rows],
      first.budget[first_rows],
      first.seed[first_rows],
      first_ranks,
    ),
    (
      second_question[second_rows],
      second.budget[second_rows],
      second.seed[second_rows],
      second_ranks,
    ),
  )
  _, first_places, second_places = np.intersect1d(
    first_keys, second_keys, assume_unique=True, return_indices=True
  )
  return first_rows[first_places], second_rows[second_places]


def _ranked(
  first: columns.Columns, second: columns.Columns
) -> tuple[np.ndarray, ...]:
  """Ranks the trainings of each seed, so that equal ranks can be matched.

  Returns:
    The indices of the first table's episodes and the ranks of their trainings,
    then those of the second table. The episodes of a single training are
    repeated, once for each rank of the other table.
  """
  shared = [name for name in first.runs if name in second.runs]
  arrays: tuple[list[np.ndarray], ...] = ([], [], [], [])
  for seed in np.intersect1d(first.seed, second.seed):
    first_trainings = _by_training(first, seed, shared)
    second_trainings = _by_training(second, seed, shared)
    if len(first_trainings) == 1:
      first_trainings *= len(second_trainings)
    elif len(second_trainings) == 1:
      second_trainings *= len(first_trainings)
    for rank, episodes in enumerate(first_trainings):
      arrays[0].append(episodes)
      arrays[1].append(np.full(len(episodes), rank))
    for rank, episodes in enumerate(second_trainings):
      arrays[2].append(episodes)
      arrays[3].append(np.full(len(episodes), rank))
  return tuple(map(np.concatenate, arrays))


def _by_training(
  table: columns.Columns, seed: int, shared: Sequence[str]
) -> list[np.ndarray]:
  """Returns the indices of a seed's episodes, by training.

  The `shared` trainings, which both rows have, come first and so are matched.
  """
  names = [*shared, *(name for name in table.runs if name not in shared)]
  trainings = [
    np.flatnonzero((table.seed == seed) & (table.run == table.runs.index(name)))
    for name in names
  ]
  return [episodes for episodes in trainings if len(episodes)]


def _codes(
  first: Sequence[np.ndarray], second: Sequence[np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
  """Maps tuples of values to integers; equal tuples have equal codes.

  `first` and `second` hold one array for each item of the tuples.
  """
  first_code = np.zeros(len(first[0]), dtype=np.int64)
  second_code = np.zeros(len(second[0]), dtype=np.int64)
  for first_column, second_column in zip(first, second, strict=True):
    values = np.union1d(first_column, second_column)
    first_code *= len(values)
    first_code += np.searchsorted(values, first_column)
    second_code *= len(values)
    second_code += np.searchsorted(values, second_column)
  return first_code, second_code


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
