"""Tables over all budgets: curves, areas under them, the Pareto front."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from anysearch_jax.evaluation import curves as curves_lib
from anysearch_jax.evaluation import metrics
from anysearch_jax.report import table_rows, tables


def curves(
  rows: Sequence[table_rows.Shown],
  study: Mapping[str, Sequence[curves_lib.Curve]],
) -> tables.Table:
  """Tabulates every measure of every row at every budget.

  Args:
    rows: all rows.
    study: by dataset, the curves of the rows; `average` over several datasets.
  """
  by_label = {row.label: row for row in rows}

  def spreads(dataset: str, label: str, budget: int) -> list[tables.Cell]:
    part = by_label[label].cells.get((dataset, budget))
    if part is None:
      return [tables.Cell(None), tables.Cell(None)]
    found = metrics.cell(part)
    return [tables.Cell(found.accuracy_spread), tables.Cell(found.tp_spread)]

  lines = [
    tables.Line(
      (dataset, f"{point.budget}{'*' * point.unseen}", curve.label),
      (
        tables.cell(point.accuracy, point.n),
        *map(tables.cell, (point.tp, point.searches, point.tokens, point.cost)),
        *spreads(dataset, curve.label, point.budget),
      ),
      by_label[curve.label].index,
    )
    for dataset, found in study.items()
    for budget in table_rows.budgets(rows)
    for curve in found
    for point in curve.points
    if point.budget == budget
  ]
  return tables.Table(
    "curves",
    "Everything by budget",
    "95 % intervals over questions and trainings; spread: the sample standard "
    "deviation over seeds. * a budget above those of training. Dollars by the "
    "prices of the evaluation, or those given to the report.",
    ("set", "B", "row"),
    (
      tables.Column("EM"),
      tables.Column("TP"),
      tables.Column("searches", digits=2),
      tables.Column("tokens", digits=1),
      tables.Column("dollars", digits=5),
      tables.Column("EM", "spread"),
      tables.Column("TP", "spread"),
    ),
    tuple(lines),
  )


def areas(
  rows: Sequence[table_rows.Shown],
  study: Mapping[str, Sequence[curves_lib.Curve]],
) -> tables.Table:
  """Tabulates the area under each row's curve; arguments as for `curves`."""
  index = {row.label: row.index for row in rows}
  return tables.Table(
    "area",
    "Area under the budget curve",
    "By trapezoids over the evaluated range of budgets scaled to one: the "
    "accuracy at a budget drawn evenly from it. 95 % intervals over "
    "questions and trainings. Comparable between rows with the same budgets.",
    ("set", "row"),
    (
      tables.Column("area", best=True),
      tables.Column("from B", digits=0),
      tables.Column("to B", digits=0),
    ),
    tuple(
      tables.Line(
        (dataset, curve.label),
        (
          tables.cell(curve.area, sum(point.n for point in curve.points)),
          tables.Cell(curve.points[0].budget),
          tables.Cell(curve.points[-1].budget),
        ),
        index[curve.label],
      )
      for dataset, found in study.items()
      for curve in found
      if curve.area.value is not None
    ),
  )


def pareto(
  offers: Mapping[str, Sequence[curves_lib.Offer]], index: Mapping[str, int]
) -> tables.Table:
  """Tabulates the Pareto front: the offers that no other dominates."""
  return tables.Table(
    "pareto",
    "The Pareto front",
    "Rows at budgets than which no other is at least as accurate for no more. "
    "Points without their intervals: those stand in the tables above.",
    ("price in", "row"),
    (tables.Column("B", digits=0), tables.Column("price"), tables.Column("EM")),
    tuple(
      tables.Line(
        (against, offer.label),
        tuple(map(tables.Cell, (offer.budget, offer.price, offer.accuracy))),
        index[offer.label],
      )
      for against, found in offers.items()
      for offer in found
      if not offer.dominated
    ),
  )
