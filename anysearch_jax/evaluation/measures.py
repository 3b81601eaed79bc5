"""The measures of episodes; each is a ratio of two sums.

Episodes are first summed by question. The budgets and seeds of a question share
its difficulty, so questions are independent samples and episodes are not.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from anysearch_jax.evaluation import columns, inference

# Name -> numerator, denominator. TP counts B >= 1 only, because correct answers
# without a permitted search are not a product of searching. Regret is the
# accuracy that the best agent has more, on the same questions and budgets.
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
  "regret": ("regret", "optimum_n"),
}
# The others are never negative.
_SIGNED = frozenset({"regret"})
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
# The number of answers that a numerator counts right ones of.
_TRIALS = {
  "accuracy": "n",
  "f1": "n",
  "official_accuracy": "n",
  "official_f1": "n",
  "tp": "tool_n",
}
SUMMED = tuple(
  dict.fromkeys(
    [*(name for pair in MEASURES.values() for name in pair), "tool_n"]
  )
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
    "tool_n": (table.budget >= 1).astype(float),
    "unused": table.budget - table.searches,
    "invalid": ended("invalid"),
    "truncated": ended("truncated"),
    "regret": np.nan_to_num(table.optimum - table.em),
    "optimum_n": (~np.isnan(table.optimum)).astype(float),
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
  """Sums of the scored episodes by training, question and budget.

  Attributes:
    values: float64 `[R, N, B, K]`: R trainings, N questions, B budgets, and K
      sums in the order of `names`.
    names: K names of SUMMED.
    runs: names of the trainings.
    budgets: the B budgets, ascending.
    stratum: int `[N]`, index in `datasets` of each question.
    datasets: the datasets that occur.
  """

  values: np.ndarray
  names: tuple[str, ...]
  runs: tuple[str, ...]
  budgets: tuple[int, ...]
  stratum: np.ndarray
  datasets: tuple[str, ...]

  def linearised(
    self, measures: Sequence[str], pools: np.ndarray | None = None
  ) -> inference.Linear:
    """Linearises M measures, each pooled over some budgets.

    Args:
      measures: keys of MEASURES.
      pools: bool `[L, B]`, the budgets of each pool; None: one pool of all.

    Returns:
      L M numbers, those of one pool side by side.
    """
    top, bottom, counts = self.parts(measures, pools)
    found = inference.ratios(
      top, bottom, runs=self.runs, trials=counts.sum(axis=0)
    )
    # Other numerators are amounts, not answers.
    counted = np.tile(
      [m in _TRIALS for m in measures], counts.shape[-1] // len(measures)
    )
    return dataclasses.replace(
      found,
      answer=tuple(np.where(counted, x, 0.0) for x in found.answer),
      answers=tuple(np.where(counted, x, 0.0) for x in found.answers),
    )

  def parts(
    self, measures: Sequence[str], pools: np.ndarray | None = None
  ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns numerators, denominators and answers, float `[R, N, L M]`."""
    if pools is None:
      pools = np.ones((1, len(self.budgets)), dtype=bool)
    pooled = np.stack(
      [self.values[:, :, pool].sum(axis=2) for pool in pools], axis=2
    )
    shape = *pooled.shape[:2], -1

    def of(names: Sequence[str]) -> np.ndarray:
      return pooled[..., [self.names.index(n) for n in names]].reshape(shape)

    return (
      of([MEASURES[m][0] for m in measures]),
      of([MEASURES[m][1] for m in measures]),
      of([_TRIALS.get(m, "n") for m in measures]),
    )

  def by_dataset(self) -> list[Sums]:
    """Returns one part for each dataset, in the order of `datasets`."""
    if len(self.datasets) == 1:
      return [self]
    return [
      dataclasses.replace(
        self,
        values=self.values[:, self.stratum == code],
        stratum=np.zeros(int((self.stratum == code).sum()), dtype=np.int64),
        datasets=(name,),
      )
      for code, name in enumerate(self.datasets)
    ]

  def averages(
    self, measures: Sequence[str], pools: np.ndarray | None = None
  ) -> inference.Linear:
    """Returns `linearised` of each dataset, averaged with equal weights."""
    return inference.average(
      [part.linearised(measures, pools) for part in self.by_dataset()]
    )


