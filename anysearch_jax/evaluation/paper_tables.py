"""The tables of the paper over any rows, every claim with its interval and n."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from anysearch_jax.evaluation import (
  columns,
  intervals,
  measures,
  metrics,
  tables,
)
from anysearch_jax.evaluation import curves as curves_lib

# As the paper heads its main table.
NAMES = {
  "nq": ("General QA", "NQ†"),
  "triviaqa": ("General QA", "TriviaQA*"),
  "popqa": ("General QA", "PopQA*"),
  "hotpotqa": ("Multi-hop QA", "HotpotQA†"),
  "2wikimultihopqa": ("Multi-hop QA", "2wiki*"),
  "musique": ("Multi-hop QA", "MuSiQue*"),
  "bamboogle": ("Multi-hop QA", "Bamboogle*"),
}
TIGHT = (4, 5, 6)  # Budgets of the paper's efficiency table.
PAPER_BUDGET = 5  # That of its main, token and ablation tables.
_SAMPLED = 6  # Lines of the sampling table.


@dataclasses.dataclass(frozen=True)
class Shown:
  """A row as tables show it: label, colour and its numbers.

  cells: by dataset and budget, the scored episodes; none is empty.
  """

  label: str
  index: int
  table: columns.Columns
  cells: Mapping[tuple[str, int], columns.Columns]


def show(row: metrics.Row, index: int) -> Shown:
  """A row with its episodes by dataset and budget."""
  table = columns.of(row.episodes).scored()
  return Shown(
    row.label,
    index,
    table,
    {
      (dataset, budget): part
      for dataset, found in columns.by_dataset(table).items()
      for budget, part in columns.by_budget(found).items()
    },
  )


def datasets(rows: Sequence[Shown]) -> list[str]:
  """The sets that any row has, in the paper's order."""
  found = {dataset for row in rows for dataset, _ in row.cells}
  return [name for name in NAMES if name in found] + sorted(found - set(NAMES))


def budgets(rows: Sequence[Shown]) -> list[int]:
  """The budgets that any row has, ascending."""
  return sorted({budget for row in rows for _, budget in row.cells})


def usual_budget(rows: Sequence[Shown]) -> int:
  """The paper's budget, or the evaluated one that is nearest."""
  return min(budgets(rows), key=lambda b: (abs(b - PAPER_BUDGET), -b))


def _cells(
  part: columns.Columns | None, names: Sequence[str]
) -> list[tables.Cell | None]:
  """Measures of some episodes; n stands with the first."""
  if part is None or not len(part):
    return [None] * len(names)
  found = measures.estimates(part, names)
  return [
    tables.cell(found[name], len(part) if i == 0 else None)
    for i, name in enumerate(names)
  ]


def main(rows: Sequence[Shown], *, resamples: int = 10_000) -> tables.Table:
  """EM on every set and their average, at each budget."""
  sets = datasets(rows)
  lines = []
  for budget in budgets(rows):
    for row in rows:
      parts = [row.cells.get((dataset, budget)) for dataset in sets]
      if not any(parts):
        continue
      cells = [_cells(part, ("accuracy",))[0] for part in parts]
      if len(sets) > 1:
        average = None
        if all(parts):
          at = row.table.where(row.table.budget == budget)
          found = metrics.over_sets(at, ("accuracy",), resamples=resamples)
          average = tables.cell(found["accuracy"], len(at))
        cells.append(average)
      lines.append(
        tables.Line((str(budget), row.label), tuple(cells), row.index)
      )
  heads = [NAMES.get(dataset, ("", dataset)) for dataset in sets]
  average = [tables.Column("Avg.", best=True)] if len(sets) > 1 else []
  return tables.Table(
    "main",
    "Exact match on every set at each budget",
    "95 % intervals clustered by question; the average weighs sets alike and "
    "resamples questions within each"
    + (", and stands where a row has all sets" if len(sets) > 1 else "")
    + ". † in domain, * out of domain.",
    ("B", "row"),
    tuple(
      [tables.Column(name, group, best=True) for group, name in heads] + average
    ),
    tuple(lines),
  )


def efficiency(rows: Sequence[Shown]) -> tables.Table:
  """EM, searches and TP of every set at B = 4, 5 and 6."""
  return tables.Table(
    "efficiency",
    "Efficiency at B = 4, 5 and 6",
    "EM with an interval clustered by question and its n; searches and TP "
    "(correct answers per search) with the delta method's. Of the three "
    "budgets, those that were evaluated.",
    ("set", "B", "row"),
    (
      tables.Column("EM", best=True),
      tables.Column("searches", digits=2),
      tables.Column("TP", best=True),
    ),
    tuple(
      tables.Line(
        (dataset, str(budget), row.label),
        tuple(
          _cells(
            row.cells[dataset, budget], ("accuracy", "searches", "tp")
          )
        ),
        row.index,
      )
      for dataset in datasets(rows)
      for budget in TIGHT
      for row in rows
      if (dataset, budget) in row.cells
    ),
  )


