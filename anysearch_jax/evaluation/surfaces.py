"""Accuracy over pairs of a number of searches and a cap on tokens.

This is the protocol of "Inference-Time Budget Control for LLM Search Agents"
(arXiv 2605.05701): each policy plays the same questions under the same pairs of
hard caps, and accuracies are compared pair by pair.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from anysearch_jax.evaluation import columns, inference, intervals, measures

_SHOWN = (
  "accuracy",
  "searches",
  "generated_tokens",
  "truncated_rate",
  "cost",
)


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
  accuracy: intervals.Estimate
  used: intervals.Estimate
  generated: intervals.Estimate
  truncated: intervals.Estimate
  cost: intervals.Estimate
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
  area: intervals.Estimate


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
  found = measures.sums(numbered, _SHOWN)
  each = np.eye(len(pairs), dtype=bool)
  means = measures.set_means(found, _SHOWN, each)
  _, counts, _ = found.parts(("accuracy",), each)
  cells = []
  for at, (searches, tokens) in enumerate(pairs.tolist()):
    shown = dict(zip(_SHOWN, means[at * len(_SHOWN) :], strict=False))
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
  return Surface(label, tuple(cells), _area(found, each, pairs))


def _area(
  found: measures.Sums, each: np.ndarray, pairs: np.ndarray
) -> intervals.Estimate:
  """Returns the area; `each` has a pool for each of `pairs`, int `[P, 2]`."""
  axes = [np.unique(pairs[:, axis]) for axis in (0, 1)]
  sizes = [len(values) for values in axes]
  if min(sizes) < 2 or math.prod(sizes) != len(pairs):
    return intervals.Estimate(*intervals.NOTHING)
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
