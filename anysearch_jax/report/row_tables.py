"""Tables beyond the paper's: measures by budget, budget use, failures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from anysearch_jax.evaluation import columns, intervals, metrics
from anysearch_jax.evaluation import curves as curves_lib
from anysearch_jax.evaluation import memory_use as memory_use_lib
from anysearch_jax.evaluation import verification as verification_lib
from anysearch_jax.report import table_rows, tables

_OVERVIEW = {
  "accuracy": "EM",
  "regret": "regret",
  "searches": "searches",
  "tp": "TP",
}


_BEST = "the optimum, computed"
REGRET = (
  "Regret: the accuracy of the optimum, the best agent of the generated world "
  "(docs/quickstart.md), minus that of the row, on the same questions; the "
  "optimum is computed, not played."
)


def overview(
  rows: Sequence[table_rows.Shown],
  curves: Sequence[curves_lib.Curve],
  means: Mapping[str, Mapping[str, intervals.Estimate]],
) -> tables.Table:
  """Tabulates exact match, regret, searches and productivity by budget.

  Args:
    rows: all rows.
    curves: the curve of each row over all its datasets.
    means: by label, the averages of the rows that are complete (see
      `table_rows.complete`).
  """
  at = table_rows.budgets(rows)
  points = {
    (curve.label, point.budget): point
    for curve in curves
    for point in curve.points
  }

  def cell(name: str, row: table_rows.Shown, budget: int) -> tables.Cell | None:
    if not table_rows.complete(row, rows, [budget]):
      return None
    point = points.get((row.label, budget))
    return None if point is None else tables.cell(getattr(point, name))

  known = table_rows.with_optimum(rows)
  lines = []
  for name, title in _OVERVIEW.items():
    if name == "regret" and not known:
      continue
    lines += [
      tables.Line(
        (title, row.label),
        (
          *(cell(name, row, budget) for budget in at),
          tables.cell(means[row.label][name]) if row.label in means else None,
        ),
        row.index,
      )
      for row in rows
    ]
    if name == "accuracy" and known:
      lines.append(_optimum((title, _BEST), table_rows.optimum(rows), at))
  return tables.Table(
    "overview",
    "Every row at every budget",
    "EM is exact match; TP, tool productivity, is correct answers per search "
    "and not defined without any search. 95 % intervals, over questions "
    "and trainings; sets weigh alike. The mean is over all budgets, TP's over "
    "B ≥ 1. A dash where a row lacks a set or a budget that another row has: "
    "its number would be of other episodes." + (f" {REGRET}" if known else ""),
    ("measure", "row"),
    (*(tables.Column(f"B = {b}") for b in at), tables.Column("mean")),
    tuple(lines),
  )


def _optimum(
  keys: tuple[str, ...], found: Mapping[int, float], at: Sequence[int]
) -> tables.Line:
  """Returns the line of the best agent, with its mean over all budgets."""
  cells = [tables.Cell(found.get(budget)) for budget in at]
  complete = set(at) <= set(found)
  mean = sum(found[b] for b in at) / len(at) if complete else None
  return tables.Line(keys, (*cells, tables.Cell(mean)))


_SCORERS = {
  "accuracy": ("EM", "ours"),
  "f1": ("F1", "ours"),
  "official_accuracy": ("EM", "official script"),
  "official_f1": ("F1", "official script"),
}


def scorers(rows: Sequence[table_rows.Shown]) -> tables.Table:
  """Tabulates our scores next to those of the datasets' published scripts."""
  names, sets = tuple(_SCORERS), table_rows.datasets(rows)

  def cells(
    dataset: str, budget: int, row: table_rows.Shown
  ) -> list[tables.Cell | None]:
    if dataset != "average":
      return table_rows.cells(row.cells.get((dataset, budget)), names)
    if not table_rows.complete(row, rows, [budget]):
      return [None]
    part = row.table.where(row.table.budget == budget)
    found = metrics.over_sets(part, names)
    n = [len(part), *[None] * (len(names) - 1)]
    return [tables.cell(found[name], k) for name, k in zip(names, n)]

  found = {
    (dataset, str(budget), row.label): (cells(dataset, budget, row), row.index)
    for dataset in [*sets, *(["average"] if len(sets) > 1 else [])]
    for budget in table_rows.budgets(rows)
    for row in rows
  }
  return tables.Table(
    "scorers",
    "Our scores and those of the published scripts",
    "EM and F1 of the paper, and what the evaluation script of each set gives "
    "the same answers (docs/evaluation.md has the differences). 95 % intervals "
    "over questions and trainings; the average weighs sets alike. Sets without "
    "a script are left out.",
    ("set", "B", "row"),
    tuple(tables.Column(*head, best=True) for head in _SCORERS.values()),
    tuple(
      tables.Line(keys, tuple(line), index)
      for keys, (line, index) in found.items()
      if line[-1] is not None and line[-1].value is not None
    ),
  )


