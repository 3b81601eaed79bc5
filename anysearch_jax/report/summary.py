"""Three sentences on a study: what was compared, what came out, how sure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from anysearch_jax.evaluation import comparison, inference, metrics
from anysearch_jax.report import study as study_lib

# Largest p value of a difference that is called more or less.
_LEVEL = 0.05
# Largest number of rows that a list names.
_MAX_NAMES = 4


def sentences(study: study_lib.Study) -> tuple[str, str, str]:
  """Returns the three sentences.

  Differences are in exact match over all B >= 1 and all datasets. One is called
  more or less if its p value, after Holm's correction over the pairs of its
  group, is below .05; rows of fewer than three trainings are not ranked.
  """
  if not study.rows:
    labels = [run.label for run in study.training]
    return (
      f"{_listed(labels)} {'were' if len(labels) > 1 else 'was'} not evaluated "
      f"yet; the training of {labels[0]} has logged "
      f"{_count(len(study.training[0].records), 'rollout')}.",
      "Below is what was logged up to now.",
      "Only an evaluation tells the accuracy at each budget.",
    )
  if len(study.rows) == 1:
    result, certainty = _describe_row(study.rows[0])
  else:
    result, certainty = _describe_differences(study)
  if failed := sum(row.whole.failed for row in study.rows):
    certainty += f"; left out: {_count(failed, 'failed episode')}"
  return _describe_questions(study.rows), f"{result}.", f"{certainty}."


def _describe_questions(rows: Sequence[metrics.Row]) -> str:
  """Says which questions the rows were asked, under which budgets."""
  counts = [len(np.unique(row.columns.question)) for row in rows]
  sets = sorted({name for row in rows for name in row.columns.datasets})
  budgets = sorted({budget for row in rows for budget in row.by_budget})
  alike = len(set(counts)) == 1 and all(
    study_lib.is_complete(row, rows) for row in rows
  )
  number = _count(max(counts), "question")
  if len(rows) > 1:
    number = f"the same {number}" if alike else f"up to {number}"
  return (
    f"{_listed([row.label for row in rows])} "
    f"{'were' if len(rows) > 1 else 'was'} asked {number} of "
    f"{sets[0] if len(sets) == 1 else f'{len(sets)} sets'}, each under "
    f"{'a budget' if len(budgets) == 1 else 'budgets'} of "
    f"{_listed(list(map(str, budgets)), len(budgets))} searches"
    f"{'' if alike else '; two rows are compared on what both were asked'}."
  )


def _describe_row(row: metrics.Row) -> tuple[str, str]:
  """Returns the result of a study of one row, and how certain it is."""
  points = row.curve.points
  result = "No budget has an accuracy over all sets"
  if points:
    smallest = min(points)
    largest = max(points)
    first = points[smallest]
    last = points[largest]
    result = (
      f"Its accuracy is {first.accuracy.value:.3f} at a budget of {smallest}"
    )
    if largest > smallest:
      result += f" and {last.accuracy.value:.3f} at {largest}"
    result += f", where it makes {last.searches.value:.2f} searches on average"
  trainings = "and" if len(row.columns.runs) > 1 else "but not"
  return result, _describe_intervals(
    "this accuracy",
    [part.accuracy for part in points.values()],
    f" and cover other questions {trainings} other trainings",
  )


def _describe_differences(study: study_lib.Study) -> tuple[str, str]:
  """Returns how the system differs from other rows, and how certain that is."""
  pooled = {
    (d.theirs, d.measure): d
    for differences in study.differences.values()
    for d in differences
    if (d.ours, d.dataset, d.budget) == (study.system, None, None)
  }
  rows_by_outcome: dict[str, list[str]] = {
    "is more accurate than": [],
    "is less accurate than": [],
    "does not differ measurably in accuracy from": [],
    "is not ranked against": [],
    "cannot be compared with": [],
  }
  accuracies = []
  for row in study.rows[1:]:
    accuracy = pooled.get((row.label, "accuracy"))
    if accuracy is None or (gain := accuracy.estimate.value) is None:
      rows_by_outcome["cannot be compared with"].append(row.label)
      continue
    accuracies.append(accuracy)
    outcome = "does not differ measurably in accuracy from"
    if accuracy.adjusted is None:
      outcome = "is not ranked against"
    elif _is_resolved(accuracy):
      outcome = f"is {'more' if gain > 0 else 'less'} accurate than"
    text = f"{row.label} ({'+' if gain > 0 else '−'}{abs(gain):.3f}"
    searches = pooled[row.label, "searches"]
    if searches.adjusted is None or _is_resolved(searches):
      if difference := searches.estimate.value:
        word = "fewer" if difference < 0 else "more"
        text += f", {abs(difference):.2f} {word} searches"
    rows_by_outcome[outcome].append(f"{text})")
  clauses = [
    f"{outcome} {_listed(rows)}"
    for outcome, rows in rows_by_outcome.items()
    if rows
  ]
  ranked = [d.adjusted is not None for d in accuracies]
  notes = ""
  if any(ranked):
    notes += "; “more” and “less” have p < .05 after Holm’s correction"
  if not all(ranked):
    notes += (
      "; rows of fewer than three trainings are not ranked, because other "
      "trainings may differ more"
    )
  return f"{study.system} {'; it '.join(clauses)}", _describe_intervals(
    "these differences, over all budgets from 1 on,",
    [d.estimate for d in accuracies],
    notes,
  )


def _is_resolved(difference: comparison.Difference) -> bool:
  return difference.adjusted is not None and difference.adjusted < _LEVEL


def _describe_intervals(
  subject: str, estimates: Iterable[inference.Estimate], notes: str
) -> str:
  """Says how wide the intervals of a subject are, with notes behind."""
  widths = [
    high - low
    for _, low, high in estimates
    if low is not None and high is not None
  ]
  if not widths:
    return "There is too little to make an interval"
  return (
    f"The 95 % intervals of {subject} are at most {max(widths):.2f} wide{notes}"
  )


def _count(number: int, noun: str) -> str:
  return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _listed(texts: Sequence[str], limit: int = _MAX_NAMES) -> str:
  """Joins texts; of those beyond `limit` it gives only the number."""
  *first, last = texts
  if len(texts) > limit:
    first = list(texts[:limit])
    last = f"{len(texts) - limit} more"
  return f"{', '.join(first)} and {last}" if first else last
