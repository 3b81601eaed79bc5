"""Every table of a report: columns over lines.

The keys, headings, notes and most columns are in report.toml. This module makes
the lines of each table, and the columns that depend on the study.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from anysearch_jax import budgets as budgets_lib
from anysearch_jax.evaluation import (
  columns,
  comparison,
  inference,
  measures,
  metrics,
)
from anysearch_jax.report import study as study_lib
from anysearch_jax.report.study import Study
from anysearch_jax.report.tables import Cell, Column, Table, make_table

_TABLES = study_lib.WORDS["tables"]
_TIGHT_BUDGETS = (4, 5, 6)  # Budgets of the paper's efficiency table.
_USUAL_BUDGET = 5  # Budget of the paper's main, token and ablation tables.
# Heading and decimals of a measure.
_HEADINGS = {
  "accuracy": ("EM", 3),
  "tp": ("TP", 3),
  "searches": ("searches", 2),
  "total_tokens": ("tokens", 1),
  "cost": ("dollars", 6),
  "regret": ("regret", 3),
}
# Headings of what is shown beside EM of models behind an address, which answer
# in sentences.
_SENTENCE_HEADINGS = {"f1": "F1", "cover_accuracy": "cover EM"}
# A line: its keys, and the subject that columns measure.
_Line = tuple[tuple, Any]
_Rows = Sequence[metrics.Row]


def tables(study: Study) -> list[Table]:
  """Returns every table; those that do not apply have no lines."""
  rows = study.rows
  cells = list(_cells(rows))
  by_dataset = [line for line in cells if line[0][0] != "average"]
  tight = [line for line in by_dataset if line[0][1] in _TIGHT_BUDGETS]
  official = [line for line in cells if line[1].official_f1.value is not None]
  with_evidence = [
    line
    for line in by_dataset
    if {line[1].evidence_recall, line[1].judged} != {inference.NOTHING}
  ]
  by_budget = [
    ((row.label, budget), part)
    for row in rows
    for budget, part in row.by_budget.items()
  ]
  # A star marks budgets that were never trained.
  curves = [
    ((name, f"{budget}*" if budget > study.trained else budget, label), part)
    for (name, budget, label), part in cells
  ]
  tables = [
    overview(rows),
    _main(rows),
    _table("scorers", official),
    _table("efficiency", tight),
  ]
  for name, (title, members) in study.groups.items():
    tables.append(_ablation(name, title, members))
  tables.append(_table("tokens", by_dataset))
  tables += _prices(study, cells)
  tables += [
    _table("formats", by_budget),
    _hops(rows),
    _table("evidence", with_evidence),
    _table("early_stopping", _early_stopping(study), system=study.system),
  ]
  for name, differences in study.differences.items():
    title, _ = study.groups[name]
    tables.append(_pairwise(name, title, differences))
  tables += [
    _table("training", map(_training, study.training)),
    _training_cost(study),
    _table("curves", curves),
    _table("area", _areas(rows)),
  ]
  return tables


def _table(
  kind: str,
  lines: Iterable[_Line],
  more_columns: Iterable[Column] = (),
  *,
  name: str = "",
  **words: str,
) -> Table:
  """Fills a table of report.toml.

  Args:
    kind: name of the table in report.toml.
    lines: the lines.
    more_columns: columns after those of report.toml.
    name: distinguishes several tables of a kind.
    **words: values for the braces in the title and the note.
  """
  spec = _TABLES[kind]
  columns = [Column(**column) for column in spec.get("columns", ())]
  return make_table(
    f"{kind}_{name}" if name else kind,
    title=spec["title"].format(**words),
    note=spec["note"].format(**words),
    keys=spec["keys"],
    columns=[*columns, *more_columns],
    lines=lines,
  )


def _at_budgets(rows: _Rows, **options: Any) -> list[Column]:
  """Returns a column for each budget, of subjects that map budgets."""
  return [Column(f"B = {b}", b, **options) for b in study_lib.budgets(rows)]


def _cells(rows: _Rows) -> Iterator[_Line]:
  """Yields each dataset, budget and row that was played, then averages.

  An average is over datasets, at a budget where the row has all of them.
  """
  datasets = study_lib.datasets(rows)
  budgets = study_lib.budgets(rows)
  for dataset, budget, row in itertools.product(datasets, budgets, rows):
    if part := row.cells.get((dataset, budget)):
      yield (dataset, budget, row.label), part
  if len(datasets) < 2:
    return
  for budget, row in itertools.product(budgets, rows):
    part = row.curve.points.get(budget)
    if part and study_lib.is_complete(row, rows, [budget]):
      yield ("average", budget, row.label), part


def overview(rows: _Rows) -> Table:
  """Returns the table of every row at every budget."""
  knows_optimum = study_lib.know_optimum(rows)
  remote_rows = list(filter(_is_behind_address, rows))
  measures = ["accuracy", "searches", "tp"]
  if knows_optimum:
    measures.insert(1, "regret")

  def lines() -> Iterator[_Line]:
    for measure in measures:
      title, _ = _HEADINGS[measure]
      for row in rows:
        yield (title, row.label), _overview_line(row, rows, measure)
      if measure == "accuracy" and knows_optimum:
        yield (title, "the optimum, computed"), _optimum_line(rows)
      if measure == "accuracy":
        for (other, heading), row in itertools.product(
          _SENTENCE_HEADINGS.items(), remote_rows
        ):
          yield (heading, row.label), _overview_line(row, rows, other)

  return _table(
    "overview",
    lines(),
    [*_at_budgets(rows), Column("mean", "mean")],
    regret=_TABLES["overview"]["regret"] if knows_optimum else "",
    sentences=_TABLES["overview"]["sentences"] if remote_rows else "",
  )


def _is_behind_address(row: metrics.Row) -> bool:
  """Returns whether a model behind an address played, see `loading`."""
  return all(name.startswith("openai ") for name in row.columns.runs)


def _overview_line(
  row: metrics.Row, rows: _Rows, measure: str
) -> dict[Any, Any]:
  """Returns a measure by budget, and its mean if the row has all cells."""
  values: dict[Any, Any] = {
    budget: getattr(part, measure)
    for budget, part in row.curve.points.items()
    if study_lib.is_complete(row, rows, [budget])
  }
  if study_lib.is_complete(row, rows):
    values["mean"] = getattr(row.mean, measure)
  return values


def _optimum_line(rows: _Rows) -> dict[Any, Any]:
  """Returns the best agent's accuracy by budget, and its mean."""
  # Rows have the same questions, but some have fewer of them.
  first = next(row for row in rows if study_lib.know_optimum([row]))
  values: dict[Any, Any] = {
    budget: float(part.table.optimum.mean())
    for budget, part in first.by_budget.items()
    if not np.isnan(part.table.optimum).any()
  }
  budgets = study_lib.budgets(rows)
  if set(budgets) <= set(values):
    values["mean"] = sum(values[b] for b in budgets) / len(budgets)
  return values


