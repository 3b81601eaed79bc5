"""Which played episodes are imitated: right ones, the cheapest first.

An episode is a row of `records.episode`. SlimSearcher trains on the Pareto
front of searches and accuracy; so does `chosen` with `pareto`.
"""

from __future__ import annotations

import collections
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from anysearch_jax.demonstrations import evidence_chains

Row = Mapping[str, Any]


class Cell(NamedTuple):
  """The episodes of a dataset at a budget: those kept, and why others are not.

  Attributes:
    kept: number of kept episodes.
    searches: their searches.
    tokens: tokens that the policy wrote in them.
    dropped: number of the others by reason.
  """

  kept: int
  searches: int
  tokens: int
  dropped: Mapping[str, int]


def chosen(rows: Iterable[Row], *, pareto: bool) -> tuple[list[Row], list[str]]:
  """Returns the episodes to imitate, one for each question and budget.

  Args:
    rows: played episodes.
    pareto: whether an episode is left out if the question was answered with
      fewer searches at a lower budget.

  Returns:
    The kept rows in their order, and for each row why it is left out ("": it
    is kept).
  """
  rows = list(rows)
  reasons = [_fault(row) for row in rows]
  ordered = sorted(
    (_budget(row), row["searches"], row["generated_tokens"], place)
    for place, row in enumerate(rows)
    if not reasons[place]
  )
  chosen_cells: set[tuple[str, tuple[int, str]]] = set()
  fewest: dict[str, int] = collections.defaultdict(lambda: 1 << 30)
  for budget, searches, _, place in ordered:
    question = rows[place]["question_id"]
    if (question, budget) in chosen_cells:
      reasons[place] = "costlier than another"
    elif pareto and fewest[question] < searches:
      reasons[place] = "right with fewer searches at a lower budget"
    else:
      chosen_cells.add((question, budget))
      fewest[question] = min(fewest[question], searches)
  kept_rows = [row for row, reason in zip(rows, reasons) if not reason]
  return kept_rows, reasons


def _fault(row: Row) -> str:
  """Returns why an episode must not be imitated; "" if it may be."""
  if row["failed"]:
    return "failed"
  if row["answer"] is None:
    return "no answer"
  if not row["em"]:
    is_unknown = row["answer"] == evidence_chains.UNKNOWN
    return "answer not found" if is_unknown else "wrong answer"
  return "malformed" if row["format"] == 0 else ""


def _budget(row: Row) -> tuple[int, str]:
  """Returns a budget as a key: its searches first, then its other caps."""
  return row["budget"], str(row.get("caps", ""))


def counted(
  rows: Iterable[Row], reasons: Iterable[str]
) -> dict[tuple[str, int], Cell]:
  """Returns the counts by dataset and number of searches of the budget.

  Args:
    rows: played episodes.
    reasons: for each of them, as `chosen` returns them.
  """
  kept_counts: Counter[tuple[str, int]] = Counter()
  searches: Counter[tuple[str, int]] = Counter()
  tokens: Counter[tuple[str, int]] = Counter()
  dropped: dict[tuple[str, int], Counter[str]] = {}
  for row, reason in zip(rows, reasons, strict=True):
    key = row["dataset"], row["budget"]
    reasons_of_cell = dropped.setdefault(key, Counter())
    if reason:
      reasons_of_cell[reason] += 1
      continue
    kept_counts[key] += 1
    searches[key] += row["searches"]
    tokens[key] += row["generated_tokens"]
  return {
    key: Cell(kept_counts[key], searches[key], tokens[key], dict(dropped[key]))
    for key in sorted(dropped)
  }
