"""Compares every pair of rows in every measure: effect, interval, p values."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence

import numpy as np

from anysearch_jax.evaluation import (
  columns,
  intervals,
  measures,
  metrics,
  pairing,
  significance,
)

MEASURES = ("accuracy", "tp", "searches", "total_tokens", "cost")


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
    questions: number of questions that they are of.
    estimate: ours minus theirs; paired bootstrap, clustered by question. The
      interval covers the choice of questions, not the variation of training; if
      seeds are separate training runs, see `by_seed`.
    by_seed: the difference on each seed alone, ascending by seed.
    permutation: p value of exchanging whole questions between the rows.
    mcnemar: mid-p of the discordant pairs. For accuracy only, and only if each
      question has one pair, because the test needs independent pairs.
    adjusted: `permutation` after Holm's correction over its family: all pairs
      of rows, in this measure, at this level of detail (everything pooled; by
      budget; by dataset; by both).
    discovery: `permutation` after Benjamini and Hochberg's correction over the
      same family: the false discovery rate of claiming all lines with a value
      that is not larger.
  """

  ours: str
  theirs: str
  measure: str
  dataset: str | None
  budget: int | None
  n: int
  questions: int
  estimate: intervals.Estimate
  by_seed: tuple[float | None, ...]
  permutation: float | None
  mcnemar: float | None
  adjusted: float | None = None
  discovery: float | None = None


def pairwise(
  rows: Sequence[metrics.Row],
  names: Sequence[str] = MEASURES,
  *,
  resamples: int = 10_000,
  draws: int = 10_000,
) -> tuple[Difference, ...]:
  """Compares every two rows, the earlier minus the later.

  Args:
    rows: two or more rows on the same questions, see `pairing.pair`.
    names: keys of `measures.MEASURES`.
    resamples: number of bootstrap resamples.
    draws: number of random permutations.

  Returns:
    Lines ordered by pair, dataset (all together first), budget (all together
    first) and measure. With one dataset, there are no lines by dataset.

  Raises:
    ValueError: two rows cannot be paired.
  """
  found = [
    line
    for ours, theirs in itertools.combinations(rows, 2)
    for line in _compared(ours, theirs, names, resamples, draws)
  ]
  families: dict[tuple, list[int]] = {}
  for place, line in enumerate(found):
    level = line.measure, line.dataset is None, line.budget is None
    families.setdefault(level, []).append(place)
  for places in families.values():
    p = np.array([found[i].permutation for i in places], dtype=np.float64)
    for i, adjusted, discovery in zip(
      places,
      significance.holm(p),
      significance.benjamini_hochberg(p),
      strict=True,
    ):
      found[i] = dataclasses.replace(
        found[i], adjusted=_defined(adjusted), discovery=_defined(discovery)
      )
  return tuple(found)


def _compared(
  ours: metrics.Row,
  theirs: metrics.Row,
  names: Sequence[str],
  resamples: int,
  draws: int,
) -> list[Difference]:
  pairs = pairing.pair(ours, theirs)
  if not pairs.questions:
    return []
  first, second = (
    measures.sums(side, names) for side in (pairs.ours, pairs.theirs)
  )
  used = np.array(first.budgets) >= 1
  # Index 0 of the budget axis is B >= 1 pooled.
  left, right = (_pooled(side.values, used) for side in (first, second))
  questions, cells, sums = left.shape
  difference = _difference(first, names, cells)
  estimates = intervals.bootstrap(
    np.stack([left, right], axis=1).reshape(questions, -1),
    lambda t: difference(
      *np.moveaxis(t.reshape(*t.shape[:2], 2, cells * sums), 2, 0)
    ),
    stratum=first.stratum,
    resamples=resamples,
  )
  p_values = significance.sign_flips(
    left.reshape(questions, -1),
    right.reshape(questions, -1),
    difference,
    stratum=first.stratum,
    draws=draws,
  )
  by_seed = difference(
    *(
      _pooled(_by_seed(side, pairs, first), used).reshape(
        -1, len(first.datasets), cells * sums
      )
      for side in (pairs.ours, pairs.theirs)
    )
  ).T
  sets = [None, *(first.datasets if len(first.datasets) > 1 else ())]
  keys = itertools.product(sets, (None, *first.budgets), names)
  parts = {None: pairs} | pairs.by_dataset()
  lines = []
  for (dataset, budget, name), estimate, seeds, p in zip(
    keys, estimates, by_seed, p_values, strict=True
  ):
    n, asked, mcnemar = _counts(parts[dataset], budget)
    lines.append(
      Difference(
        ours.label,
        theirs.label,
        name,
        dataset,
        budget,
        n,
        asked,
        estimate,
        tuple(map(_defined, seeds)),
        _defined(p),
        mcnemar if name == "accuracy" else None,
      )
    )
  return lines


def _pooled(values: np.ndarray, used: np.ndarray) -> np.ndarray:
  """Prepends the pooled sums of the `used` budgets to sums `[..., B, K]`."""
  pooled = values[..., used, :].sum(axis=-2, keepdims=True)
  return np.concatenate([pooled, values], axis=-2)


def _by_seed(
  side: columns.Columns, pairs: pairing.Pairs, found: measures.Sums
) -> np.ndarray:
  """Returns sums by seed, dataset and budget, `[seeds, D, B, K]`."""
  seeds, seed = np.unique(pairs.ours.seed, return_inverse=True)
  shape = len(seeds), len(found.datasets), len(found.budgets)
  budget = np.searchsorted(found.budgets, pairs.budget)
  place = seed, pairs.stratum[pairs.question], budget
  summed = measures.columns_of(side)
  return intervals.cluster_sums(
    np.ravel_multi_index(place, shape),
    [summed[name] for name in found.names],
    clusters=int(np.prod(shape)),
  ).reshape(*shape, -1)


def _difference(
  found: measures.Sums, names: Sequence[str], cells: int
) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
  """Returns a map from both rows' totals to differences `[R, S]`.

  Totals are `[R, D, cells * K]`.
  """
  index = np.array(
    [[found.names.index(n) for n in measures.MEASURES[m]] for m in names]
  )

  def measured(totals: np.ndarray) -> np.ndarray:
    parts = totals.reshape(*totals.shape[:2], cells, -1)
    return intervals.ratio(parts[..., index[:, 0]], parts[..., index[:, 1]])

  def difference(ours: np.ndarray, theirs: np.ndarray) -> np.ndarray:
    by_set = measured(ours) - measured(theirs)
    together = by_set.mean(axis=1, keepdims=True)
    if by_set.shape[1] > 1:
      together = np.concatenate([together, by_set], axis=1)
    return together.reshape(len(together), -1)

  return difference


def _counts(
  pairs: pairing.Pairs, budget: int | None
) -> tuple[int, int, float | None]:
  """Returns the pairs, the questions and McNemar's p value of a cell."""
  mask = pairs.budget >= 1 if budget is None else pairs.budget == budget
  n, questions = int(mask.sum()), len(np.unique(pairs.ours.question[mask]))
  if not n or n > questions:
    return n, questions, None
  ahead = (pairs.ours.em - pairs.theirs.em)[mask]
  wins, losses = int((ahead > 0).sum()), int((ahead < 0).sum())
  return n, questions, significance.mcnemar(wins, losses)


def _defined(value: float) -> float | None:
  return None if np.isnan(value) else float(value)
