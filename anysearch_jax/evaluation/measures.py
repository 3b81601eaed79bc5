"""The measures of episodes; each is a ratio of two sums.

Episodes are first summed by question. The budgets and seeds of a question share
its difficulty, so questions are independent samples and episodes are not.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from anysearch_jax.evaluation import columns, intervals

# Name -> numerator, denominator. TP counts B >= 1 only, because correct answers
# without a permitted search are not a product of searching.
MEASURES = {
  "accuracy": ("em", "n"),
  "f1": ("f1", "n"),
  "official_accuracy": ("official_em", "n"),
  "official_f1": ("official_f1", "n"),
  "tp": ("tool_em", "searches"),
  "searches": ("searches", "n"),
  "unused": ("unused", "n"),
  "format_rate": ("format", "n"),
  "violation_rate": ("violation", "n"),
  "invalid_rate": ("invalid", "n"),
  "truncated_rate": ("truncated", "n"),
  "generated_tokens": ("generated_tokens", "n"),
  "retrieved_tokens": ("retrieved_tokens", "n"),
  "total_tokens": ("total_tokens", "n"),
  "input_tokens": ("input_tokens", "n"),
  "retrieval_share": ("retrieved_tokens", "total_tokens"),
  "cost": ("cost", "n"),
}
RATES = frozenset(
  {
    "accuracy",
    "official_accuracy",
    "format_rate",
    "violation_rate",
    "invalid_rate",
    "truncated_rate",
  }
)
SUMMED = tuple(
  dict.fromkeys(name for pair in MEASURES.values() for name in pair)
)


def columns_of(table: columns.Columns) -> dict[str, np.ndarray]:
  """Returns the SUMMED quantities of each episode, float `[P]`.

  No episode may have failed.
  """

  def ended(outcome: str) -> np.ndarray:
    return (table.outcome == columns.OUTCOMES.index(outcome)).astype(float)

  derived = {
    "n": np.ones(len(table)),
    "tool_em": table.em * (table.budget >= 1),
    "unused": table.budget - table.searches,
    "invalid": ended("invalid"),
    "truncated": ended("truncated"),
  }
  return {
    name: derived[name] if name in derived else getattr(table, name)
    for name in SUMMED
  }


def totals(table: columns.Columns) -> dict[str, float]:
  """Returns the sums of SUMMED over all episodes; none may have failed."""
  return {name: float(c.sum()) for name, c in columns_of(table).items()}


@dataclasses.dataclass(frozen=True, eq=False)
class Sums:
  """Sums of the scored episodes by question and budget.

  Attributes:
    values: float64 `[N, B, K]`: N questions, B budgets, and K sums in the order
      of `names`.
    names: K names of SUMMED.
    budgets: the B budgets, ascending.
    stratum: int `[N]`, index in `datasets` of each question.
    datasets: the datasets that occur.
  """

  values: np.ndarray
  names: tuple[str, ...]
  budgets: tuple[int, ...]
  stratum: np.ndarray
  datasets: tuple[str, ...]

  def parts(self, *measures: str) -> np.ndarray:
    """Returns numerators and denominators of M measures: `[N, B, M, 2]`."""
    index = [[self.names.index(n) for n in MEASURES[m]] for m in measures]
    return self.values[..., np.array(index)]


def sums(
  measured: columns.Measured, measures: Sequence[str] = tuple(MEASURES)
) -> Sums:
  """Sums the quantities that `measures` need over the scored episodes."""
  table = columns.of(measured).scored()
  names = tuple(dict.fromkeys(n for m in measures for n in MEASURES[m]))
  summed = columns_of(table)
  present, question = np.unique(table.question, return_inverse=True)
  budgets, budget = np.unique(table.budget, return_inverse=True)
  sets, stratum = np.unique(table.dataset_of[present], return_inverse=True)
  values = intervals.cluster_sums(
    question * len(budgets) + budget,
    [summed[name] for name in names],
    clusters=len(present) * len(budgets),
  )
  return Sums(
    values.reshape(len(present), len(budgets), len(names)),
    names,
    tuple(map(int, budgets)),
    stratum,
    tuple(table.datasets[code] for code in sets),
  )


def estimates(
  measured: columns.Measured, measures: Sequence[str] = tuple(MEASURES)
) -> dict[str, intervals.Estimate]:
  """Returns every measure, pooled over the episodes, with 95 % intervals.

  Rates have Wilson's interval, widened by the design effect of questions
  (`intervals.clustered_rate`). Means and ratios have the delta method's
  interval, clustered by question.
  """
  found = sums(measured, measures)
  parts = found.parts(*measures).sum(axis=1)
  return {
    name: intervals.clustered_rate(parts[:, i, 0], parts[:, i, 1])
    if name in RATES
    else intervals.delta(parts[:, i, 0], parts[:, i, 1])
    for i, name in enumerate(measures)
  }


def set_means(
  stratum: np.ndarray, parts: np.ndarray, *, resamples: int
) -> list[intervals.Estimate]:
  """Returns the unweighted mean over datasets of each dataset's ratio.

  Args:
    stratum: int `[N]`, the dataset of each question.
    parts: float `[N, S, 2]`, numerators and denominators by question.
    resamples: number of bootstrap resamples.

  Returns:
    S estimates.
  """
  return intervals.bootstrap(
    parts.reshape(len(parts), -1),
    lambda totals: intervals.ratio(totals[..., 0::2], totals[..., 1::2]).mean(
      axis=1
    ),
    stratum=stratum,
    resamples=resamples,
  )
