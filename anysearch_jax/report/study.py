"""Measures the rows of a study: alone, and against each other."""

from __future__ import annotations

import dataclasses
import pathlib
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from anysearch_jax import budgets as budgets_lib
from anysearch_jax import config as config_lib
from anysearch_jax.evaluation import comparison, metrics

with (pathlib.Path(__file__).parent / "report.toml").open("rb") as file:
  WORDS = tomllib.load(file)


@dataclasses.dataclass(frozen=True)
class Training:
  """A training run: its rollout records, in order, and its resolved config."""

  label: str
  records: tuple[Mapping[str, Any], ...]
  config: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def datasets(rows: Sequence[metrics.Row]) -> list[str]:
  """Returns the datasets that any row has, in the paper's order."""
  paper_order = WORDS["sets"]
  present = {dataset for row in rows for dataset, _ in row.cells}
  ordered = [name for name in paper_order if name in present]
  return ordered + sorted(present.difference(paper_order))


def budgets(rows: Sequence[metrics.Row]) -> list[int]:
  """Returns the budgets that any row has, ascending."""
  return sorted({budget for row in rows for _, budget in row.cells})


def know_optimum(rows: Sequence[metrics.Row]) -> bool:
  """Whether the best agent's accuracy is known for any episode."""
  return any(not np.isnan(row.whole.table.optimum).all() for row in rows)


def is_complete(
  row: metrics.Row,
  rows: Sequence[metrics.Row],
  budgets: Iterable[int] | None = None,
) -> bool:
  """Whether a row has every (dataset, budget) that any of `rows` has.

  Only such rows are comparable in a number that covers several datasets or
  budgets.

  Args:
    row: the row.
    rows: the rows to compare.
    budgets: the budgets that the number covers; None: all.
  """
  cells = {cell for other in rows for cell in other.cells}
  if budgets is not None:
    cells = {cell for cell in cells if cell[1] in budgets}
  return cells <= set(row.cells)


def missing_cells(row: metrics.Row, rows: Sequence[metrics.Row]) -> str:
  """Describes the budgets and datasets that only other rows have."""
  missing_budgets = [str(b) for b in budgets(rows) if b not in budgets([row])]
  missing_sets = [s for s in datasets(rows) if s not in datasets([row])]
  phrases = []
  if missing_budgets:
    phrases.append(f"B = {', '.join(missing_budgets)}")
  if len(missing_sets) > 1:
    phrases.append(f"the sets {', '.join(missing_sets)}")
  else:
    phrases += missing_sets
  if not phrases and not is_complete(row, rows):
    phrases.append("some sets at some budgets")
  return " and ".join(phrases)


@dataclasses.dataclass(frozen=True, eq=False)
class Study:
  """The measurements of a study.

  Attributes:
    system: label of the first row, or of the first training run.
    trained: the largest budget of the system's training.
    rows: the rows; the first is the system.
    groups: by file name, the title and the rows that are shown together; the
      system is first.
    index: colour index of each row and training run.
    training: the training runs of the rows.
    prices: the prices that the episodes were charged; None: unknown.
    compared: by label, the pairs of the system with each other row, and the
      paper's comparison of them.
    differences: by group of two or more rows, every pair in every measure.
  """

  system: str
  trained: int
  rows: Sequence[metrics.Row]
  groups: Mapping[str, tuple[str, Sequence[metrics.Row]]]
  index: Mapping[str, int]
  training: Sequence[Training]
  prices: budgets_lib.Prices | None
  compared: Mapping[
    str, tuple[comparison.Pairs, Sequence[comparison.Comparison]]
  ]
  differences: Mapping[str, Sequence[comparison.Difference]]


def measure(
  rows: Sequence[metrics.Row],
  training: Sequence[Training] = (),
  *,
  groups: Mapping[str, str] | None = None,
  prices: budgets_lib.Prices | None = None,
  configured: budgets_lib.Prices | None = None,
) -> Study:
  """Measures rows on their own and against each other.

  Args:
    rows: the first is the system under test; empty if nothing was evaluated
      yet, then the study is of the training runs only.
    training: the training runs of the rows.
    groups: by label, the ablation that the row belongs to: one of report.toml,
      or any name. If empty, all rows are one group.
    prices: prices for costs; None keeps the costs recorded in the episodes.
    configured: the prices of these recorded costs, if they are known.

  Raises:
    ValueError: every episode failed; there is neither a row nor a training run;
      a label occurs twice; a label of `groups` is not a row; or rows were
      measured on different questions.
  """
  groups = groups or {}
  labels = [row.label for row in rows]
  if not labels and not training:
    raise ValueError(
      "Found no row and no training run; name at least the system under test."
    )
  if len(set(labels)) < len(labels):
    raise ValueError(f"Found two rows of one label in {labels}; rename one.")
  for label, title in groups.items():
    if label not in labels:
      raise ValueError(
        f"Table {title!r} names {label!r}, which is not a row; expected one "
        f"of {labels}."
      )
  if rows and not budgets(rows):
    raise ValueError(
      "Found only failed episodes; expected one that ended. The same "
      "anysearch evaluate plays them again once engine and retriever answer."
    )
  if prices:
    rows = [
      dataclasses.replace(row, table=row.columns.priced(prices)) for row in rows
    ]
  system = labels[0] if rows else training[0].label
  row_groups = _groups(rows, groups)
  all_labels = [*labels, *(run.label for run in training)]
  costs_nothing = not any(np.nansum(row.columns.cost) for row in rows)
  compared_measures = [
    m for m in comparison.MEASURES if not (costs_nothing and m == "cost")
  ]
  compared = {}
  for row in rows[1:]:
    pairs = comparison.pair(rows[0], row)
    compared[row.label] = pairs, comparison.compare(pairs)
  return Study(
    system=system,
    trained=trained_budget(system, training),
    rows=rows,
    groups=row_groups,
    index={
      label: place for place, label in enumerate(dict.fromkeys(all_labels))
    },
    training=training,
    prices=prices or configured,
    compared=compared,
    differences={
      name: comparison.pairwise(members, compared_measures)
      for name, (_, members) in row_groups.items()
      if len(members) > 1
    },
  )


def trained_budget(label: str, training: Sequence[Training]) -> int:
  """Returns the largest training budget; the default one if unknown."""
  runs = [run for run in training if run.label == label] or training[:1]
  default = config_lib.CurriculumConfig()
  curriculum = runs[0].config.get("curriculum", {}) if runs else {}
  fixed = curriculum.get("fixed_budget", default.fixed_budget)
  largest = curriculum.get("max_budget", default.max_budget)
  return fixed if fixed >= 0 else largest


def _groups(
  rows: Sequence[metrics.Row], groups: Mapping[str, str]
) -> dict[str, tuple[str, list[metrics.Row]]]:
  """Returns file name -> (title, rows), with the system first in each."""
  if not rows:
    return {}
  members: dict[str, list[metrics.Row]] = {}
  for row in rows[1:] if groups else ():
    members.setdefault(groups.get(row.label, "other"), [rows[0]]).append(row)
  if not members:
    return {"rows": ("All rows", list(rows))}
  named_groups: dict[str, tuple[str, list[metrics.Row]]] = {}
  for title, group_rows in members.items():
    name = re.sub(r"[^\w-]+", "_", title, flags=re.ASCII)[:40]
    name = f"{name}_{len(named_groups)}" if name in named_groups else name
    named_groups[name] = (WORDS["groups"].get(title, title), group_rows)
  return named_groups