def _main(rows: _Rows) -> Table:
  """Returns the paper's main table: accuracy by dataset and budget."""
  datasets = study_lib.datasets(rows)

  def lines() -> Iterator[_Line]:
    for budget, row in itertools.product(study_lib.budgets(rows), rows):
      parts = {s: p for (s, b), p in row.cells.items() if b == budget}
      if not parts:
        continue
      values = {s: Cell(*p.accuracy, n=p.n) for s, p in parts.items()}
      values["regret of all"] = Cell(*row.by_budget[budget].regret)
      if 1 < len(datasets) == len(parts):
        mean = row.whole.over([budget], weigh_sets=True)
        values["mean of sets"] = Cell(*mean.accuracy, n=mean.n)
      yield (budget, row.label), values

  columns = []
  for name in datasets:
    group, heading = study_lib.WORDS["sets"].get(name, ("", name))
    columns.append(Column(heading, name, group, best=True))
  columns.append(Column("regret", "regret of all", optional=True))
  columns.append(Column("Avg.", "mean of sets", best=True, optional=True))
  return _table("main", lines(), columns)


def _ablation(name: str, title: str, rows: _Rows) -> Table:
  """Returns the table of a group of rows, at one budget and at all."""
  budgets = study_lib.budgets(rows)
  usual = min(budgets, key=lambda b: (abs(b - _USUAL_BUDGET), -b))
  pools = {f"B = {usual}": [usual], "all B ≥ 1": [b for b in budgets if b >= 1]}
  measures = ("accuracy", "tp", "searches", "regret")

  def values(row: metrics.Row) -> dict[Any, Any]:
    cells: dict[Any, Any] = {}
    for group, pool in pools.items():
      part = row.whole.over(pool)
      if part.n and study_lib.is_complete(row, rows, pool):
        cells |= {(group, m): getattr(part, m) for m in measures}
        cells[group, "accuracy"] = Cell(*part.accuracy, n=part.n)
    return cells

  columns = []
  for group, measure in itertools.product(pools, measures):
    heading, digits = _HEADINGS[measure]
    columns.append(
      Column(
        heading,
        (group, measure),
        group,
        digits,
        best=measure in ("accuracy", "tp"),
        optional=measure == "regret",
      )
    )
  return _table(
    "ablation",
    (((row.label,), values(row)) for row in rows),
    columns,
    name=name,
    title=title,
    usual=str(usual),
  )


def _hops(rows: _Rows) -> Table:
  """Returns the table of accuracy by hops and budget."""
  lines = []
  for row in rows:
    table = row.whole.table
    for hops, episodes in table.split(table.hops).items():
      if hops != columns.UNKNOWN_HOPS:
        parts = metrics.Row("", table=episodes).by_budget
        cells = {b: Cell(*p.accuracy, n=p.n) for b, p in parts.items()}
        lines.append(((row.label, hops), cells))
  return _table("hops", lines, _at_budgets(rows, digits=2))


