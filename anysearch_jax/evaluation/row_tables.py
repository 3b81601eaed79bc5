"""Tables beyond the paper's: everything by budget, its use, what went wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from anysearch_jax.evaluation import (
  columns,
  intervals,
  shown,
  tables,
)
from anysearch_jax.evaluation import curves as curves_lib


def formats(rows: Sequence[shown.Shown]) -> tables.Table:
  """Well-formed, truncated, invalid, over-budget and failed episodes."""
  names = ("format_rate", "truncated_rate", "invalid_rate", "violation_rate")
  return tables.Table(
    "formats",
    "Format and failures",
    "Rates among scored episodes with intervals clustered by question. Over "
    "budget: it asked for a search that it did not have.",
    ("row", "B"),
    (
      tables.Column("well formed"),
      tables.Column("truncated"),
      tables.Column("invalid"),
      tables.Column("over budget"),
    ),
    tuple(
      tables.Line(
        (row.label, str(budget)), tuple(shown.cells(part, names)), None
      )
      for row in rows
      for budget, part in columns.by_budget(row.table).items()
    ),
  )


def hops(rows: Sequence[shown.Shown]) -> tables.Table:
  """Accuracy by the question's hops at every budget; no line if unknown."""
  at = shown.budgets(rows)
  lines = []
  for row in rows:
    for count, part in columns.by_hops(row.table).items():
      by_budget = columns.by_budget(part)
      cells = [shown.cells(by_budget.get(b), ("accuracy",))[0] for b in at]
      lines.append(tables.Line((row.label, str(count)), tuple(cells), None))
  return tables.Table(
    "hops",
    "Accuracy by hops",
    "Exact match with intervals clustered by question.",
    ("row", "hops"),
    tuple(tables.Column(f"B = {b}", digits=2) for b in at),
    tuple(lines),
  )


def budget_use(
  use: Mapping[str, Mapping[int, Sequence[int]]],
) -> tables.Table:
  """The share of episodes that made 0, 1, ... searches of their budget."""
  most = max(
    (len(c) for found in use.values() for c in found.values()), default=0
  )
  lines = [
    tables.Line(
      (label, str(budget)),
      tuple(
        _rate(counts[k], sum(counts)) if k < len(counts) else None
        for k in range(most)
      ),
    )
    for label, found in use.items()
    for budget, counts in found.items()
  ]
  return tables.Table(
    "budget_use",
    "Searches made of each budget",
    "Shares of scored episodes with Wilson's 95 % interval.",
    ("row", "B"),
    tuple(tables.Column(str(k), "searches made", 2) for k in range(most)),
    tuple(lines),
  )


def _rate(count: int, n: int) -> tables.Cell:
  return tables.cell(intervals.wilson(count, n))


def _by_set(
  found: Sequence[curves_lib.Curve],
  by_dataset: Mapping[str, Sequence[curves_lib.Curve]],
) -> list[tuple[str, Sequence[curves_lib.Curve]]]:
  """Each set's curves, then the average's where there are several sets."""
  average = [("average", found)] if len(by_dataset) > 1 else []
  return [*by_dataset.items(), *average]


def curves(
  found: Sequence[curves_lib.Curve],
  by_dataset: Mapping[str, Sequence[curves_lib.Curve]],
  index: Mapping[str, int],
) -> tables.Table:
  """Every measure of every row at every budget."""
  return tables.Table(
    "curves",
    "Everything by budget",
    "95 % intervals clustered by question. * a budget above those of training."
    " Dollars by the prices of the evaluation, or those given to the report.",
    ("set", "B", "row"),
    (
      tables.Column("EM"),
      tables.Column("TP"),
      tables.Column("searches", digits=2),
      tables.Column("tokens", digits=1),
      tables.Column("dollars", digits=5),
    ),
    tuple(
      tables.Line(
        (dataset, f"{point.budget}{'*' * point.unseen}", curve.label),
        (
          tables.cell(point.accuracy, point.n),
          *map(
            tables.cell, (point.tp, point.searches, point.tokens, point.cost)
          ),
        ),
        index[curve.label],
      )
      for dataset, part in _by_set(found, by_dataset)
      for curve in part
      for point in curve.points
    ),
  )


def areas(
  found: Sequence[curves_lib.Curve],
  by_dataset: Mapping[str, Sequence[curves_lib.Curve]],
  index: Mapping[str, int],
) -> tables.Table:
  """The area under each row's budget curve."""
  return tables.Table(
    "area",
    "Area under the budget curve",
    "By trapezoids over the evaluated range of budgets scaled to one: the "
    "accuracy at a budget drawn evenly from it. 95 % bootstrap intervals over "
    "questions. Comparable between rows with the same budgets.",
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
      for dataset, part in _by_set(found, by_dataset)
      for curve in part
      if curve.area.value is not None
    ),
  )


def pareto(
  offers: Mapping[str, Sequence[curves_lib.Offer]], index: Mapping[str, int]
) -> tables.Table:
  """The rows at budgets that no other beats at its price."""
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