def formats(rows: Sequence[table_rows.Shown]) -> tables.Table:
  """Tabulates well-formed, truncated, invalid, over-budget, failed episodes."""
  names = ("format_rate", "truncated_rate", "invalid_rate", "violation_rate")
  return tables.Table(
    "formats",
    "Format and failures",
    "Rates among scored episodes with 95 % intervals over questions and "
    "trainings. Over budget: it asked for a search that it did not have. "
    "Failed (engine or retriever out of reach): a count, in no rate and no "
    "mean.",
    ("row", "B"),
    (
      tables.Column("well formed"),
      tables.Column("truncated"),
      tables.Column("invalid"),
      tables.Column("over budget"),
      tables.Column("failed", digits=0),
    ),
    tuple(
      tables.Line(
        (row.label, str(budget)),
        (
          *table_rows.cells(row.table.where(row.table.budget == budget), names),
          tables.Cell(failed),
        ),
        row.index,
      )
      for row in rows
      for budget, failed in row.failed.items()
    ),
  )


def hops(rows: Sequence[table_rows.Shown]) -> tables.Table:
  """Tabulates accuracy by hops at every budget; no line if unknown."""
  at = table_rows.budgets(rows)
  lines = []
  for row in rows:
    for count, part in columns.by_hops(row.table).items():
      by_budget = columns.by_budget(part)
      cells = [table_rows.cells(by_budget.get(b), ("accuracy",))[0] for b in at]
      lines.append(
        tables.Line((row.label, str(count)), tuple(cells), row.index)
      )
  return tables.Table(
    "hops",
    "Accuracy by hops",
    "Exact match with intervals over questions and trainings.",
    ("row", "hops"),
    tuple(tables.Column(f"B = {b}", digits=2) for b in at),
    tuple(lines),
  )


def memory_use(
  found: Mapping[str, memory_use_lib.Found], index: Mapping[str, int]
) -> tables.Table:
  """Tabulates P(first fact searched | remembered); no line if unknown."""
  at = sorted({b for row in found.values() for by in row.values() for b in by})
  return tables.Table(
    "memory_use",
    "Searching what it remembers, by how reliable that is",
    "How often the first fact of a chain was searched although memory holds "
    "it, by the probability that such a memory is right. Intervals over "
    "questions and trainings.",
    ("row", "memory is right"),
    tuple(tables.Column(f"B = {b}", digits=2) for b in at),
    tuple(
      tables.Line(
        (label, f"{reliability:g}"),
        tuple(tables.cell(by[b]) if b in by else None for b in at),
        index[label],
      )
      for label, row in found.items()
      for reliability, by in row.items()
    ),
  )


def verification(
  found: Mapping[str, verification_lib.Found], index: Mapping[str, int]
) -> tables.Table:
  """Tabulates how often what a passage says is checked by another search."""
  at = sorted({b for row in found.values() for by in row.values() for b in by})
  return tables.Table(
    "verification",
    "Checking what a passage says",
    "How often another search followed although the policy could have "
    "answered: after the first passages that held a right answer, and, about "
    "the same entity, after a search that found two values of a fact. Only "
    "where a search was left, in episodes that ended with an answer. 95 % "
    "intervals over questions and trainings.",
    ("found", "row"),
    tuple(tables.Column(f"B = {b}", digits=2) for b in at),
    tuple(
      tables.Line(
        (kind, label),
        tuple(tables.cell(by[b]) if b in by else None for b in at),
        index[label],
      )
      for kind in verification_lib.KINDS
      for label, row in found.items()
      if (by := row.get(kind))
    ),
  )