def _prices(study: Study, cells: Sequence[_Line]) -> Iterator[Table]:
  """Yields what a search costs in tokens, and what was spent, in tokens."""
  prices = {
    name: budgets_lib.Prices(search=search, output=output)
    for name, (search, output) in study_lib.WORDS["paper_prices"].items()
  }
  if study.prices and study.prices.output:
    prices["this evaluation"] = study.prices

  def spent(part: metrics.Part) -> dict[str, Any]:
    values: dict[str, Any] = {
      m: getattr(part, m)
      for m in ("searches", "generated_tokens", "tokens_per_right")
    }
    for name, price in prices.items():
      costs = measures.estimates(
        part.table.priced(price.in_tokens),
        ["cost"],
        weigh_sets=part.weigh_sets,
      )
      values[name] = costs["cost"]
    return values

  search_prices = []
  if cells:
    for name, price in prices.items():
      values = vars(price) | {
        "input": price.input or None,
        "each": price.in_tokens.search / 1e3,
      }
      search_prices.append(((name,), values))
  yield _table("search_price", search_prices)
  means = [line for line in cells if line[0][0] == "average"] or cells
  yield _table(
    "spending",
    ((keys, spent(part)) for keys, part in means),
    (Column(name, name, "in all, by the prices of", 0) for name in prices),
  )


def _early_stopping(study: Study) -> Iterator[_Line]:
  """Yields the paper's comparison of the system with each other row."""
  for label, (_, comparisons) in study.compared.items():
    for line in comparisons:
      budget = "all ≥ 1" if line.budget is None else line.budget
      rates = {
        f"{count} rate": getattr(line, count) / line.n
        for count in ("losses", "losses_unused", "wins")
      }
      yield (label, budget), vars(line) | rates


def _pairwise(
  name: str, title: str, differences: Sequence[comparison.Difference]
) -> Table:
  """Tabulates differences of every two rows with p values."""
  # Columns of a measure, with the attribute of a difference that each shows.
  attributes = {
    "difference": "estimate",
    "detectable": "detectable",
    "p": "p",
    "p, Holm": "adjusted",
  }
  datasets = list(dict.fromkeys(d.dataset for d in differences))
  lines: dict[tuple, dict[tuple, Any]] = collections.defaultdict(dict)

  def order(d: comparison.Difference) -> tuple[int, int]:
    return datasets.index(d.dataset), -1 if d.budget is None else d.budget

  for d in sorted(differences, key=order):
    budget = "all ≥ 1" if d.budget is None else d.budget
    line = lines[d.dataset or "all", budget, f"{d.ours} − {d.theirs}"]
    for attribute in attributes.values():
      line[d.measure, attribute] = getattr(d, attribute)
    n = d.n if d.measure == "accuracy" else None
    line[d.measure, "estimate"] = Cell(*d.estimate, n=n)
  columns = []
  for measure, (group, digits) in _HEADINGS.items():
    for heading, attribute in attributes.items():
      columns.append(
        Column(
          heading,
          (measure, attribute),
          group,
          4 if heading.startswith("p") else digits,
          signed=attribute == "estimate",
          optional=True,
        )
      )
  return _table("pairwise", lines.items(), columns, name=name, title=title)


def _training(training: study_lib.Training) -> _Line:
  def total(key: str) -> float:
    return sum(record.get(key) or 0 for record in training.records)

  return (training.label,), {
    "rollouts": len(training.records),
    "rollout minutes": total("time/rollout") / 60,
    "train minutes": total("time/train") / 60,
    "failed": total("rollout/failed"),
  }


def _training_cost(study: Study) -> Table:
  """Tabulates device-hours: of one policy, and of those for K budgets."""
  budget_count = len(study_lib.budgets(study.rows))

  def cost(run: study_lib.Training) -> dict[str, float | None]:
    hours = sum(
      r.get("time/elapsed", np.nan) * r.get("device/count", np.nan) / 3600
      for r in run.records
    )
    fixed = run.config.get("curriculum", {}).get("fixed_budget")
    policies = None
    if fixed is not None:
      policies = budget_count if fixed >= 0 else 1
    known_hours = hours if hours > 0 else None  # nan: not recorded.
    whole = known_hours * policies if known_hours and policies else None
    return {"hours": known_hours, "policies": policies, "whole": whole}

  lines = (((run.label,), cost(run)) for run in study.training)
  return _table("training_cost", lines, count=str(budget_count))


def _areas(rows: _Rows) -> Iterator[_Line]:
  """Yields the area under each row's curve, by dataset, then averaged."""
  datasets = study_lib.datasets(rows)
  curves = [
    (dataset, row.curves[dataset])
    for dataset in datasets
    for row in rows
    if dataset in row.curves
  ]
  if len(datasets) > 1:
    # Averages over datasets are comparable only if these are the same.
    curves += [
      ("average", row.curve)
      for row in rows
      if study_lib.is_complete(row, rows, study_lib.budgets([row]))
    ]
  for dataset, curve in curves:
    if curve.area.value is None:
      continue
    budgets = list(curve.points)
    n = sum(part.n for part in curve.points.values())
    yield (
      (dataset, curve.label),
      {
        "area": Cell(*curve.area, n=n),
        "first": budgets[0],
        "last": budgets[-1],
      },
    )
