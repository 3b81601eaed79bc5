"""Rows in the form of the tables: by dataset and budget, in paper order."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from anysearch_jax.evaluation import columns, measures, metrics
from anysearch_jax.report import tables

# The headings of the paper's main table.
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
  """A row in the form of the tables.

  Attributes:
    label: name of the row.
    index: its colour index.
    table: the scored episodes.
    cells: the scored episodes by dataset and budget; no cell is empty.
    failed: by budget, the number of failed episodes, which are left out.
  """

  label: str
  index: int
  table: columns.Columns
  cells: Mapping[tuple[str, int], columns.Columns]
  failed: Mapping[int, int]


def show(row: metrics.Row, index: int) -> Shown:
  """Splits a row's episodes by dataset and budget."""
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
  """Returns the datasets that any row has, in the paper's order."""
  found = {dataset for row in rows for dataset, _ in row.cells}
  return [name for name in NAMES if name in found] + sorted(found - set(NAMES))


def budgets(rows: Sequence[Shown]) -> list[int]:
  """Returns the budgets that any row has, ascending."""
  return sorted({budget for row in rows for _, budget in row.cells})


def with_optimum(rows: Sequence[Shown]) -> bool:
  """Whether the best agent's accuracy is known for any episode."""
  return any(not np.isnan(row.table.optimum).all() for row in rows)


def optimum(rows: Sequence[Shown]) -> dict[int, float]:
  """Returns the best agent's accuracy by budget, on the first row's questions.

  Rows have the same questions, but some have fewer of them.

  Returns:
    Budgets at which it is known for every episode of the row; empty if no row
    has it.
  """
  for row in rows:
    if with_optimum([row]):
      means = {
        budget: float(part.optimum.mean())
        for budget, part in columns.by_budget(row.table).items()
      }
      return {b: mean for b, mean in means.items() if not np.isnan(mean)}
  return {}


def complete(
  row: Shown, rows: Sequence[Shown], budgets: Sequence[int] | None = None
) -> bool:
  """Whether a row has every (dataset, budget) that any of the rows has.

  Only such rows are comparable in a number that covers several datasets or
  budgets.

  Args:
    row: one of `rows`.
    rows: the rows that are shown together.
    budgets: the budgets that the number covers; None: all.
  """
  wanted = {
    cell
    for other in rows
    for cell in other.cells
    if budgets is None or cell[1] in budgets
  }
  return wanted <= set(row.cells)


def lacks(row: Shown, rows: Sequence[Shown]) -> str:
  """Describes the budgets and datasets that only other rows have."""
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
  """Returns the measures `names` of some episodes; the first cell has n."""
  if part is None or not len(part):
    return [None] * len(names)
  found = measures.estimates(part, names)
  return [
    tables.cell(found[name], len(part) if i == 0 else None)
    for i, name in enumerate(names)
  ]
