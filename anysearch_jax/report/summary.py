"""Three sentences on a study: what was compared, what came out, how sure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from anysearch_jax.evaluation import comparison, inference, metrics
from anysearch_jax.report import study as study_lib

_LEVEL = 0.05  # Of a difference that is called more or less.
_TOLD = 4  # Rows that are named at once, at most.


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
    found, how_sure = _of_one(study.rows[0])
  else:
    found, how_sure = _of_differences(study)
  if failed := sum(row.whole.failed for row in study.rows):
    how_sure += f"; left out: {_count(failed, 'failed episode')}"
  return _compared(study.rows), f"{found}.", f"{how_sure}."


def _compared(rows: Sequence[metrics.Row]) -> str:
  asked = [len(np.unique(row.columns.question)) for row in rows]
  sets = sorted({name for row in rows for name in row.columns.datasets})
  at = sorted({budget for row in rows for budget in row.by_budget})
  alike = len(set(asked)) == 1 and all(
    study_lib.is_complete(row, rows) for row in rows
  )
  number = _count(max(asked), "question")
  if len(rows) > 1:
    number = f"the same {number}" if alike else f"up to {number}"
  return (
    f"{_listed([row.label for row in rows])} "
    f"{'were' if len(rows) > 1 else 'was'} asked {number} of "
    f"{sets[0] if len(sets) == 1 else f'{len(sets)} sets'}, each under "
    f"{'a budget' if len(at) == 1 else 'budgets'} of "
    f"{_listed(list(map(str, at)), len(at))} searches"
    f"{'' if alike else '; two rows are compared on what both were asked'}."
  )


def _of_one(row: metrics.Row) -> tuple[str, str]:
  found, points = "No budget has an accuracy over all sets", row.curve.points
  if points:
    (least, first), (most, last) = min(points.items()), max(points.items())
    found = f"Its accuracy is {first.accuracy.value:.3f} at a budget of {least}"
    if most > least:
      found += f" and {last.accuracy.value:.3f} at {most}"
    found += f", where it makes {last.searches.value:.2f} searches on average"
  covered = "and" if len(row.columns.runs) > 1 else "but not"
  return found, _sure(
    "this accuracy",
    [part.accuracy for part in points.values()],
    f" and cover other questions {covered} other trainings",
  )


def _of_differences(study: study_lib.Study) -> tuple[str, str]:
  whole = {
    (d.theirs, d.measure): d
    for found in study.differences.values()
    for d in found
    if (d.ours, d.dataset, d.budget) == (study.system, None, None)
  }
  said: dict[str, list[str]] = {
    "is more accurate than": [],
    "is less accurate than": [],
    "does not differ measurably in accuracy from": [],
    "is not ranked against": [],
    "cannot be compared with": [],
  }

  def resolved(difference: comparison.Difference) -> bool:
    return difference.adjusted is not None and difference.adjusted < _LEVEL

  told = []
  for row in study.rows[1:]:
    difference = whole.get((row.label, "accuracy"))
    if difference is None or (gain := difference.estimate.value) is None:
      said["cannot be compared with"].append(row.label)
      continue
    told.append(difference)
    outcome = "does not differ measurably in accuracy from"
    if difference.adjusted is None:
      outcome = "is not ranked against"
    elif resolved(difference):
      outcome = f"is {'more' if gain > 0 else 'less'} accurate than"
    text = f"{row.label} ({'+' if gain > 0 else '−'}{abs(gain):.3f}"
    made = whole[row.label, "searches"]
    if (made.adjusted is None or resolved(made)) and (
      more := made.estimate.value
    ):
      text += f", {abs(more):.2f} {'fewer' if more < 0 else 'more'} searches"
    said[outcome].append(f"{text})")
  clauses = [
    f"{outcome} {_listed(others)}" for outcome, others in said.items() if others
  ]
  ranked = [d.adjusted is not None for d in told]
  covered = ""
  if any(ranked):
    covered += "; “more” and “less” have p < .05 after Holm’s correction"
  if not all(ranked):
    covered += (
      "; rows of fewer than three trainings are not ranked, because other "
      "trainings may differ more"
    )
  return f"{study.system} {'; it '.join(clauses)}", _sure(
    "these differences, over all budgets from 1 on,",
    [d.estimate for d in told],
    covered,
  )


def _sure(of: str, found: Iterable[inference.Estimate], covered: str) -> str:
  """Says how wide the intervals are."""
  widths = [
    high - low for _, low, high in found if low is not None and high is not None
  ]
  if not widths:
    return "There is too little to make an interval"
  return (
    f"The 95 % intervals of {of} are at most {max(widths):.2f} wide{covered}"
  )


def _count(number: int, noun: str) -> str:
  return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _listed(texts: Sequence[str], most: int = _TOLD) -> str:
  """Joins texts; beyond the first `most` it gives their number only."""
  *first, last = texts
  if len(texts) > most:
    first, last = list(texts[:most]), f"{len(texts) - most} more"
  return f"{', '.join(first)} and {last}" if first else last
