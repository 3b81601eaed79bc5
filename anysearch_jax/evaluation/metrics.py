"""The rows of a report, and what is measured of each alone.

A row is the episodes of one method. Its measures are taken of parts of it: by
budget and by dataset.
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

  All of them are estimated together, when the first one is read.

  Attributes:
    table: the episodes that did not fail, which are measured.
    n: number of episodes that did not fail.
    failed: number of failed episodes.
    weigh_sets: whether a measure is the average over datasets with equal
      weights, as in the paper (TP is pooled within each); otherwise episodes
      weigh alike.
  """

  def __init__(self, table: columns.Columns, *, weigh_sets: bool = False):
    self.table = table.scored()
    self.weigh_sets = weigh_sets
    self.n = len(self.table)
    self.failed = len(table) - len(self.table)

  @functools.cached_property
  def _estimates(self) -> Mapping[str, inference.Estimate]:
    return measures.estimates(self.table, weigh_sets=self.weigh_sets)

  def __getattr__(self, measure: str) -> inference.Estimate:
    if measure not in measures.MEASURES:
      raise AttributeError(f"Found {measure!r}, expected a measure.")
    return self._estimates[measure]

  @property
  def calibration(self) -> float | None:
    """The calibration error of judged answers, see `judging`."""
    return judging.calibration_error(self.table.confidence, self.table.judged)

  def over(self, budgets: Iterable[int], *, weigh_sets: bool = False) -> Part:
    """Returns the episodes of this part at some budgets."""
    mask = np.isin(self.table.budget, list(budgets))
    return Part(self.table.where(mask), weigh_sets=weigh_sets)


class Curve(NamedTuple):
  """A row over its budgets, ascending.

  `area` is the area under the accuracy, by the trapezoidal rule, with the range
  of budgets scaled to 1. It is the mean accuracy at a budget that is uniform in
  this range. It is undefined with fewer than two budgets.
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
    return (
      columns.as_columns(self.episodes) if self.table is None else self.table
    )

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
      for dataset, table in columns.by_dataset(self.whole.table).items()
      for budget, part in columns.by_budget(table).items()
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


def _area(table: columns.Columns) -> inference.Estimate:
  """Returns the area under the accuracy; sets weigh alike."""
  sums = measures.sums(table, ("accuracy",))
  budgets = np.array(sums.budgets)
  if len(budgets) < 2:
    return inference.NOTHING
  # The area is linear in the heights: the weight of a budget is the area under
  # a curve that is 1 there and 0 elsewhere.
  unit_curves = np.eye(len(budgets))
  weights = np.trapezoid(unit_curves, budgets, axis=-1)
  weights /= budgets[-1] - budgets[0]
  heights = sums.averages(("accuracy",), unit_curves.astype(bool))
  (area,) = inference.rates(heights.combined(weights[None]))
  return area.estimate
