"""The paper's tables for any rows, every number with its interval and n."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from anysearch_jax.evaluation import comparison, metrics
from anysearch_jax.report import table_rows, tables

TIGHT = (4, 5, 6)  # Budgets of the paper's efficiency table.
PAPER_BUDGET = 5  # Budget of the paper's main, token and ablation tables.
_SAMPLED = 6  # Maximum number of lines of a phase in the sampling table.


def usual_budget(rows: Sequence[table_rows.Shown]) -> int:
  """Returns the paper's budget, or the evaluated budget nearest to it."""
  return min(
    table_rows.budgets(rows), key=lambda b: (abs(b - PAPER_BUDGET), -b)
  )


def main(rows: Sequence[table_rows.Shown]) -> tables.Table:
  """Tabulates EM on every dataset, and their average, at each budget."""
  sets = table_rows.datasets(rows)
  known = table_rows.with_optimum(rows)
  lines = []
  for budget in table_rows.budgets(rows):
    for row in rows:
      parts = [row.cells.get((dataset, budget)) for dataset in sets]
      if not any(parts):
        continue
      cells = [table_rows.cells(part, ("accuracy",))[0] for part in parts]
      if known:
        at = row.table.where(row.table.budget == budget)
        cells += table_rows.cells(at, ("accuracy", "regret"))[1:]
      if len(sets) > 1:
        mean = None
        if all(parts):
          at = row.table.where(row.table.budget == budget)
          found = metrics.over_sets(at, ("accuracy",))
          mean = tables.cell(found["accuracy"], len(at))
        cells.append(mean)
      lines.append(
        tables.Line((str(budget), row.label), tuple(cells), row.index)
      )
  heads = [table_rows.NAMES.get(dataset, ("", dataset)) for dataset in sets]
  regret = [tables.Column("regret")] if known else []
  average = [tables.Column("Avg.", best=True)] if len(sets) > 1 else []
  return tables.Table(
    "main",
    "Exact match on every set at each budget",
    "95 % intervals over questions and trainings; the average weighs sets alike"
    + (", and stands where a row has all sets" if len(sets) > 1 else "")
    + ". † in domain, * out of domain.",
    ("B", "row"),
    tuple(
      [tables.Column(name, group, best=True) for group, name in heads]
      + regret
      + average
    ),
    tuple(lines),
  )


def efficiency(rows: Sequence[table_rows.Shown]) -> tables.Table:
  """Tabulates EM, searches and TP of every dataset at B = 4, 5 and 6."""
  regret = ("regret",) if table_rows.with_optimum(rows) else ()
  return tables.Table(
    "efficiency",
    "Efficiency at B = 4, 5 and 6",
    "EM, searches and TP (correct answers per search) with 95 % intervals over "
    "questions and trainings. Of the three budgets, those that were evaluated.",
    ("set", "B", "row"),
    (
      tables.Column("EM", best=True),
      tables.Column("searches", digits=2),
      tables.Column("TP", best=True),
      *map(tables.Column, regret),
    ),
    tuple(
      tables.Line(
        (dataset, str(budget), row.label),
        tuple(
          table_rows.cells(
            row.cells[dataset, budget],
            ("accuracy", "searches", "tp", *regret),
          )
        ),
        row.index,
      )
      for dataset in table_rows.datasets(rows)
      for budget in TIGHT
      for row in rows
      if (dataset, budget) in row.cells
    ),
  )


def ablation(
  name: str, title: str, rows: Sequence[table_rows.Shown]
) -> tables.Table:
  """Tabulates accuracy, TP and searches at one budget and over all B >= 1."""
  at = usual_budget(rows)
  regret = table_rows.with_optimum(rows)
  shown = {"accuracy": "EM", "tp": "TP", "searches": "searches"}
  shown |= {"regret": "regret"} if regret else {}
  names = tuple(shown)
  lines = []
  some = [budget for budget in table_rows.budgets(rows) if budget >= 1]
  for row in rows:
    one = row.table.where(row.table.budget == at)
    pooled = row.table.where(row.table.budget >= 1)
    cells = table_rows.cells(
      one if table_rows.complete(row, rows, [at]) else None, names
    ) + table_rows.cells(
      pooled if table_rows.complete(row, rows, some) else None, names
    )
    lines.append(tables.Line((row.label,), tuple(cells), row.index))
  return tables.Table(
    f"ablation_{name}",
    title,
    f"At B = {at}, and pooled over every budget from 1 on; all sets together; "
    "a dash where a row lacks a set or a budget of the others. 95 % intervals "
    "over questions and trainings. Whether two lines differ is what the paired "
    "comparison says.",
    ("row",),
    tuple(
      tables.Column(
        column,
        group,
        2 if column == "searches" else 3,
        best=column in ("EM", "TP"),
      )
      for group in (f"B = {at}", "all B ≥ 1")
      for column in shown.values()
    ),
    tuple(lines),
  )


