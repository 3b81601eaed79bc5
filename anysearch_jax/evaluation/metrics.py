"""The rows of a report, and what is measured of each alone.

A row is the episodes of one method. Its measures are taken of parts of it: by
budget, by dataset, by pairs of caps. A surface is over pairs of a number of
searches and a cap on tokens (docs/budgets.md), the protocol of "Inference-Time
Budget Control for LLM Search Agents" (arXiv 2605.05701).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from anysearch_jax.evaluation import columns, inference, judging, measures


class Part:
  """Some episodes; its attributes are the measures of `measures.MEASURES`.

  They are estimated together, once one of them is asked.

  Attributes:
    table: the episodes that did not fail, which are measured.
    n, failed: number of these episodes, and of failed ones.
    weigh_sets: whether a measure is the average over datasets with equal
      weights, as in the paper (TP is pooled within each); otherwise episodes
      weigh alike.
  """

  def __init__(self, table: columns.Columns, *, weigh_sets: bool = False):
    self.table, self.weigh_sets = table.scored(), weigh_sets
    self.n, self.failed = len(self.table), len(table) - len(self.table)

  @functools.cached_property
  def _found(self) -> Mapping[str, inference.Estimate]:
    return measures.estimates(self.table, weigh_sets=self.weigh_sets)

  def __getattr__(self, measure: str) -> inference.Estimate:
    if measure not in measures.MEASURES:
      raise AttributeError(f"Found {measure!r}, expected a measure.")
    return self._found[measure]

  @property
  def calibration(self) -> float | None:
    """The calibration error of judged answers, see `judging`."""
    return judging.calibration_error(self.table.confidence, self.table.judged)

  def over(self, budgets: Iterable[int], *, weigh_sets: bool = False) -> Part:
    """Returns its episodes at some budgets."""
    chosen = np.isin(self.table.budget, list(budgets))
    return Part(self.table.where(chosen), weigh_sets=weigh_sets)


class Curve(NamedTuple):
  """A row over its budgets, or over pairs of searches and tokens; ascending.

  `area` is the area under the accuracy, by the trapezoidal rule, with the range
  of each cap scaled to 1. It is the mean accuracy at a budget (or a pair) that
  is uniform in this range. It is undefined with fewer than two values of a cap,
  or if some combination of the caps was not played.
  """

  label: str
  points: Mapping[Any, Part]
  area: inference.Estimate


@dataclasses.dataclass(frozen=True, eq=False)
class Row:
  """One line of the report: a label and all its evaluated episodes.

  Attributes:
    label: name of the row.
    episodes: complete records, for reading; a sample if `table` is given,
      otherwise all of them.
    table: all episodes, for measuring; None: `episodes` are all.
  """

  label: str
  episodes: tuple[columns.Episode, ...] = ()
  table: columns.Columns | None = None

  @functools.cached_property
  def columns(self) -> columns.Columns:
    """All episodes as arrays."""
    return columns.of(self.episodes) if self.table is None else self.table

  @functools.cached_property
  def whole(self) -> Part:
    """All episodes alike."""
    return Part(self.columns)

  @functools.cached_property
  def mean(self) -> Part:
    """All episodes; datasets weigh alike."""
    return Part(self.columns, weigh_sets=True)

  @functools.cached_property
  def by_budget(self) -> Mapping[int, Part]:
    return {b: Part(p) for b, p in columns.by_budget(self.columns).items()}

  @functools.cached_property
  def cells(self) -> Mapping[tuple[str, int], Part]:
    """The scored episodes by dataset and budget; none is empty."""
    return {
      (dataset, budget): Part(part)
      for dataset, found in columns.by_dataset(self.whole.table).items()
      for budget, part in columns.by_budget(found).items()
    }

  @functools.cached_property
  def curve(self) -> Curve:
    """The curve over all datasets, with equal weights.

    It has no point at a budget at which one of the datasets is missing.
    """
    sets = {dataset for dataset, _ in self.cells}
    if len(sets) == 1:
      return next(iter(self.curves.values()))
    points = {
      budget: self.whole.over([budget], weigh_sets=True)
      for budget in sorted({budget for _, budget in self.cells})
      if all((dataset, budget) in self.cells for dataset in sets)
    }
    return Curve(self.label, points, _area(self.whole.table))

  @functools.cached_property
  def curves(self) -> Mapping[str, Curve]:
    """The curve of each dataset."""
    return {
      dataset: Curve(
        self.label,
        {b: part for (name, b), part in self.cells.items() if name == dataset},
        _area(table),
      )
      for dataset, table in columns.by_dataset(self.whole.table).items()
    }


def surface(label: str, table: columns.Columns) -> Curve:
  """Measures a row at each pair of searches and tokens.

  With several datasets, each point is their average with equal weights.
  Episodes without a cap on tokens are left out. Raises ValueError if no episode
  has a cap on tokens, or two budgets of a pair differ in other caps.
  """
  table = table.scored()
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
  points = {
    tuple(pairs[at].tolist()): Part(part, weigh_sets=True)
    for at, part in table.split(place.reshape(-1)).items()
  }
  # The measures know one number as a budget: here the place of the pair.
  numbered = table.replace(budget=place.reshape(-1))
  return Curve(label, points, _area(numbered, pairs))


def _area(
  table: columns.Columns, caps: np.ndarray | None = None
) -> inference.Estimate:
  """Returns the area under the accuracy of scored episodes; sets weigh alike.

  `caps`, int `[B, A]`, are what the budgets that occur stand for on each axis.
  """
  found = measures.sums(table, ("accuracy",))
  if caps is None:
    caps = np.array(found.budgets).reshape(-1, 1)
  axes = [np.unique(axis) for axis in caps.T]
  sizes = [len(values) for values in axes]
  if min(sizes) < 2 or np.prod(sizes) != len(caps):
    return inference.NOTHING
  weights = np.ones(1)
  for values in axes:
    span = values[-1] - values[0]
    each = np.trapezoid(np.eye(len(values)), values, axis=-1) / span
    # `caps` are sorted by the first axis, as the outer product is laid out.
    weights = np.outer(weights, each).ravel()
  heights = found.averages(("accuracy",), np.eye(len(caps), dtype=bool))
  (area,) = inference.rates(heights.combined(weights[None]))
  return area.estimate