def sums(
  measured: columns.Measured, measures: Sequence[str] = tuple(MEASURES)
) -> Sums:
  """Sums the quantities that `measures` need over the scored episodes."""
  table = columns.of(measured).scored()
  wanted = [n for m in measures for n in (*MEASURES[m], _TRIALS.get(m, "n"))]
  names = tuple(dict.fromkeys(wanted))
  summed = columns_of(table)
  present, question = np.unique(table.question, return_inverse=True)
  budgets, budget = np.unique(table.budget, return_inverse=True)
  runs, run = np.unique(table.run, return_inverse=True)
  sets, stratum = np.unique(table.dataset_of[present], return_inverse=True)
  shape = len(runs), len(present), len(budgets)
  values = inference.cluster_sums(
    np.ravel_multi_index((run, question, budget), shape),
    [summed[name] for name in names],
    clusters=int(np.prod(shape)),
  )
  return Sums(
    values.reshape(*shape, len(names)),
    names,
    tuple(table.runs[code] for code in runs),
    tuple(map(int, budgets)),
    stratum,
    tuple(table.datasets[code] for code in sets),
  )


def ratios(
  table: columns.Columns,
  tops: Sequence[np.ndarray],
  bottoms: Sequence[np.ndarray],
) -> inference.Linear:
  """Linearises ratios of two sums over episodes, such as conditional rates.

  Args:
    table: P >= 1 episodes, none of which failed.
    tops, bottoms: for each ratio, float `[P]`.
  """
  ids, question = np.unique(table.question, return_inverse=True)
  runs, run = np.unique(table.run, return_inverse=True)
  sums = (
    inference.cluster_sums(
      run * len(ids) + question, parts, clusters=len(runs) * len(ids)
    ).reshape(len(runs), len(ids), -1)
    for parts in (tops, bottoms)
  )
  return inference.ratios(*sums, runs=[table.runs[code] for code in runs])


def estimates(
  measured: columns.Measured, measures: Sequence[str] = tuple(MEASURES)
) -> dict[str, inference.Estimate]:
  """Returns every measure, pooled over the episodes, with 95 % intervals.

  Rates have Wilson's interval, widened by the design effect of questions and
  trainings (`inference.rates`). Means and ratios have Student's, of their
  linearised scores.
  """
  found = sums(measured, measures)
  if not found.datasets:
    return dict.fromkeys(measures, inference.Estimate(*inference.NOTHING))
  trials = len(columns.of(measured).scored())
  return dict(
    zip(
      measures,
      inferred(
        found.linearised(measures), measures, trials=[trials] * len(measures)
      ),
      strict=True,
    )
  )


def inferred(
  found: inference.Linear,
  measures: Sequence[str],
  trials: Sequence[float] | None = None,
) -> list[inference.Estimate]:
  """Returns the estimates of numbers, each with the interval of its measure.

  Args:
    found: the numbers.
    measures: for each number, its measure.
    trials: for each number, its number of episodes, see `inference.rates`.
  """
  bounded = [i for i, measure in enumerate(measures) if measure in RATES]
  others = [i for i, measure in enumerate(measures) if measure not in RATES]
  rates = inference.rates(
    found.columns(bounded),
    None if trials is None else [trials[i] for i in bounded],
  )
  means = inference.effects(found.columns(others))
  out = {i: effect.estimate for i, effect in zip(bounded, rates, strict=True)}
  for i, effect in zip(others, means, strict=True):
    signed = measures[i] in _SIGNED
    out[i] = effect.estimate if signed else _positive(effect.estimate)
  return [out[i] for i in range(len(measures))]


def _positive(found: inference.Estimate) -> inference.Estimate:
  """Cuts an interval at 0."""
  if found.low is None:
    return found
  return found._replace(low=max(0.0, found.low))


def set_means(
  found: Sums, measures: Sequence[str], pools: np.ndarray | None = None
) -> list[inference.Estimate]:
  """Returns the unweighted mean over datasets of each dataset's measures.

  Args:
    found: sums of the episodes.
    measures: M keys of MEASURES.
    pools: bool `[L, B]`, see `Sums.linearised`.

  Returns:
    L M estimates.
  """
  count = 1 if pools is None else len(pools)
  return inferred(found.averages(measures, pools), [*measures] * count)
