"""Measures against the budget, the area under the curve, the Pareto front."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from anysearch_jax.evaluation import columns, intervals, measures

_SHOWN = ("accuracy", "tp", "searches", "total_tokens", "cost")


@dataclasses.dataclass(frozen=True)
class Point:
  """One budget of a curve.

  unseen: above the largest budget of training. n: scored episodes.
  """

  budget: int
  unseen: bool
  n: int
  accuracy: intervals.Estimate
  tp: intervals.Estimate
  searches: intervals.Estimate
  tokens: intervals.Estimate
  cost: intervals.Estimate


@dataclasses.dataclass(frozen=True)
class Curve:
  """A row over its budgets, ascending.

  area: under accuracy, by trapezoids, over the range of budgets scaled to one:
  the accuracy at a budget drawn evenly from that range. Nothing with one
  budget only.
  """

  label: str
  points: tuple[Point, ...]
  area: intervals.Estimate


@dataclasses.dataclass(frozen=True)
class Offer:
  """A row at a budget: an accuracy at a price.

  dominated: another one is at least as accurate, costs no more, and is better
  in one of the two. Those that are not are the Pareto front.
  """

  label: str
  budget: int
  accuracy: float
  price: float
  dominated: bool


def curve(
  label: str,
  measured: columns.Measured,
  *,
  trained: int,
  resamples: int = 10_000,
) -> Curve:
  """Measures a row at each of its budgets.

  Episodes of several datasets give the average over sets, each of one weight,
  at every budget; pass a part of `columns.by_dataset` for one set.

  Args:
    label: the row's.
    measured: its episodes.
    trained: the largest budget of its training.
    resamples: of the bootstrap, clustered by question, stratified by set.
  """
  table = columns.of(measured)
  found = measures.sums(table, _SHOWN)
  if not found.budgets:
    return Curve(label, (), intervals.Estimate(*intervals.NOTHING))
  parts = found.parts(*_SHOWN)
  shown = (
    [
      list(measures.estimates(part, _SHOWN).values())
      for part in columns.by_budget(table.scored()).values()
    ]
    if len(found.datasets) == 1
    else np.array(
      measures.set_means(
        found.stratum,
        parts.reshape(len(parts), -1, 2),
        resamples=resamples,
      ),
      dtype=object,
    ).reshape(len(found.budgets), len(_SHOWN), 3)
  )
  counts = found.parts("accuracy")[..., 0, 1].sum(axis=0)
  return Curve(
    label,
    tuple(
      Point(budget, budget > trained, round(n), *map(_estimate, values))
      for budget, n, values in zip(found.budgets, counts, shown, strict=True)
    ),
    _area(found, parts[:, :, 0], resamples),
  )


def _estimate(values: Sequence[float | None]) -> intervals.Estimate:
  return intervals.Estimate(*values)


def _area(
  found: measures.Sums, parts: np.ndarray, resamples: int
) -> intervals.Estimate:
  """parts: float `[N, B, 2]`, correct and scored by question and budget."""
  if len(found.budgets) < 2:
    return intervals.Estimate(*intervals.NOTHING)
  span = found.budgets[-1] - found.budgets[0]

  def area(totals: np.ndarray) -> np.ndarray:
    accuracy = intervals.ratio(totals[..., 0::2], totals[..., 1::2])
    heights = accuracy.mean(axis=1)
    return np.trapezoid(heights, found.budgets, axis=-1)[:, None] / span

  (estimate,) = intervals.bootstrap(
    parts.reshape(len(parts), -1),
    area,
    stratum=found.stratum,
    resamples=resamples,
  )
  return estimate


def pareto(
  curves: Sequence[Curve], against: str = "searches"
) -> tuple[Offer, ...]:
  """Every row at every budget, as an accuracy at a price.

  Args:
    curves: of all rows to hold against each other, on the same episodes.
    against: the price: `searches`, `tokens` or `cost`, a mean of an episode.

  Returns:
    By price, then falling accuracy; points without a price are left out.
  """
  found = [
    (curve.label, p.budget, p.accuracy.value, getattr(p, against).value)
    for curve in curves
    for p in curve.points
  ]
  found = sorted(
    (f for f in found if f[2] is not None and f[3] is not None),
    key=lambda f: (f[3], -f[2]),
  )
  return tuple(
    Offer(*f, dominated=any(_dominates(g, f) for g in found)) for f in found
  )


def _dominates(one: tuple, other: tuple) -> bool:
  better = one[2] > other[2] or one[3] < other[3]
  return better and one[2] >= other[2] and one[3] <= other[3]
