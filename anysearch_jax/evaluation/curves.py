"""Measures as functions of the budget: curves, areas and the Pareto front."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from anysearch_jax.evaluation import columns, inference, intervals, measures

_SHOWN = ("accuracy", "tp", "searches", "total_tokens", "cost", "regret")


@dataclasses.dataclass(frozen=True)
class Point:
  """One budget of a curve.

  Attributes:
    unseen: the budget is above the largest budget of training.
    n: number of scored episodes.
    tokens: mean total tokens of an episode.
    regret: accuracy of the best agent minus `accuracy`, see
      `measures.MEASURES`; undefined where that is unknown.
  """

  budget: int
  unseen: bool
  n: int
  accuracy: intervals.Estimate
  tp: intervals.Estimate
  searches: intervals.Estimate
  tokens: intervals.Estimate
  cost: intervals.Estimate
  regret: intervals.Estimate


@dataclasses.dataclass(frozen=True)
class Curve:
  """A row over its budgets, ascending.

  `area` is the area under the accuracy, by the trapezoidal rule, with the range
  of budgets scaled to 1. It is the mean accuracy at a budget that is uniform in
  this range. It is undefined with fewer than two budgets.
  """

  label: str
  points: tuple[Point, ...]
  area: intervals.Estimate


@dataclasses.dataclass(frozen=True)
class Offer:
  """A row at a budget: an accuracy at a price.

  An offer is `dominated` if another one is at least as accurate, costs no more,
  and is strictly better in one of the two. The others are the Pareto front.
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
) -> Curve:
  """Measures a row at each of its budgets.

  With several datasets, each point is the average over datasets with equal
  weights; pass a part of `columns.by_dataset` for a single dataset.

  Args:
    label: name of the row.
    measured: its episodes.
    trained: the largest budget of its training.
  """
  table = columns.of(measured)
  found = measures.sums(table, _SHOWN)
  if not found.budgets:
    return Curve(label, (), intervals.Estimate(*intervals.NOTHING))
  each = np.eye(len(found.budgets), dtype=bool)
  if len(found.datasets) == 1:
    shown = [
      list(measures.estimates(part, _SHOWN).values())
      for part in columns.by_budget(table.scored()).values()
    ]
  else:
    means = measures.set_means(found, _SHOWN, each)
    width = len(_SHOWN)
    shown = [means[i : i + width] for i in range(0, len(means), width)]
  _, counts, _ = found.parts(("accuracy",), each)
  return Curve(
    label,
    tuple(
      Point(budget, budget > trained, round(n), *values)
      for budget, n, values in zip(
        found.budgets, counts.sum(axis=(0, 1)), shown, strict=True
      )
    ),
    _area(found, each),
  )


def _area(found: measures.Sums, each: np.ndarray) -> intervals.Estimate:
  """Returns the area under the accuracy; `each` has a pool for each budget."""
  if len(found.budgets) < 2:
    return intervals.Estimate(*intervals.NOTHING)
  span = found.budgets[-1] - found.budgets[0]
  weights = np.trapezoid(each.astype(float), found.budgets, axis=-1) / span
  heights = found.averages(("accuracy",), each)
  (area,) = inference.rates(heights.combined(weights[None]))
  return area.estimate


def pareto(
  curves: Sequence[Curve], against: str = "searches"
) -> tuple[Offer, ...]:
  """Returns every row at every budget, as an accuracy at a price.

  Args:
    curves: curves of all rows to compare, on the same episodes.
    against: the price, a mean over episodes: `searches`, `tokens` or `cost`.

  Returns:
    Offers by ascending price, then descending accuracy; points without an
    accuracy or a price are left out.
  """
  found: list[Offer] = []
  for curve in curves:
    for point in curve.points:
      accuracy, price = point.accuracy.value, getattr(point, against).value
      if accuracy is not None and price is not None:
        found.append(Offer(curve.label, point.budget, accuracy, price, False))
  found.sort(key=lambda offer: (offer.price, -offer.accuracy))
  return tuple(
    dataclasses.replace(
      offer, dominated=any(_dominates(other, offer) for other in found)
    )
    for offer in found
  )


def _dominates(one: Offer, other: Offer) -> bool:
  better = one.accuracy > other.accuracy or one.price < other.price
  return better and one.accuracy >= other.accuracy and one.price <= other.price
