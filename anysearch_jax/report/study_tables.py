"""Every table of a report: columns over lines.

Keys, headings, notes and most columns stand in report.toml. Here are the lines
of each table, and the columns that depend on the study.
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
_TIGHT = (4, 5, 6)  # Budgets of the paper's efficiency table.
_USUAL = 5  # Budget of the paper's main, token and ablation tables.
# Heading and decimals of a measure.
_HEADS = {
  "accuracy": ("EM", 3),
  "tp": ("TP", 3),
  "searches": ("searches", 2),
  "total_tokens": ("tokens", 1),
  "cost": ("dollars", 6),
  "regret": ("regret", 3),
}
# A line: its keys, and the subject that columns measure.
_Line = tuple[tuple, Any]
_Rows = Sequence[metrics.Row]


def tables(study: Study) -> list[Table]:
  """Returns every table; those that do not apply have no lines."""
  rows = study.rows
  cells = [*_cells(rows)]
  plain = [line for line in cells if line[0][0] != "average"]
  compared = [
    _pairwise(name, study.groups[name][0], found)
    for name, found in study.differences.items()
  ]
  return [
    overview(rows),
    _main(rows),
    _table(
      "scorers",
      (line for line in cells if line[1].official_f1.value is not None),
    ),
    _table("efficiency", (line for line in plain if line[0][1] in _TIGHT)),
    *(_ablation(name, *group) for name, group in study.groups.items()),
    _table("tokens", plain),
    *_prices(study, cells),
    _table(
      "formats",
      (((row.label, b), p) for row in rows for b, p in row.by_budget.items()),
    ),
    _hops(rows),
    _table(
      "evidence",
      (
        line
        for line in _cells(rows)
        if line[0][0] != "average"
        and {line[1].evidence_recall, line[1].judged} != {inference.NOTHING}
      ),
    ),
    _table("early_stopping", _early_stopping(study), system=study.system),
    *compared,
    _table("training", map(_training, study.training)),
    _training_cost(study),
    _table(
      "curves",
      (
        ((name, f"{budget}{'*' * (budget > study.trained)}", label), part)
        for (name, budget, label), part in cells
      ),
    ),
    _table("area", _areas(rows)),
  ]


def _table(
  kind: str,
  lines: Iterable[_Line],
  own: Iterable[Column] = (),
  *,
  name: str = "",
  **words: str,
) -> Table:
  """Fills a table of report.toml, named `kind` there.

  `own` are more columns, `name` tells several tables of a kind apart, and
  `words` are those of the title and the note.
  """
  spec = _TABLES[kind]
  title, note = (spec[part].format(**words) for part in ("title", "note"))
  heads = (Column(**column) for column in spec.get("columns", ()))
  kind = f"{kind}_{name}" if name else kind
  return make_table(kind, title, note, spec["keys"], [*heads, *own], lines)


def _at_budgets(rows: _Rows, **how: Any) -> list[Column]:
  """Returns a column for each budget, of subjects that map budgets."""
  return [Column(f"B = {b}", b, **how) for b in study_lib.budgets(rows)]


def _cells(rows: _Rows) -> Iterator[_Line]:
  """Yields each dataset, budget and row that was played, then averages.

  An average is over datasets, at a budget where the row has all of them.
  """
  sets, budgets = study_lib.datasets(rows), study_lib.budgets(rows)
  for dataset, budget, row in itertools.product(sets, budgets, rows):
    if part := row.cells.get((dataset, budget)):
      yield (dataset, budget, row.label), part
  for budget, row in itertools.product(budgets if len(sets) > 1 else (), rows):
    part = row.curve.points.get(budget)
    if part and study_lib.is_complete(row, rows, [budget]):
      yield ("average", budget, row.label), part


def overview(rows: _Rows) -> Table:
  """Returns the table of every row at every budget."""
  at, known = study_lib.budgets(rows), study_lib.know_optimum(rows)

  def lines() -> Iterator[_Line]:
    for measure in ("accuracy", *["regret"] * known, "searches", "tp"):
      title = _HEADS[measure][0]
      for row in rows:
        found: dict[Any, Any] = {
          budget: getattr(part, measure)
          for budget, part in row.curve.points.items()
          if study_lib.is_complete(row, rows, [budget])
        }
        if study_lib.is_complete(row, rows):
          found["mean"] = getattr(row.mean, measure)
        yield (title, row.label), found
      if measure == "accuracy" and known:
        # Rows have the same questions, but some have fewer of them.
        first = next(row for row in rows if study_lib.know_optimum([row]))
        best: dict[Any, Any] = {
          budget: float(part.table.optimum.mean())
          for budget, part in first.by_budget.items()
          if not np.isnan(part.table.optimum).any()
        }
        if set(at) <= set(best):
          best["mean"] = sum(best[b] for b in at) / len(at)
        yield (title, "the optimum, computed"), best

  return _table(
    "overview",
    lines(),
    [*_at_budgets(rows), Column("mean", "mean")],
    regret=_TABLES["overview"]["regret"] if known else "",
  )


def _main(rows: _Rows) -> Table:
  sets = study_lib.datasets(rows)

  def lines() -> Iterator[_Line]:
    for budget, row in itertools.product(study_lib.budgets(rows), rows):
      parts = {s: p for (s, b), p in row.cells.items() if b == budget}
      if not parts:
        continue
      found = {s: Cell(*p.accuracy, n=p.n) for s, p in parts.items()}
      found["regret of all"] = Cell(*row.by_budget[budget].regret)
      if 1 < len(sets) == len(parts):
        mean = row.whole.over([budget], weigh_sets=True)
        found["mean of sets"] = Cell(*mean.accuracy, n=mean.n)
      yield (budget, row.label), found

  return _table(
    "main",
    lines(),
    [
      *(
        Column(head, name, group, best=True)
        for name in sets
        for group, head in [study_lib.WORDS["sets"].get(name, ("", name))]
      ),
      Column("regret", "regret of all", optional=True),
      Column("Avg.", "mean of sets", best=True, optional=True),
    ],
  )


def _ablation(name: str, title: str, rows: _Rows) -> Table:
  budgets = study_lib.budgets(rows)
  usual = min(budgets, key=lambda b: (abs(b - _USUAL), -b))
  pools = {f"B = {usual}": [usual], "all B ≥ 1": [b for b in budgets if b >= 1]}
  measures = ("accuracy", "tp", "searches", "regret")

  def measured(row: metrics.Row) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    for group, pool in pools.items():
      part = row.whole.over(pool)
      if part.n and study_lib.is_complete(row, rows, pool):
        found |= {(group, m): getattr(part, m) for m in measures}
        found[group, "accuracy"] = Cell(*part.accuracy, n=part.n)
    return found

  return _table(
    "ablation",
    (((row.label,), measured(row)) for row in rows),
    [
      Column(
        head,
        (group, m),
        group,
        digits,
        best=m in ("accuracy", "tp"),
        optional=m == "regret",
      )
      for group in pools
      for m in measures
      for head, digits in [_HEADS[m]]
    ],
    name=name,
    title=title,
    usual=str(usual),
  )


def _hops(rows: _Rows) -> Table:
  lines = []
  for row in rows:
    table = row.whole.table
    for hops, found in table.split(table.hops).items():
      if hops != columns.UNKNOWN_HOPS:
        parts = metrics.Row("", table=found).by_budget
        shown = {b: Cell(*p.accuracy, n=p.n) for b, p in parts.items()}
        lines.append(((row.label, hops), shown))
  return _table("hops", lines, _at_budgets(rows, digits=2))


def _prices(study: Study, cells: Sequence[_Line]) -> Iterator[Table]:
  """Yields what a search costs in tokens, and what was spent, in tokens."""
  own, known = study.prices, {}
  for name, (search, output) in study_lib.WORDS["paper_prices"].items():
    known[name] = budgets_lib.Prices(search=search, output=output)
  if own and own.output:
    known["this evaluation"] = own

  def spent(part: metrics.Part) -> dict[str, Any]:
    found: dict[str, Any] = {
      m: getattr(part, m) for m in ("searches", "generated_tokens")
    }
    for name, p in known.items():
      table, sets = part.table.priced(p.in_tokens), part.weigh_sets
      found |= measures.estimates(table, ["cost"], weigh_sets=sets)
      found[name] = found.pop("cost")
    return found

  each = {
    name: vars(p) | {"input": p.input or None, "each": p.in_tokens.search / 1e3}
    for name, p in known.items()
    if cells
  }
  yield _table("search_price", (((name,), p) for name, p in each.items()))
  means = [line for line in cells if line[0][0] == "average"] or cells
  yield _table(
    "spending",
    ((at, spent(part)) for at, part in means),
    (Column(name, name, "in all, by the prices of", 0) for name in known),
  )


def _early_stopping(study: Study) -> Iterator[_Line]:
  for label, (_, found) in study.compared.items():
    for line in found:
      budget = "all ≥ 1" if line.budget is None else line.budget
      counts = ("losses", "losses_unused", "wins")
      rates = {f"{of} rate": getattr(line, of) / line.n for of in counts}
      yield (label, budget), vars(line) | rates


def _pairwise(
  name: str, title: str, found: Sequence[comparison.Difference]
) -> Table:
  """Tabulates differences of every two rows with p values."""
  numbers = {
    "difference": "",
    "detectable": "detectable",
    "p": "p",
    "p, Holm": "adjusted",
  }
  sets = list(dict.fromkeys(d.dataset for d in found))
  lines: dict[tuple, dict[tuple, Any]] = collections.defaultdict(dict)
  for d in sorted(
    found,
    key=lambda d: (sets.index(d.dataset), -1 if d.budget is None else d.budget),
  ):
    at = "all ≥ 1" if d.budget is None else d.budget
    line = lines[d.dataset or "all", at, f"{d.ours} − {d.theirs}"]
    n = d.n if d.measure == "accuracy" else None
    line[d.measure, ""] = Cell(*d.estimate, n=n)
    for of in list(numbers.values())[1:]:
      line[d.measure, of] = getattr(d, of)
  return _table(
    "pairwise",
    lines.items(),
    [
      Column(
        head,
        (measure, of),
        group,
        4 if head.startswith("p") else digits,
        signed=not of,
        optional=True,
      )
      for measure, (group, digits) in _HEADS.items()
      for head, of in numbers.items()
    ],
    name=name,
    title=title,
  )


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
  count = len(study_lib.budgets(study.rows))

  def cost(run: study_lib.Training) -> dict[str, float | None]:
    products = (
      r.get("time/elapsed", np.nan) * r.get("device/count", np.nan) / 3600
      for r in run.records
    )
    hours = total if (total := sum(products)) > 0 else None  # nan: unknown.
    fixed = run.config.get("curriculum", {}).get("fixed_budget")
    policies = None if fixed is None else count if fixed >= 0 else 1
    whole = hours * policies if hours and policies else None
    return {"hours": hours, "policies": policies, "whole": whole}

  lines = (((run.label,), cost(run)) for run in study.training)
  return _table("training_cost", lines, count=str(count))


def _areas(rows: _Rows) -> Iterator[_Line]:
  sets = study_lib.datasets(rows)
  curves = [(s, r.curves[s]) for s in sets for r in rows if s in r.curves]
  if len(sets) > 1:
    # Averages over datasets are comparable only if these are the same.
    curves += [
      ("average", row.curve)
      for row in rows
      if study_lib.is_complete(row, rows, study_lib.budgets([row]))
    ]
  for dataset, curve in curves:
    if curve.area.value is not None:
      budgets = list(curve.points)
      yield (
        (dataset, curve.label),
        {
          "area": Cell(*curve.area, n=sum(p.n for p in curve.points.values())),
          "first": budgets[0],
          "last": budgets[-1],
        },
      )
