"""Splits the variance of a number into questions, seeds and trainings."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from anysearch_jax.evaluation import columns, inference, intervals, measures


@dataclasses.dataclass(frozen=True)
class Split:
  """Where the uncertainty of a measure comes from; None where unknown.

  The squares of the three errors add up to about that of the whole.

  Attributes:
    estimate: the measure, pooled over all budgets (TP: B >= 1).
    trainings, seeds, questions: numbers of trainings, of evaluation seeds of a
      training, and of questions.
    from_questions: standard error from the choice of questions; with one
      training and one seed it contains that of seeds.
    from_seeds: standard error from what the policy samples; with several
      trainings it contains how they differ on single questions.
    from_trainings: standard error from the choice of trainings.
    between: standard deviation between trainings, free of what questions and
      seeds add to it.
  """

  estimate: intervals.Estimate
  trainings: int
  seeds: int
  questions: int
  from_questions: float | None
  from_seeds: float | None
  from_trainings: float | None
  between: float | None


def split(measured: columns.Measured, names: Sequence[str]) -> dict[str, Split]:
  """Splits the variance of each measure; `names` are keys of MEASURES."""
  table = columns.of(measured).scored()
  if not len(table):
    return {}
  found = measures.sums(table, names)
  estimates = measures.estimates(table, names)
  parts = found.linearised(names)
  whole = inference.variance(parts)
  runs, (_, questions) = len(found.runs), found.values.shape[:2]
  by_run = [len(np.unique(p.seed)) for p in columns.by_run(table).values()]
  seeds = max(by_run)
  drawn = _seeds(table, names) if min(by_run) > 1 else None
  out = {}
  for place, name in enumerate(names):
    asked, inner = whole.questions[place], whole.interaction[place]
    apart = whole.trainings[place]
    if runs == 1:
      inner = None if drawn is None else drawn[place]
    out[name] = Split(
      estimates[name],
      runs,
      seeds,
      questions,
      _root(max(0.0, asked - (inner or 0.0))),
      None if inner is None else _root(inner),
      None if runs == 1 else _root(apart),
      None if runs == 1 else _root(apart * runs),
    )
  return out


def _root(variance: float) -> float | None:
  return None if np.isnan(variance) else float(variance) ** 0.5


def _seeds(table: columns.Columns, names: Sequence[str]) -> np.ndarray:
  """Returns the variance of each measure over seeds of the same questions."""
  summed = measures.columns_of(table)
  cells = np.stack([table.run, table.question, table.seed])
  keys, inverse = np.unique(cells, axis=1, return_inverse=True)
  _, place, counts = np.unique(
    keys[:2], axis=1, return_inverse=True, return_counts=True
  )
  out = []
  for name in names:
    top, bottom = intervals.cluster_sums(
      inverse,
      [summed[part] for part in measures.MEASURES[name]],
      clusters=keys.shape[1],
    ).T
    total = bottom.sum()
    if not total > 0:
      out.append(np.nan)
      continue
    scores = (top - top.sum() / total * bottom) / total
    mean = np.bincount(place, scores) / counts
    squares = np.bincount(place, (scores - mean[place]) ** 2)
    several = counts > 1
    count = counts[several]
    out.append(float((squares[several] * count / (count - 1)).sum()))
  return np.array(out)