def tokens(rows: Sequence[table_rows.Shown]) -> tables.Table:
  """Tabulates tokens written and read, their sum, and the share read."""
  names = (
    "generated_tokens",
    "retrieved_tokens",
    "total_tokens",
    "retrieval_share",
  )
  lines = [
    tables.Line(
      (dataset, str(budget), row.label),
      tuple(table_rows.cells(row.cells[dataset, budget], names)),
      row.index,
    )
    for dataset in table_rows.datasets(rows)
    for budget in table_rows.budgets(rows)
    for row in rows
    if (dataset, budget) in row.cells
  ]
  return tables.Table(
    "tokens",
    "Tokens of an episode",
    "Means with 95 % intervals over questions and trainings; generated by "
    "the policy, retrieved: all that the environment wrote. The prompt is in "
    "neither.",
    ("set", "B", "row"),
    (
      tables.Column("generated", digits=1),
      tables.Column("retrieved", digits=1),
      tables.Column("total", digits=1),
      tables.Column("retrieved share"),
    ),
    tuple(lines),
  )


def early_stopping(
  ours: str,
  compared: Mapping[str, Sequence[comparison.Comparison]],
  index: Mapping[str, int],
) -> tables.Table:
  """Tabulates discordant counts, losses with unused budget, the net gain."""
  outcomes = (
    "π wrong, other right",
    "of these, π left budget unused",
    "π right, other wrong",
    "net gain",
  )
  lines = []
  for label, found in compared.items():
    for line in found:
      counts = (line.losses, line.losses_unused, line.wins, line.net)
      rates = [tables.Cell(count / line.n) for count in counts]
      rates[-1] = tables.cell(line.difference)
      lines.append(
        tables.Line(
          (label, "all ≥ 1" if line.budget is None else str(line.budget)),
          (
            tables.Cell(line.n),
            *map(tables.Cell, counts),
            *rates,
            tables.Cell(line.detectable),
            tables.cell(line.tp_difference),
            tables.Cell(line.tp_detectable),
          ),
          index[label],
        )
      )
  return tables.Table(
    "early_stopping",
    f"Early stopping: π is {ours}",
    "Rates are of the pairs; the net gain is the difference in accuracy. Its "
    "interval and that of TP are 95 %, over questions and trainings. "
    "Detectable: the smallest true difference found with a probability of "
    "80 %.",
    ("other", "B"),
    (
      tables.Column("pairs", digits=0),
      *(tables.Column(name, "count", digits=0) for name in outcomes),
      *(
        tables.Column(name, "rate", signed=name == outcomes[-1])
        for name in outcomes
      ),
      tables.Column("detectable", "rate"),
      tables.Column("difference", "TP", signed=True),
      tables.Column("detectable", "TP"),
    ),
    tuple(lines),
  )


def sampling(training: Sequence[metrics.Training]) -> tables.Table:
  """Tabulates the budgets that were played over the course of training."""
  spans = [
    (run.label, phase, part)
    for run in training
    for phase in (1, 2)
    for part in _parts(
      [
        r
        for r in run.records
        if r.get("phase") == phase and any(metrics.drawn(r).values())
      ]
    )
  ]
  counts = [
    sum((Counter(metrics.drawn(record)) for record in part), Counter())
    for *_, part in spans
  ]
  budgets = sorted({budget for found in counts for budget in found})
  return tables.Table(
    "sampling",
    "Questions played with each budget",
    "Counts, and their shares, over the rollouts of each span of optimizer "
    "steps; the first line of a phase is its beginning. Runs whose metrics "
    "hold no counts (curriculum/count1, ...) are left out.",
    ("run", "phase", "steps"),
    tuple(
      tables.Column(f"B = {b}", group, digits)
      for group, digits in (("questions", 0), ("share", 2))
      for b in budgets
    ),
    tuple(
      tables.Line(
        (label, "I" if phase == 1 else "II", _steps(part)),
        (
          *(tables.Cell(found[b]) for b in budgets),
          *(tables.Cell(found[b] / found.total()) for b in budgets),
        ),
      )
      for (label, phase, part), found in zip(spans, counts, strict=True)
    ),
  )


def _steps(part: Sequence[Mapping[str, float]]) -> str:
  """Returns the first and last optimizer step of some rollouts, as text."""
  first, last = part[0].get("step", "?"), part[-1].get("step", "?")
  return f"{first}" if first == last else f"{first} to {last}"


def _parts(records: list) -> list[list]:
  """Splits off the first record, and the rest into spans of similar length."""
  if not records:
    return []
  rest = records[1:]
  edges = np.linspace(0, len(rest), min(_SAMPLED - 1, len(rest)) + 1).astype(
    int
  )
  spans = [rest[a:b] for a, b in zip(edges[:-1], edges[1:], strict=True)]
  return [records[:1], *(span for span in spans if span)]
