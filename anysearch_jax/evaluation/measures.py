"""The measures of episodes; each is a ratio of two sums.

Episodes are first summed by question, because the budgets and seeds of a
question share its difficulty. Questions of one cluster share more
(`columns.cluster_of`), so clusters are the independent samples.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from anysearch_jax.evaluation import columns, inference


class Measure(NamedTuple):
  """A ratio of two sums over episodes.

  Attributes:
    top, bottom: the quantities that are summed, see `quantity`.
    answers: the quantity that counts the answers of which `top` counts right
      ones; "" if `top` is an amount.
    rate: whether the measure is a share of episodes.
    signed: whether it may be negative.
  """

  top: str
  bottom: str = "n"
  answers: str = ""
  rate: bool = False
  signed: bool = False


# TP counts B >= 1 only, because correct answers without a permitted search are
# not a product of searching. Tokens per right answer are those of all episodes,
# also of wrong ones: https://arxiv.org/abs/2601.05503. Regret is the accuracy
# that the best agent has more, on the same questions and budgets.
MEASURES = {
  "accuracy": Measure("em", answers="n", rate=True),
  "f1": Measure("f1", answers="n"),
  "cover_accuracy": Measure("cover_em", answers="n", rate=True),
  "official_accuracy": Measure("official_em", answers="n", rate=True),
  "official_f1": Measure("official_f1", answers="n"),
  "tp": Measure("tool_em", "searches", answers="tool_n"),
  "tokens_per_right": Measure("total_tokens", "em"),
  "searches": Measure("searches"),
  "unused": Measure("unused"),
  "format_rate": Measure("format", rate=True),
  "violation_rate": Measure("violation", rate=True),
  "invalid_rate": Measure("invalid", rate=True),
  "truncated_rate": Measure("truncated", rate=True),
  "generated_tokens": Measure("generated_tokens"),
  "retrieved_tokens": Measure("retrieved_tokens"),
  "total_tokens": Measure("total_tokens"),
  "input_tokens": Measure("input_tokens"),
  "retrieval_share": Measure("retrieved_tokens", "total_tokens"),
  "cost": Measure("cost"),
  "regret": Measure("regret", "optimum_n", signed=True),
  "judged": Measure("judged", "judged_n", answers="judged_n", rate=True),
}
MEASURES |= {name: Measure(name, f"{name}_n") for name in columns.EVIDENCE}
# Quantities that are no column of the episodes.
_DERIVED: dict[str, Callable[[columns.Columns], np.ndarray]] = {
  "n": lambda table: np.ones(len(table)),
  "tool_em": lambda table: np.where(table.budget >= 1, table.em, 0.0),
  "tool_n": lambda table: (table.budget >= 1).astype(float),
  "unused": lambda table: table.budget - table.searches,
  "invalid": lambda table: table.ended("invalid").astype(float),
  "truncated": lambda table: table.ended("truncated").astype(float),
  "regret": lambda table: np.nan_to_num(table.optimum - table.em),
  "optimum_n": lambda table: (~np.isnan(table.optimum)).astype(float),
}


def quantity(table: columns.Columns, name: str) -> np.ndarray:
  """Returns a quantity of each episode, float `[P]`; none may have failed."""
  column = name.removesuffix("_n")
  if column in (*columns.EVIDENCE, "judged"):  # nan in some episodes.
    values = table.values[column]
    return np.nan_to_num(values) if column == name else 1.0 - np.isnan(values)
  derived = _DERIVED.get(name)
  return getattr(table, name) if derived is None else derived(table)


@dataclasses.dataclass(frozen=True, eq=False)
class Sums:
  """Sums of the scored episodes by training, question and budget.

  Attributes:
    values: float64 `[R, N, B, K]`: R trainings, N questions, B budgets, and K
      sums in the order of `names`.
    names: K names of quantities.
    runs: names of the trainings.
    budgets: the B budgets, ascending.
    stratum: int `[N]`, index in `datasets` of each question.
    cluster: int `[N]`, equal for questions of one cluster.
    datasets: the datasets that occur.
  """

  values: np.ndarray
  names: tuple[str, ...]
  runs: tuple[str, ...]
  budgets: tuple[int, ...]
  stratum: np.ndarray
  cluster: np.ndarray
  datasets: tuple[str, ...]

  def linearised(
    self, measures: Sequence[str], pools: np.ndarray | None = None
  ) -> inference.Linear:
    """Linearises M measures, each pooled over budgets.

    Args:
      measures: keys of `MEASURES`.
      pools: bool `[L, B]`, the budgets of each pool; None: one pool of all.

    Returns:
      L M numbers; those of a pool are adjacent.
    """
    top, bottom, counts = self.parts(measures, pools)
    linear = inference.ratios(
      top,
      bottom,
      runs=self.runs,
      trials=counts.sum(axis=0),
      clusters=self.cluster,
    )
    # A changed answer moves only numerators that count answers, not amounts.
    counts_answers = [bool(MEASURES[m].answers) for m in measures]
    pool_count = counts.shape[-1] // len(measures)
    counted = np.tile(counts_answers, pool_count)
    return dataclasses.replace(
      linear,
      one_answer=tuple(np.where(counted, x, 0.0) for x in linear.one_answer),
      all_answers=tuple(np.where(counted, x, 0.0) for x in linear.all_answers),
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
    run_count, question_count = pooled.shape[:2]

    def select(names: Sequence[str]) -> np.ndarray:
      indices = [self.names.index(name) for name in names]
      return pooled[..., indices].reshape(run_count, question_count, -1)

    return (
      select([MEASURES[m].top for m in measures]),
      select([MEASURES[m].bottom for m in measures]),
      select([MEASURES[m].answers or "n" for m in measures]),
    )

  def by_dataset(self) -> list[Sums]:
    """Returns one part for each dataset, in the order of `datasets`."""
    parts = []
    for code, name in enumerate(self.datasets):
      mask = self.stratum == code
      parts.append(
        dataclasses.replace(
          self,
          values=self.values[:, mask],
          stratum=np.zeros(int(mask.sum()), dtype=np.int64),
          cluster=self.cluster[mask],
          datasets=(name,),
        )
      )
    return parts

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
  table = columns.as_columns(measured).scored()
  names: dict[str, None] = {}  # An ordered set.
  for name in measures:
    measure = MEASURES[name]
    quantities = (measure.top, measure.bottom, measure.answers or "n")
    names |= dict.fromkeys(quantities)
  present, question = np.unique(table.question, return_inverse=True)
  budgets, budget = np.unique(table.budget, return_inverse=True)
  runs, run = np.unique(table.run, return_inverse=True)
  sets, stratum = np.unique(table.dataset_of[present], return_inverse=True)
  return Sums(
    values=inference.cell_sums(
      (run, question, budget),
      (len(runs), len(present), len(budgets)),
      [quantity(table, name) for name in names],
    ),
    names=tuple(names),
    runs=tuple(table.runs[code] for code in runs),
    budgets=tuple(map(int, budgets)),
    stratum=stratum,
    cluster=table.cluster_of[present],
    datasets=tuple(table.datasets[code] for code in sets),
  )


def ratios(
  table: columns.Columns,
  tops: Sequence[np.ndarray],
  bottoms: Sequence[np.ndarray],
) -> inference.Linear:
  """Linearises ratios of two sums over episodes, such as conditional rates.

  Args:
    table: P >= 1 episodes, none of which failed.
    tops: for each ratio, float or bool `[P]`, the terms of the numerator.
    bottoms: for each ratio, float or bool `[P]`, those of the denominator.
  """
  ids, question = np.unique(table.question, return_inverse=True)
  runs, run = np.unique(table.run, return_inverse=True)
  shape = len(runs), len(ids)
  return inference.ratios(
    inference.cell_sums((run, question), shape, tops),
    inference.cell_sums((run, question), shape, bottoms),
    runs=[table.runs[code] for code in runs],
    clusters=table.cluster_of[ids],
  )


def estimates(
  measured: columns.Measured,
  measures: Sequence[str] = tuple(MEASURES),
  *,
  weigh_sets: bool = False,
) -> dict[str, inference.Estimate]:
  """Returns every measure, pooled over the episodes, with 95 % intervals.

  Rates have Wilson's interval, widened by the design effect of clusters and
  trainings (`inference.rates`). Means and ratios have Student's, of their
  linearised scores.

  Args:
    measured: the episodes; failed ones are left out.
    measures: keys of `MEASURES`.
    weigh_sets: whether each measure is computed in each dataset and averaged
      with equal weights, as in the paper's main table.

  Returns:
    The estimates by measure; NOTHING where it is undefined (in a dataset).
  """
  totals = sums(measured, measures)
  if not totals.datasets:
    return dict.fromkeys(measures, inference.NOTHING)
  if weigh_sets:
    numbers = inferred(totals.averages(measures), measures)
  else:
    trials = len(columns.as_columns(measured).scored())
    numbers = inferred(totals.linearised(measures), measures, trials)
  return dict(zip(measures, numbers, strict=True))


def inferred(
  numbers: inference.Linear,
  measures: Sequence[str],
  trials: float | None = None,
) -> list[inference.Estimate]:
  """Returns the estimates of numbers, each with the interval of its measure.

  Args:
    numbers: M numbers.
    measures: for each number, its key in `MEASURES`.
    trials: number of trials of each rate, see `inference.rates`.
  """
  rates = [i for i, name in enumerate(measures) if MEASURES[name].rate]
  means = [i for i, name in enumerate(measures) if not MEASURES[name].rate]
  rate_trials = None if trials is None else [trials] * len(rates)
  estimates: dict[int, inference.Estimate] = {}
  bounded = inference.rates(numbers.columns(rates), rate_trials)
  for i, effect in zip(rates, bounded, strict=True):
    estimates[i] = effect.estimate
  unbounded = inference.effects(numbers.columns(means))
  for i, effect in zip(means, unbounded, strict=True):
    estimate = effect.estimate
    if estimate.low is not None and not MEASURES[measures[i]].signed:
      estimate = estimate._replace(low=max(0.0, estimate.low))
    estimates[i] = estimate
  return [estimates[i] for i in range(len(measures))]
