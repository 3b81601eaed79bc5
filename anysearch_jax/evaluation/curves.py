"""Measures as functions of the budget: curves, surfaces, and the Pareto front.

A surface is over pairs of a number of searches and a cap on tokens, the
protocol of "Inference-Time Budget Control for LLM Search Agents" (arXiv
2605.05701): each policy plays the same questions under the same pairs of hard
caps, and accuracies are compared pair by pair.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from anysearch_jax.evaluation import columns, inference, measures

_SHOWN = ("accuracy", "tp", "searches", "total_tokens", "cost", "regret")
_ON_SURFACES = (
  "accuracy",
  "searches",
  "generated_tokens",
  "truncated_rate",
  "cost",
)


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
  accuracy: inference.Estimate
  tp: inference.Estimate
  searches: inference.Estimate
  tokens: inference.Estimate
  cost: inference.Estimate
  regret: inference.Estimate


@dataclasses.dataclass(frozen=True)
class Curve:
  """A row over its budgets, ascending.

  `area` is the area under the accuracy, by the trapezoidal rule, with the range
  of budgets scaled to 1. It is the mean accuracy at a budget that is uniform in
  this range. It is undefined with fewer than two budgets.
  """

  label: str
  points: tuple[Point, ...]
  area: inference.Estimate


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
    return Curve(label, (), inference.Estimate(*inference.NOTHING))
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


def _area(found: measures.Sums, each: np.ndarray) -> inference.Estimate:
  """Returns the area under the accuracy; `each` has a pool for each budget."""
  if len(found.budgets) < 2:
    return inference.Estimate(*inference.NOTHING)
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


@dataclasses.dataclass(frozen=True)
class Cell:
  """One pair of caps.

  Attributes:
    searches, tokens: the caps.
    n: number of scored episodes.
    accuracy, truncated: shares of these episodes.
    used, generated: mean searches and generated tokens.
    cost: mean dollars.
    within: share of these episodes that stayed within both caps.
  """

  searches: int
  tokens: int
  n: int
  accuracy: inference.Estimate
  used: inference.Estimate
  generated: inference.Estimate
  truncated: inference.Estimate
  cost: inference.Estimate
  within: float


@dataclasses.dataclass(frozen=True)
class Surface:
  """A row over its pairs, ascending by searches, then by tokens.

  `area` is the area under the accuracy by the trapezoidal rule in both caps,
  with the range of each scaled to 1: the mean accuracy at a pair that is
  uniform in the rectangle. It is undefined unless every combination of the caps
  was played, with two or more values of each.
  """

  label: str
  cells: tuple[Cell, ...]
  area: inference.Estimate


def surface(label: str, measured: columns.Measured) -> Surface:
  """Measures a row at each of its pairs.

  With several datasets, each cell is the average over datasets with equal
  weights.

  Args:
    label: name of the row.
    measured: its episodes; those without a cap on tokens are left out.

  Raises:
    ValueError: no episode has a cap on tokens, or two budgets of a pair differ
      in other caps.
  """
  table = columns.of(measured).scored()
  table = table.where(np.isfinite(table.token_cap))
  if not len(table):
    raise ValueError(
      f"Row {label!r}: found no budget with a cap on tokens; expected an "
      "evaluation with budgets such as searches=3,tokens=64."
    )
  others = np.stack([table.dollar_cap, table.second_cap], -1)
  if len(np.unique(others, axis=0)) > 1:
    raise ValueError(
      f"Row {label!r}: found budgets that differ in dollars or seconds; "
      "expected budgets that differ in searches and tokens only."
    )
  both = np.stack([table.budget, table.token_cap.astype(np.int64)], -1)
  pairs, place = np.unique(both, axis=0, return_inverse=True)
  inside = (table.searches <= table.budget) & (
    table.generated_tokens <= table.token_cap
  )
  # The measures know one number as a budget: here the place of the pair.
  numbered = dataclasses.replace(table, budget=place.reshape(-1))
  found = measures.sums(numbered, _ON_SURFACES)
  each = np.eye(len(pairs), dtype=bool)
  means = measures.set_means(found, _ON_SURFACES, each)
  _, counts, _ = found.parts(("accuracy",), each)
  cells = []
  for at, (searches, tokens) in enumerate(pairs.tolist()):
    shown = dict(
      zip(_ON_SURFACES, means[at * len(_ON_SURFACES) :], strict=False)
    )
    cells.append(
      Cell(
        searches,
        tokens,
        round(float(counts.sum(axis=(0, 1))[at])),
        shown["accuracy"],
        shown["searches"],
        shown["generated_tokens"],
        shown["truncated_rate"],
        shown["cost"],
        float(np.mean(inside[numbered.budget == at])),
      )
    )
  return Surface(label, tuple(cells), _volume(found, each, pairs))


def _volume(
  found: measures.Sums, each: np.ndarray, pairs: np.ndarray
) -> inference.Estimate:
  """Returns the area; `each` has a pool for each of `pairs`, int `[P, 2]`."""
  axes = [np.unique(pairs[:, axis]) for axis in (0, 1)]
  sizes = [len(values) for values in axes]
  if min(sizes) < 2 or math.prod(sizes) != len(pairs):
    return inference.Estimate(*inference.NOTHING)
  searches, tokens = (
    np.trapezoid(np.eye(len(values)), values, axis=-1)
    / (values[-1] - values[0])
    for values in axes
  )
  # `pairs` is sorted by searches first, as the outer product is laid out.
  weights = np.outer(searches, tokens).reshape(1, -1)
  heights = found.averages(("accuracy",), each)
  (area,) = inference.rates(heights.combined(weights))
  return area.estimate