def ablation(name: str, title: str, rows: Sequence[Shown]) -> tables.Table:
  """Accuracy, TP and searches of some rows, at one budget and over all."""
  at = usual_budget(rows)
  names = ("accuracy", "tp", "searches")
  lines = []
  for row in rows:
    one = row.table.where(row.table.budget == at)
    pooled = row.table.where(row.table.budget >= 1)
    cells = _cells(one, names) + _cells(pooled, names)
    lines.append(tables.Line((row.label,), tuple(cells), row.index))
  return tables.Table(
    f"ablation_{name}",
    title,
    f"At B = {at}, and pooled over every budget from 1 on; all sets together. "
    "95 % intervals clustered by question. Whether two lines differ is what "
    "the paired comparison says.",
    ("row",),
    tuple(
      tables.Column(column, group, 2 if column == "searches" else 3, best=best)
      for group in (f"B = {at}", "all B ≥ 1")
      for column, best in (("EM", True), ("TP", True), ("searches", False))
    ),
    tuple(lines),
  )


def tokens(rows: Sequence[Shown]) -> tables.Table:
  """Tokens written and read, their share, and the cost of an episode."""
  names = (
    "generated_tokens",
    "retrieved_tokens",
    "total_tokens",
    "retrieval_share",
  )
  lines = [
    tables.Line(
      (dataset, str(budget), row.label),
      tuple(_cells(row.cells[dataset, budget], names)),
      row.index,
    )
    for dataset in datasets(rows)
    for budget in budgets(rows)
    for row in rows
    if (dataset, budget) in row.cells
  ]
  return tables.Table(
    "tokens",
    "Tokens of an episode",
    "Means with 95 % intervals clustered by question; generated by the policy, "
    "retrieved: all that the environment wrote. The prompt is in neither.",
    ("set", "B", "row"),
    (
      tables.Column("generated", digits=1),
      tables.Column("retrieved", digits=1),
      tables.Column("total", digits=1),
      tables.Column("retrieved share"),
    ),
    tuple(lines),
  )


def formats(rows: Sequence[Shown]) -> tables.Table:
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
      tables.Line((row.label, str(budget)), tuple(_cells(part, names)), None)
      for row in rows
      for budget, part in columns.by_budget(row.table).items()
    ),
  )


def hops(rows: Sequence[Shown]) -> tables.Table:
  """Accuracy by the question's hops at every budget; no line if unknown."""
  at = budgets(rows)
  lines = []
  for row in rows:
    for count, part in columns.by_hops(row.table).items():
      by_budget = columns.by_budget(part)
      cells = [_cells(by_budget.get(b), ("accuracy",))[0] for b in at]
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
  most = max((len(c) for found in use.values() for c in found.values()), default=0)
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
    ("price in", "row", "B"),
    (tables.Column("price", digits=3), tables.Column("EM")),
    tuple(
      tables.Line(
        (against, offer.label, str(offer.budget)),
        (tables.Cell(offer.price), tables.Cell(offer.accuracy)),
        index[offer.label],
      )
      for against, found in offers.items()
      for offer in found
      if not offer.dominated
    ),
  )


def sampling(training: Sequence[metrics.Training]) -> tables.Table:
  """Which budgets Phase II drew, as training went on."""
  lines, most = [], 0
  for run in training:
    records = [r for r in run.records if r.get("phase") == 2]
    shares = [_shares(record) for record in records]
    kept = [(r, s) for r, s in zip(records, shares) if s]
    for part in _parts(kept):
      mean = np.mean([s for _, s in part], axis=0)
      most = max(most, len(mean))
      ends = part[0][0].get("step", "?"), part[-1][0].get("step", "?")
      steps = f"{ends[0]} to {ends[1]}" if ends[0] != ends[1] else f"{ends[0]}"
      lines.append(
        tables.Line(
          (run.label, steps),
          tuple(tables.Cell(float(p), n=None) for p in mean),
          None,
        )
      )
  return tables.Table(
    "sampling",
    "Sampling probability of each budget in Phase II",
    "Mean over the rollouts of each span of optimizer steps; the first line is "
    "the beginning of Phase II, where it is uniform.",
    ("run", "steps"),
    tuple(tables.Column(f"B = {b + 1}", digits=2) for b in range(most)),
    tuple(
      dataclasses.replace(
        line, cells=line.cells + (None,) * (most - len(line.cells))
      )
      for line in lines
    ),
  )


def _shares(record: Mapping[str, float]) -> list[float]:
  shares = []
  while (p := record.get(f"curriculum/p{len(shares) + 1}")) is not None:
    shares.append(p)
  return shares


def _parts(records: list) -> list[list]:
  """The first record alone, then spans of about equal length."""
  if not records:
    return []
  rest = records[1:]
  edges = np.linspace(0, len(rest), min(_SAMPLED - 1, len(rest)) + 1).astype(int)
  spans = [rest[a:b] for a, b in zip(edges[:-1], edges[1:], strict=True)]
  return [records[:1], *(span for span in spans if span)]
