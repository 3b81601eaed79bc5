"""Rows as tables show them: by dataset and budget, in the paper's order."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from anysearch_jax.evaluation import columns, measures, metrics
from anysearch_jax.report import tables

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


@dataclasses.dataclass(frozen=True)
class Shown:
  """A row as tables show it: label, colour and its numbers.

  Attributes:
    table: the scored episodes.
    cells: those by dataset and budget; none is empty.
    failed: by budget, how many were left out.
  """

  label: str
  index: int
  table: columns.Columns
  cells: Mapping[tuple[str, int], columns.Columns]
  failed: Mapping[int, int]


def show(row: metrics.Row, index: int) -> Shown:
  """A row with its episodes by dataset and budget."""
  table = row.columns.scored()
  return Shown(
    row.label,
    index,
    table,
    {
      (dataset, budget): part
      for dataset, found in columns.by_dataset(table).items()
      for budget, part in columns.by_budget(found).items()
    },
    {
      budget: len(part) - len(part.scored())
      for budget, part in columns.by_budget(row.columns).items()
    },
  )


def datasets(rows: Sequence[Shown]) -> list[str]:
  """The sets that any row has, in the paper's order."""
  found = {dataset for row in rows for dataset, _ in row.cells}
  return [name for name in NAMES if name in found] + sorted(found - set(NAMES))


def budgets(rows: Sequence[Shown]) -> list[int]:
  """The budgets that any row has, ascending."""
  return sorted({budget for row in rows for _, budget in row.cells})


def complete(
  row: Shown, rows: Sequence[Shown], budgets: Sequence[int] | None = None
) -> bool:
  """Whether a row has every set at every budget that any of the rows has.

  Only such rows can be compared in a number over several sets or budgets.

  Args:
    row: one of `rows`.
    rows: those that are shown together.
    budgets: those that the number is over; None: all.
  """
  wanted = {
    cell
    for other in rows
    for cell in other.cells
    if budgets is None or cell[1] in budgets
  }
  return wanted <= set(row.cells)


def lacks(row: Shown, rows: Sequence[Shown]) -> str:
  """Names the budgets and sets that other rows have and a row has not."""
  ours = [row]
  at = [f"{b}" for b in budgets(rows) if b not in budgets(ours)]
  sets = [name for name in datasets(rows) if name not in datasets(ours)]
  found = [f"B = {', '.join(at)}"] if at else []
  if sets:
    found.append(f"the sets {', '.join(sets)}" if len(sets) > 1 else sets[0])
  if not found and not complete(row, rows):
    found.append("some sets at some budgets")
  return " and ".join(found)


def cells(
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
