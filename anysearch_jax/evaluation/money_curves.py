"""Accuracy against money spent: what equal accuracy costs under two methods.

A method's curve joins its budgets' points (mean dollars, accuracy) by straight
lines: two neighbours on a line are a method that plays each of both budgets
with some probability. What an accuracy costs is read off the curve.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from anysearch_jax.evaluation import columns

_DRAWS = 4000
_LEVEL = 0.95


class Played(NamedTuple):
  """Means of a method, float `[R, B, N]` of trainings, budgets and questions.

  Attributes:
    right: exact match.
    dollars: what an episode cost.
  """

  right: np.ndarray
  dollars: np.ndarray


class Interval(NamedTuple):
  """An estimate and its 95 % interval; nan where it is not defined."""

  value: float
  low: float
  high: float


class Comparison(NamedTuple):
  """Two methods at one accuracy.

  Attributes:
    accuracy: share of right answers, in (0, 1].
    ours, theirs: dollars of a right answer.
    ratio: of the two, ours by theirs.
  """

  accuracy: float
  ours: Interval
  theirs: Interval
  ratio: Interval


def played(table: columns.Columns) -> tuple[tuple[str, ...], Played]:
  """Returns the ids of the questions, and the means over a method's episodes.

  Args:
    table: its episodes under budgets of dollars; the trainings are `runs`.

  Raises:
    ValueError: an episode has no cap on dollars or no cost, or a training did
      not play every question under every budget.
  """
  table = table.scored()
  if not np.isfinite(table.dollar_cap).all() or np.isnan(table.cost).any():
    raise ValueError(
      "Found episodes without a cap on dollars or without a cost; expected "
      "budgets such as --budgets=dollars=0.01|0.06, with prices."
    )
  caps, budget = np.unique(table.dollar_cap, return_inverse=True)
  shape = len(table.runs), len(caps), len(table.ids)
  at = table.run, budget, table.question
  count = np.zeros(shape)
  np.add.at(count, at, 1)
  if not count.all():
    raise ValueError(
      f"Found {int((count == 0).sum())} of {count.size} combinations of "
      "training, budget and question without an episode; expected one of each."
    )
  sums = []
  for values in (table.em, table.cost):
    total = np.zeros(shape)
    np.add.at(total, at, values)
    sums.append(total / count)
  return tuple(map(str, table.ids)), Played(*sums)


def cost_of(
  dollars: Sequence[float] | np.ndarray,
  right: Sequence[float] | np.ndarray,
  accuracy: float,
) -> float:
  """Returns the dollars of an episode at an accuracy, nan if it is not reached.

  Args:
    dollars, right: the points of a curve in the order of their budgets. Where
      a larger budget is less accurate, the smaller one is played instead.
    accuracy: to read off.
  """
  right = np.asarray(right, float)
  best = np.maximum.accumulate(right)
  above = int(np.searchsorted(best, accuracy))
  if above == len(best):
    return float("nan")
  if not above:
    return float("nan") if accuracy < best[0] else float(dollars[0])
  low, high = best[above - 1], best[above]
  share = (accuracy - low) / (high - low)
  # The point that reached the accuracy below, which may be an earlier one.
  first = int(np.argmax(right[:above] >= low))
  return float(dollars[first] + share * (dollars[above] - dollars[first]))


def compare(
  ours: Played,
  theirs: Played,
  accuracies: Sequence[float],
  *,
  draws: int = _DRAWS,
  seed: int = 0,
) -> list[Comparison]:
  """Compares what right answers cost under two methods, at equal accuracies.

  Intervals are those of a bootstrap over questions, which both share, and over
  the trainings of each. With a single training, they leave out that another
  training would differ.

  Args:
    ours, theirs: of the same questions in the same order.
    accuracies: to compare at.
    draws: number of bootstrap samples.
    seed: of these.
  """
  rng = np.random.default_rng(seed)
  n = ours.right.shape[2]
  whole = np.full((1, n), 1 / n)
  drawn = rng.multinomial(n, np.full(n, 1 / n), draws) / n

  def curves(found: Played) -> list[tuple[np.ndarray, np.ndarray]]:
    """Returns the curve of all episodes, and of each sample."""
    r = len(found.right)
    chosen = rng.multinomial(r, np.full(r, 1 / r), draws) / r
    parts = []
    for questions, trainings in (
      (whole, np.full((1, r), 1 / r)),
      (drawn, chosen),
    ):
      parts.append(
        [
          np.einsum("dr,rbn,dn->db", trainings, x, questions, optimize=True)
          for x in (found.dollars, found.right)
        ]
      )
    return [(d, a) for part in parts for d, a in zip(*part, strict=True)]

  mine, other = curves(ours), curves(theirs)
  compared = []
  for accuracy in accuracies:
    a, b = (
      np.array([cost_of(*curve, accuracy) for curve in found]) / accuracy
      for found in (mine, other)
    )
    compared.append(
      Comparison(accuracy, _interval(a), _interval(b), _interval(a / b))
    )
  return compared


def _interval(values: np.ndarray) -> Interval:
  """Returns the first value with the interval of the others."""
  if np.isnan(values[0]):
    return Interval(*[float("nan")] * 3)
  tail = (1 - _LEVEL) / 2
  low, high = np.nanquantile(values[1:], (tail, 1 - tail))
  return Interval(float(values[0]), float(low), float(high))


def means(found: Played) -> Mapping[str, np.ndarray]:
  """Returns the mean accuracy and cost of each budget, `[B]`."""
  return {
    "right": found.right.mean((0, 2)),
    "dollars": found.dollars.mean((0, 2)),
  }
