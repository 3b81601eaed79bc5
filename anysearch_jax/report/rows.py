"""Measures the rows of a study, for figures, tables and the page."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from anysearch_jax.evaluation import (
  columns,
  comparison,
  intervals,
  measures,
  memory_use,
  metrics,
  pairwise,
  verification,
)
from anysearch_jax.evaluation import curves as curves_lib
from anysearch_jax.evaluation import surfaces as surfaces_lib
from anysearch_jax.report import (
  curve_tables,
  paper_tables,
  row_tables,
  surface_tables,
  uncertainty_tables,
)
from anysearch_jax.report import table_rows as shown_lib
from anysearch_jax.report import tables as tables_lib

# Draws for each test of a family, at least. Holm's correction multiplies a p
# value by up to the number of tests, and the smallest p value is about
# 1 / draws, so 1 / 40 remains reachable after the correction.
_DRAWS = 40
# The measures that are averaged over all datasets and budgets of a row.
MEANS = ("accuracy", "tp", "searches", "regret", "total_tokens")
# Titles of the paper's ablations and of its comparison of systems; other groups
# use their names as titles.
GROUPS = {
  "methods": "Compared systems",
  "tool": "Tool reward",
  "format": "Format reward",
  "scaffold": "Scaffold",
  "sampling": "Sampling strategy",
  "phases": "Curriculum phases",
}


@dataclasses.dataclass(frozen=True)
class Study:
  """The measurements of a study.

  Attributes:
    trained: the largest budget of the system's training.
    index: colour index of each row and training run.
    groups: by title, the labels that are shown together; the system is first.
    curves: the curve of each row over all its datasets.
    by_dataset: by dataset, the curves of the rows that have it.
    use: by label, see `metrics.budget_use`.
    memory_use: by label, see `memory_use.searched`.
    verification: by label, see `verification.checked`.
    means: by label, averages over datasets of all episodes; only for rows that
      have every dataset and budget.
    lacks: by label, the datasets and budgets that only other rows have, in
      words; "" if there are none.
    hops: by label, for the rows of `means`: accuracy by hops over all B >= 1.
    training: the training runs of the rows.
    surfaces: accuracy over pairs of caps, of the rows that have it.
    tables: the tables; their order has no meaning.
  """

  trained: int
  index: Mapping[str, int]
  groups: Mapping[str, Sequence[str]]
  curves: Sequence[curves_lib.Curve]
  by_dataset: Mapping[str, Sequence[curves_lib.Curve]]
  use: Mapping[str, Mapping[int, Sequence[int]]]
  memory_use: Mapping[str, memory_use.Found]
  verification: Mapping[str, verification.Found]
  means: Mapping[str, Mapping[str, intervals.Estimate]]
  lacks: Mapping[str, str]
  hops: Mapping[str, Mapping[int, intervals.Estimate]]
  training: Sequence[metrics.Training]
  surfaces: Sequence[surfaces_lib.Surface]
  tables: Sequence[tables_lib.Table]


def measure(
  rows: Sequence[metrics.Row],
  training: Sequence[metrics.Training],
  compared: Mapping[str, Sequence[comparison.Comparison]],
  *,
  groups: Mapping[str, str],
  search_values: Mapping[str, Mapping[str, Any]],
  trained: int,
  surfaces: Sequence[surfaces_lib.Surface] = (),
  draws: int = 10_000,
) -> Study:
  """Measures rows on their own and against each other.

  Args:
    rows: the first is the system under test.
    training: the training runs of the rows.
    compared: by label, the comparison of the system with each other row.
    groups: by label, the ablation that the row belongs to: a key of `GROUPS`,
      or any name. If empty, all rows are one group.
    search_values: by label, the value of one more search, see
      `loading.load_search_value`.
    trained: the largest budget of the system's training.
    surfaces: accuracy over pairs of caps; their labels may be those of rows.
    draws: number of draws of each test by flipped signs, at least.
  """
  labels = [row.label for row in rows]
  together = _groups(labels, groups)
  index = _colours(
    labels,
    together,
    [*(run.label for run in training), *(each.label for each in surfaces)],
  )
  shown = [shown_lib.show(row, index[row.label]) for row in rows]
  curves, by_dataset = _curves(rows, shown, trained)
  means = {
    row.label: metrics.over_sets(row.columns, MEANS)
    for row, of_row in zip(rows, shown, strict=True)
    if shown_lib.complete(of_row, shown)
  }
  found = Study(
    trained=trained,
    index=index,
    groups=dict(together.values()),
    curves=curves,
    by_dataset=by_dataset,
    use={row.label: metrics.budget_use(row.columns) for row in rows},
    memory_use={row.label: memory_use.searched(row.columns) for row in rows},
    verification={row.label: verification.checked(row.columns) for row in rows},
    means=means,
    lacks={row.label: shown_lib.lacks(row, shown) for row in shown},
    hops={row.label: _by_hops(row) for row in shown if row.label in means},
    training=training,
    surfaces=surfaces,
    tables=(),
  )
  by_label = {row.label: row for row in shown}
  tables = [
    row_tables.overview(shown, curves, means),
    uncertainty_tables.components(
      [(row.label, index[row.label], row.columns) for row in rows]
    ),
    paper_tables.main(shown),
    row_tables.scorers(shown),
    paper_tables.efficiency(shown),
    *(
      paper_tables.ablation(name, title, [by_label[label] for label in members])
      for name, (title, members) in together.items()
    ),
    paper_tables.tokens(shown),
    row_tables.formats(shown),
    row_tables.hops(shown),
    row_tables.budget_use(shown),
    row_tables.memory_use(found.memory_use, index),
    row_tables.verification(found.verification, index),
    paper_tables.early_stopping("".join(labels[:1]), compared, index),
    *_pairwise(rows, together, draws),
    paper_tables.sampling(training),
    *_over_budgets(found, shown),
    row_tables.search_values(search_values, index),
    surface_tables.cells(surfaces, index),
    surface_tables.areas(surfaces, index),
  ]
  return dataclasses.replace(found, tables=tables)


def _curves(
  rows: Sequence[metrics.Row],
  shown: Sequence[shown_lib.Shown],
  trained: int,
) -> tuple[list[curves_lib.Curve], dict[str, list[curves_lib.Curve]]]:
  """Returns the curves of all rows, over all their datasets and by dataset."""

  def curve(label: str, part: columns.Measured) -> curves_lib.Curve:
    return curves_lib.curve(label, part, trained=trained)

  curves = [curve(row.label, row.columns) for row in rows]
  whole = {found.label: found for found in curves}
  sets = {row.label: columns.by_dataset(row.columns) for row in rows}
  by_dataset = {
    dataset: [
      # A row's curve on its only dataset is its curve over all of them.
      whole[label] if len(found) == 1 else curve(label, found[dataset])
      for label, found in sets.items()
      if dataset in found
    ]
    for dataset in shown_lib.datasets(shown)
  }
  return curves, by_dataset


def _by_hops(row: shown_lib.Shown) -> dict[int, intervals.Estimate]:
  """Returns the accuracy by hops over all B >= 1."""
  asked = row.table.where(row.table.budget >= 1)
  return {
    hops: measures.estimates(part, ("accuracy",))["accuracy"]
    for hops, part in columns.by_hops(asked).items()
  }


def _over_budgets(
  study: Study, shown: Sequence[shown_lib.Shown]
) -> list[tables_lib.Table]:
  """Returns the tables of curves, of their areas and of the Pareto front."""
  by_label = {row.label: row for row in shown}
  # Averages over datasets are comparable only if they cover the same datasets.
  alike = [
    curve
    for curve in study.curves
    if all(
      shown_lib.complete(by_label[curve.label], shown, [point.budget])
      for point in curve.points
    )
  ]
  average = {"average": alike} if len(study.by_dataset) > 1 else {}
  every = {**study.by_dataset, **average}
  return [
    curve_tables.curves(shown, every),
    curve_tables.areas(shown, every),
    curve_tables.pareto(offers(alike), study.index),
  ]


def offers(
  curves: Sequence[curves_lib.Curve],
) -> dict[str, tuple[curves_lib.Offer, ...]]:
  """Returns offers by kind of price; without `cost` if all costs are 0."""
  found = {
    against: curves_lib.pareto(curves, against)
    for against in ("searches", "tokens", "cost")
  }
  if not any(offer.price for offer in found["cost"]):
    del found["cost"]
  return found


def _pairwise(
  rows: Sequence[metrics.Row],
  groups: Mapping[str, tuple[str, Sequence[str]]],
  draws: int,
) -> list[tables_lib.Table]:
  """Returns a table for each group of two or more rows: a family of tests."""
  found = []
  for name, (title, members) in groups.items():
    if len(members) < 2:
      continue
    own = [row for row in rows if row.label in members]
    free = not any(np.nansum(row.columns.cost) for row in own)
    compared = pairwise.pairwise(
      own,
      [m for m in pairwise.MEASURES if not (free and m == "cost")],
      draws=max(draws, _DRAWS * _tests(own)),
    )
    found += [
      uncertainty_tables.pairwise(name, f"{title}: every two rows", compared),
      uncertainty_tables.by_seed(name, f"{title}: seed by seed", compared),
    ]
  return found


def _tests(rows: Sequence[metrics.Row]) -> int:
  """Returns the number of tests of one measure: all pairs in all cells."""
  cells = len({b for row in rows for b in metrics.budgets(row.columns)}) * len(
    {name for row in rows for name in row.columns.datasets}
  )
  return cells * math.comb(len(rows), 2)


def _groups(
  labels: Sequence[str], groups: Mapping[str, str]
) -> dict[str, tuple[str, list[str]]]:
  """Returns file name -> (title, labels), with the system first in each."""
  if not labels:
    return {}
  members: dict[str, list[str]] = {}
  for label in labels[1:] if groups else ():
    members.setdefault(groups.get(label, "other"), [labels[0]]).append(label)
  if not members:
    return {"rows": ("All rows", list(labels))}
  found: dict[str, tuple[str, list[str]]] = {}
  for title, together in members.items():
    name = re.sub(r"[^\w-]+", "_", title, flags=re.ASCII)[:40]
    name = f"{name}_{len(found)}" if name in found else name
    found[name] = (GROUPS.get(title, title), together)
  return found


def _colours(
  labels: Sequence[str],
  groups: Mapping[str, tuple[str, Sequence[str]]],
  runs: Sequence[str],
) -> dict[str, int]:
  """Returns a colour index for each label, unique within its group."""
  index = {
    label: place
    for _, members in groups.values()
    for place, label in enumerate(members)
  }
  for label in runs:
    index.setdefault(label, len(labels) + len(index))
  return index


def row_data(
  row: metrics.Row, curve: curves_lib.Curve, study: Study
) -> dict[str, Any]:
  """Returns a row as JSON: counts are pooled, MEANS averaged over datasets.

  `average` is None if another row has a dataset or a budget that it lacks.
  """
  points = {point.budget: point for point in curve.points}
  cells = metrics.by_budget(row.columns)

  def describe(
    cell: metrics.Cell, found: Mapping[str, intervals.Estimate]
  ) -> dict[str, Any]:
    claims: dict[str, Any] = {}
    for name, estimate in found.items():
      claims[name] = estimate.value
      claims[f"{name}_interval"] = [estimate.low, estimate.high]
    return dataclasses.asdict(cell) | claims

  undefined = dict.fromkeys(MEANS, intervals.Estimate(None, None, None))

  def of(point: curves_lib.Point) -> dict[str, intervals.Estimate]:
    tokens = {"total_tokens": point.tokens}
    return {n: getattr(point, n) for n in MEANS[:4]} | tokens

  return {
    "label": row.label,
    "index": study.index[row.label],
    "lacks": study.lacks[row.label],
    "cells": {
      str(budget): describe(
        cell, of(points[budget]) if budget in points else undefined
      )
      for budget, cell in cells.items()
    },
    "average": describe(
      metrics.average(list(cells.values())), study.means[row.label]
    )
    if row.label in study.means
    else None,
    "area": curve.area._asdict(),
  }
