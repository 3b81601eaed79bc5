"""Compares every pair of rows in every measure: effect, interval, p values."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np

from anysearch_jax.evaluation import (
  columns,
  inference,
  intervals,
  linear,
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
    trainings: number of trainings of each row.
    estimate: ours minus theirs. The interval covers the choice of questions
      and, for a row of several trainings, that of trainings; a row of one
      training is that policy only.
    detectable: the smallest true difference that would be found, see
      `inference.Effect`.
    seeds: the evaluation seeds, ascending.
    by_seed: the difference on each of `seeds` alone.
    p: p value of no difference: of flipped signs of questions between rows of
      one training each; otherwise Student's, with the interval's variance.
    between: p value of exchanging whole trainings; None unless both rows have
      several.
    mcnemar: mid-p of the discordant pairs. For accuracy only, and only if each
      question has one pair, because the test needs independent pairs.
    adjusted: `p` after Holm's correction over its family: all pairs of rows, in
      this measure, at this level of detail (everything pooled; by budget; by
      dataset; by both).
    discovery: `p` after Benjamini and Hochberg's correction over the same
      family: the false discovery rate of claiming all lines with a value that
      is not larger.
  """

  ours: str
  theirs: str
  measure: str
  dataset: str | None
  budget: int | None
  n: int
  questions: int
  trainings: tuple[int, int]
  estimate: intervals.Estimate
  detectable: float | None
  seeds: tuple[int, ...]
  by_seed: tuple[float | None, ...]
  p: float | None
  between: float | None
  mcnemar: float | None
  adjusted: float | None = None
  discovery: float | None = None


def pairwise(
  rows: Sequence[metrics.Row],
  names: Sequence[str] = MEASURES,
  *,
  draws: int = 10_000,
) -> tuple[Difference, ...]:
  """Compares every two rows, the earlier minus the later.

  Args:
    rows: two or more rows on the same questions, see `pairing.pair`.
    names: keys of `measures.MEASURES`.
    draws: number of random flips of signs.

  Returns:
    Lines ordered by pair, dataset (all together first), budget (all together
    first) and measure. With one dataset, there are no lines by dataset.

  Raises:
    ValueError: two rows cannot be paired.
  """
  found = [
    line
    for ours, theirs in itertools.combinations(rows, 2)
    for line in _compared(ours, theirs, names, draws)
  ]
  families: dict[tuple, list[int]] = {}
  for place, line in enumerate(found):
    level = line.measure, line.dataset is None, line.budget is None
    families.setdefault(level, []).append(place)
  for places in families.values():
    p = np.array([found[i].p for i in places], dtype=np.float64)
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
  ours: metrics.Row, theirs: metrics.Row, names: Sequence[str], draws: int
) -> list[Difference]:
  pairs = pairing.pair(ours, theirs)
  if not pairs.questions:
    return []
  first, second = (
    measures.sums(side, names) for side in (pairs.ours, pairs.theirs)
  )
  budgets = np.array(first.budgets)
  # The first pool is of all B >= 1.
  pools = np.concatenate([budgets[None] >= 1, np.eye(len(budgets), dtype=bool)])
  sides = list(zip(first.by_dataset(), second.by_dataset(), strict=True))
  parts = [
    linear.minus(a.linearised(names, pools), b.linearised(names, pools))
    for a, b in sides
  ]
  several = len(parts) > 1
  shown = [linear.average(parts), *(parts if several else ())]
  effects = [effect for part in shown for effect in inference.effects(part)]
  seeds, alone = _by_seed(pairs, names, first, pools)
  flipped = _flipped(sides, names, pools, parts[0], draws)
  between = _between(sides, names, pools)
  p_flipped = flipped.ravel() if flipped is not None else None
  sets = [None, *(first.datasets if several else ())]
  keys = itertools.product(sets, (None, *first.budgets), names)
  by_set = {None: pairs} | pairs.by_dataset()
  lines = []
  for place, ((dataset, budget, name), effect) in enumerate(
    zip(keys, effects, strict=True)
  ):
    n, asked, mcnemar = _counts(by_set[dataset], budget)
    p = effect.p if p_flipped is None else _defined(p_flipped[place])
    lines.append(
      Difference(
        ours.label,
        theirs.label,
        name,
        dataset,
        budget,
        n,
        asked,
        (len(first.runs), len(second.runs)),
        effect.estimate,
        effect.detectable,
        seeds,
        tuple(map(_defined, alone[:, place])),
        p,
        _defined(between[place]),
        mcnemar if name == "accuracy" else None,
      )
    )
  return lines


_Sides = Sequence[tuple[measures.Sums, measures.Sums]]


def _flipped(
  sides: _Sides,
  names: Sequence[str],
  pools: np.ndarray,
  part: linear.Linear,
  draws: int,
) -> np.ndarray | None:
  """Returns p values of flipped signs; None with several trainings."""
  if np.bincount(part.group).max() > 1:
    return None
  scores = []
  for pair in sides:
    ours, theirs = (
      tuple(x.sum(axis=0) for x in side.parts(names, pools)[:2])
      for side in pair
    )
    scores.append(significance.null_scores(ours, theirs))
  p = significance.sign_flips(scores, draws=draws)
  return p if len(sides) > 1 else p[:1]


def _between(
  sides: _Sides, names: Sequence[str], pools: np.ndarray
) -> np.ndarray:
  """Returns p values of exchanged trainings: of the mean, then by dataset."""

  def values(side: measures.Sums) -> np.ndarray:
    top, bottom, _ = side.parts(names, pools)
    return intervals.ratio(top.sum(axis=1), bottom.sum(axis=1))

  ours, theirs = (
    [values(side) for side in row] for row in zip(*sides, strict=True)
  )
  if len(sides) > 1:
    ours, theirs = ([np.mean(x, axis=0), *x] for x in (ours, theirs))
  first, second = sides[0]
  shared = [name for name in first.runs if name in second.runs]
  paired = len(shared) == len(first.runs) == len(second.runs)
  order = (
    [second.runs.index(name) for name in shared] if paired else slice(None)
  )
  return significance.between_trainings(
    np.concatenate(ours, axis=1),
    np.concatenate(theirs, axis=1)[order],
    paired=paired,
  )


def _by_seed(
  pairs: pairing.Pairs,
  names: Sequence[str],
  found: measures.Sums,
  pools: np.ndarray,
) -> tuple[tuple[int, ...], np.ndarray]:
  """Returns the seeds and the differences on each, in the lines' order."""
  seeds, seed = np.unique(pairs.ours.seed, return_inverse=True)
  shape = len(seeds), len(found.datasets), len(found.budgets)
  budget = np.searchsorted(found.budgets, pairs.budget)
  place = seed, pairs.stratum[pairs.question], budget
  index = np.ravel_multi_index(place, shape)

  def values(side: columns.Columns) -> np.ndarray:
    summed = measures.columns_of(side)
    sums = intervals.cluster_sums(
      index, [summed[n] for n in found.names], clusters=int(np.prod(shape))
    )
    # Seeds and datasets are the axes before those of budgets and sums.
    top, bottom, _ = dataclasses.replace(
      found, values=sums.reshape(*shape, -1)
    ).parts(names, pools)
    return intervals.ratio(top, bottom)

  by_set = values(pairs.ours) - values(pairs.theirs)
  together = by_set.mean(axis=1, keepdims=True)
  if by_set.shape[1] > 1:
    together = np.concatenate([together, by_set], axis=1)
  return tuple(map(int, seeds)), together.reshape(len(seeds), -1)


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