def budget_use(
  rows: Sequence[table_rows.Shown],
) -> tables.Table:
  """Tabulates the shares of episodes with 0, 1, ... searches by budget."""
  use = {row.label: metrics.search_shares(row.table) for row in rows}
  index = {row.label: row.index for row in rows}
  most = max(
    (len(c) for found in use.values() for c in found.values()), default=0
  )
  lines = [
    tables.Line(
      (label, str(budget)),
      tuple(
        tables.cell(shares[k]) if k < len(shares) else None for k in range(most)
      ),
      index[label],
    )
    for label, found in use.items()
    for budget, shares in found.items()
  ]
  return tables.Table(
    "budget_use",
    "Searches made of each budget",
    "Shares of scored episodes with 95 % intervals over questions and "
    "trainings.",
    ("row", "B"),
    tuple(tables.Column(str(k), "searches made", 2) for k in range(most)),
    tuple(lines),
  )


def _rate(count: int, n: int) -> tables.Cell:
  return tables.cell(intervals.wilson(count, n))


_KINDS = {
  "continue": "answered with budget left",
  "stop": "searched",
}
_AXES = {
  "by_hops": "hops",
  "by_budget_left": "budget left",
  "by_searches_before": "searches before",
}


def search_values(
  found: Mapping[str, Mapping[str, Any]], index: Mapping[str, int]
) -> tables.Table:
  """Tabulates the value of one more search, measured by `branching`.

  Args:
    found: by label, the result of `branch_values.summary`.
    index: colour index of each label.
  """
  lines = []
  for label, summary in found.items():
    for kind, name in _KINDS.items():
      whole = summary.get(kind, {})
      parts = {"all": whole} if whole else {}
      for axis, words in _AXES.items():
        parts |= {f"{words} {v}": p for v, p in whole.get(axis, {}).items()}
      lines += [
        tables.Line((label, name, part_name), _values(part), index[label])
        for part_name, part in parts.items()
      ]
  return tables.Table(
    "worth",
    "What one more search was worth",
    "From other ends of stored episodes (launch.branch), after turns that ask "
    "for a search: exact match if it is granted minus exact match if it is "
    "refused, and minus that of the stored answer. As it asks: the mean over "
    "the searches that the policy asks for, with its 95 % interval over "
    "questions; gained and lost: the shares of them that are right only if "
    "granted, and only if refused. At all cuts: each cut alike, also where the "
    "policy seldom asks, from the least to the most that cuts without a search "
    "allow. Asks: the probability of asking at a cut; n: cuts.",
    ("row", "the episode", "where"),
    (
      tables.Column("as it asks", "granted − refused", signed=True),
      tables.Column("gained", "granted − refused", digits=2),
      tables.Column("lost", "granted − refused", digits=2),
      tables.Column("as it asks", "granted − answered", signed=True),
      tables.Column("least", "at all cuts, − refused", signed=True),
      tables.Column("most", "at all cuts, − refused", signed=True),
      tables.Column("least", "at all cuts, − answered", signed=True),
      tables.Column("most", "at all cuts, − answered", signed=True),
      tables.Column("asks", "cuts", digits=2),
      tables.Column("reached", "cuts", digits=2),
    ),
    tuple(lines),
  )


def _values(part: Mapping[str, Any]) -> tuple[tables.Cell | None, ...]:
  """Returns the cells of one part of a summary."""

  def mean(name: str) -> tables.Cell | None:
    if name not in part:
      return None
    n = part["cuts"] if name == "worth" else None
    return tables.cell(intervals.Estimate(**part[name]), n)

  def bounds(name: str) -> list[tables.Cell]:
    found = part.get(name, {})
    return [tables.Cell(found.get(end)) for end in ("low", "high")]

  return (
    mean("worth"),
    tables.Cell(part["gained"]),
    tables.Cell(part["lost"]),
    mean("gain"),
    *bounds("worth_bounds"),
    *bounds("gain_bounds"),
    mean("asks"),
    _rate(part["cuts_reached"], part["cuts"])
    if "cuts_reached" in part
    else None,
  )
