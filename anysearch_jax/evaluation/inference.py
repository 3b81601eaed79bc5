"""Ratios of sums over questions, seeds and trainings, and their intervals.

Every number of a report is a weighted sum of ratios, so one variance serves
rates, means, tool productivity, averages over sets, areas and differences. A
ratio y / x moves by about (y_g - (y / x) x_g) / x if cluster g of questions is
left out, and exactly by that over 1 - x_g / x. These jackknife scores (Efron
and Stein 1981) add up over weighted sums of ratios, so all such numbers have
scores too; with few clusters the plain residuals would be too small.

Clusters and trainings are crossed: every training plays every question. Let
V_R, V_G and V_E be the variances of a number from the scores of R trainings, of
G clusters, and of both together (their interaction). V_R and V_G both contain
V_E (Cameron, Gelbach and Miller 2011, https://doi.org/10.1198/jbes.2010.07136).
It is subtracted where there are many degrees of freedom, and never where two
trainings that agree by chance would leave 0:

    V = V_R + max(V_G - V_E, 0)

The quantile of sqrt(V) is the mean of Student's for R - 1 and for G - 1 degrees
of freedom, weighted by the two parts (Cochran and Cox 1957): a little too large
where both parts matter. With Satterthwaite's degrees of freedom, equal methods
of three trainings would differ in .07 of the cases. What an interval covers is
in docs/statistics.md.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy import optimize, special

CONFIDENCE = 0.95
# Probability with which the smallest detectable effect is found.
POWER = 0.8
# Smallest number of trainings of each row for a p value.
DECIDING = 3
_TAIL = (1 - CONFIDENCE) / 2
# Quantile of the normal distribution, 1.96.
_NORMAL = float(special.ndtri((1 + CONFIDENCE) / 2))
# Smallest tail probability: Student's quantile is inaccurate below it.
_SMALLEST = 1e-15


class Estimate(NamedTuple):
  """A value and its interval; None where undefined."""

  value: float | None
  low: float | None
  high: float | None

  def above(self, bound: float = 0.0) -> bool:
    """Whether the whole interval lies above `bound`."""
    return self.low is not None and self.low > bound

  def below(self, bound: float = 0.0) -> bool:
    """Whether the whole interval lies below `bound`."""
    return self.high is not None and self.high < bound


NOTHING = Estimate(None, None, None)


def score(rate: float, n: float, quantile: float) -> tuple[float, float]:
  """Returns the ends of the score interval of a rate (Wilson 1927).

  Args:
    rate: the observed rate, in [0, 1].
    n: number of independent trials, > 0; it may be fractional.
    quantile: quantile of the standardised rate, 1.96 for 95 %.
  """
  squared = quantile**2
  center = (rate + squared / (2 * n)) / (1 + squared / n)
  spread = rate * (1 - rate) / n + squared / (4 * n**2)
  half = quantile * spread**0.5 / (1 + squared / n)
  # Rounding must not exclude the rate itself.
  return max(0.0, min(rate, center - half)), min(1.0, max(rate, center + half))


def ratio(numerator: np.ndarray, denominator: np.ndarray) -> np.ndarray:
  """Returns numerator / denominator; nan where the denominator is not > 0."""
  numerator, denominator = np.broadcast_arrays(numerator, denominator)
  result = np.full(numerator.shape, np.nan)
  np.divide(numerator, denominator, out=result, where=denominator > 0)
  return result


def cell_sums(
  indices: Sequence[np.ndarray],
  shape: Sequence[int],
  columns: Sequence[np.ndarray],
) -> np.ndarray:
  """Sums values of P episodes within the cells of a grid.

  Args:
    indices: for each axis of the grid, int `[P]`, each episode's index.
    shape: the shape of the grid.
    columns: K arrays `[P]`, the values to sum.

  Returns:
    The sums, float64 `[*shape, K]`.
  """
  cell = np.ravel_multi_index(indices, shape)
  cell_count = int(np.prod(shape))
  sums = [np.bincount(cell, c, minlength=cell_count) for c in columns]
  return np.stack(sums, axis=-1).reshape(*shape, len(columns))


@dataclasses.dataclass(frozen=True, eq=False)
class Linear:
  """S numbers, and how much each cluster and each training moves them.

  The numbers are weighted sums of ratios. D strata hold different questions.

  Attributes:
    value: float `[S]`; nan where undefined.
    cluster: for each stratum, float `[G, S]`, jackknife scores of clusters of
      questions.
    run: float `[R, S]`, jackknife scores of trainings.
    run_cluster: for each stratum, float `[R, G, S]`, scores of a training on a
      cluster.
    one_answer: for each stratum, float `[S]`: how much a number moves if a
      single answer changes; 0 for numbers that do not count answers.
    all_answers: for each stratum, float `[S]`: how much a number moves if all
      answers to one question change.
    question_count: number of questions in all strata.
    runs: names of the R trainings.
    group: int `[R]`; trainings with equal numbers are draws of one method.
  """

  value: np.ndarray
  cluster: tuple[np.ndarray, ...]
  run: np.ndarray
  run_cluster: tuple[np.ndarray, ...]
  one_answer: tuple[np.ndarray, ...]
  all_answers: tuple[np.ndarray, ...]
  question_count: int
  runs: tuple[str, ...]
  group: np.ndarray

  def combined(self, weights: np.ndarray) -> Linear:
    """Returns the sums of the numbers with `weights`, float `[T, S]`."""
    return self._map(
      lambda x: _weighted(x, weights), lambda x: _weighted(x, np.abs(weights))
    )

  def columns(self, indices: Sequence[int]) -> Linear:
    """Returns the numbers at some of the S indices."""

    def select(x: np.ndarray) -> np.ndarray:
      return x[..., indices]

    return self._map(select, select)

  def _map(
    self,
    signed: Callable[[np.ndarray], np.ndarray],
    magnitude: Callable[[np.ndarray], np.ndarray],
  ) -> Linear:
    """Maps the arrays: effects of answers by `magnitude`, others by `signed`.

    Effects of answers have no sign, so a weighted sum adds their sizes.
    """
    return dataclasses.replace(
      self,
      value=signed(self.value),
      cluster=tuple(map(signed, self.cluster)),
      run=signed(self.run),
      run_cluster=tuple(map(signed, self.run_cluster)),
      one_answer=tuple(map(magnitude, self.one_answer)),
      all_answers=tuple(map(magnitude, self.all_answers)),
    )


def ratios(
  numerator: np.ndarray,
  denominator: np.ndarray,
  *,
  runs: Sequence[str] = ("",),
  trials: np.ndarray | None = None,
  clusters: np.ndarray | None = None,
) -> Linear:
  """Linearises C ratios of sums over R trainings and N questions.

  Args:
    numerator, denominator: float `[R, N, C]`, 0 where a training did not play
      a question.
    runs: names of the trainings.
    trials: float `[N, C]`, number of answers behind each numerator, which is
      their number of right ones; None: the numerators do not count answers.
    clusters: int `[N]`; questions with equal numbers are not independent of
      each other. None: all questions are.
  """
  question_count = numerator.shape[1]
  if clusters is not None:
    order = np.argsort(clusters, kind="stable")
    _, starts = np.unique(clusters[order], return_index=True)
    numerator = np.add.reduceat(numerator[:, order], starts, axis=1)
    denominator = np.add.reduceat(denominator[:, order], starts, axis=1)
  total = denominator.sum(axis=(0, 1))
  value = ratio(numerator.sum(axis=(0, 1)), total)
  with np.errstate(divide="ignore", invalid="ignore"):
    run_cluster = (numerator - value * denominator) / total
    # Leaving out a cluster changes the denominator too. A cluster that has the
    # whole denominator cannot be left out; its scores are nan.
    cluster_share = denominator.sum(axis=0) / total
    cluster = run_cluster.sum(axis=0) / (1 - cluster_share)
    run_share = denominator.sum(axis=1) / total
    run = run_cluster.sum(axis=1) / (1 - run_share)
    if trials is None:
      one_answer = np.zeros_like(total)
      all_answers = one_answer
    else:
      one_answer = np.where(total > 0, 1 / total, np.nan)
      all_answers = one_answer * trials.sum(axis=0) / max(question_count, 1)
  cluster[~np.isfinite(cluster)] = np.nan
  run[~np.isfinite(run)] = np.nan
  return Linear(
    value=value,
    cluster=(cluster,),
    run=run,
    run_cluster=(run_cluster,),
    one_answer=(one_answer,),
    all_answers=(all_answers,),
    question_count=question_count,
    runs=tuple(runs),
    group=np.zeros(len(runs), dtype=np.int64),
  )


def average(parts: Sequence[Linear]) -> Linear:
  """Returns the unweighted mean of numbers of different questions."""
  scale = 1 / len(parts)

  def scaled(name: str) -> tuple[np.ndarray, ...]:
    return tuple(scale * x for part in parts for x in getattr(part, name))

  return dataclasses.replace(
    parts[0],
    value=scale * np.sum([part.value for part in parts], axis=0),
    run=scale * np.sum([part.run for part in parts], axis=0),
    cluster=scaled("cluster"),
    run_cluster=scaled("run_cluster"),
    one_answer=scaled("one_answer"),
    all_answers=scaled("all_answers"),
    question_count=sum(part.question_count for part in parts),
  )


def minus(ours: Linear, theirs: Linear) -> Linear:
  """Returns the differences of numbers of two rows on the same questions.

  Trainings that both rows have are paired; the others are independent draws.
  """
  shared = [name for name in ours.runs if name in theirs.runs]
  our_pairs = [ours.runs.index(name) for name in shared]
  their_pairs = [theirs.runs.index(name) for name in shared]
  our_only = [i for i, name in enumerate(ours.runs) if name not in shared]
  their_only = [i for i, name in enumerate(theirs.runs) if name not in shared]

  def by_training(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    paired = first[our_pairs] - second[their_pairs]
    return np.concatenate([paired, first[our_only], -second[their_only]])

  def mean(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    return (first + second) / 2

  def by_stratum(
    combine: Callable[..., np.ndarray], name: str
  ) -> tuple[np.ndarray, ...]:
    return tuple(map(combine, getattr(ours, name), getattr(theirs, name)))

  our_names = [ours.runs[i] for i in our_only]
  their_names = [theirs.runs[i] for i in their_only]
  return Linear(
    value=ours.value - theirs.value,
    cluster=by_stratum(np.subtract, "cluster"),
    run=by_training(ours.run, theirs.run),
    run_cluster=by_stratum(by_training, "run_cluster"),
    one_answer=by_stratum(mean, "one_answer"),
    all_answers=by_stratum(mean, "all_answers"),
    question_count=ours.question_count,
    runs=(*shared, *our_names, *their_names),
    group=np.repeat([0, 1, 2], [len(shared), len(our_only), len(their_only)]),
  )


def _weighted(x: np.ndarray, weights: np.ndarray) -> np.ndarray:
  """Returns x @ weights.T; a nan counts only where its weight is not 0."""
  missing = np.isnan(x)
  if not missing.any():
    return x @ weights.T
  sums = np.where(missing, 0.0, x) @ weights.T
  sums[missing.astype(float) @ (weights != 0).T > 0] = np.nan
  return sums


# Variance and degrees of freedom of each part of a number's error.
Parts = tuple[tuple[float, float], ...]


def variance(numbers: Linear) -> list[Parts]:
  """Returns the parts of each number's variance, those that are not 0.

  That between clusters contains the interaction (of trainings with questions,
  with that of evaluation seeds inside it) only where a row has one training.
  The parts of different strata, and of independent trainings, are one.
  """
  masks = [numbers.group == group for group in np.unique(numbers.group)]
  repeated = [mask for mask in masks if mask.sum() > 1]
  zero = np.zeros(len(numbers.value))
  run_parts = [_jackknife(numbers.run[mask]) for mask in repeated]
  question_parts = []
  for scores, run_cluster, one_answer, all_answers in zip(
    numbers.cluster,
    numbers.run_cluster,
    numbers.one_answer,
    numbers.all_answers,
    strict=True,
  ):
    spread, freedom = _jackknife(scores)
    # Two answers that change, one for the better and one for the worse, keep
    # an interval open where few questions vary (after Bonett and Price 2012);
    # where none varies, all answers to a question may change together.
    change = np.where(spread > 0, one_answer, all_answers)
    interaction = sum(
      (_interaction(run_cluster[mask]) for mask in repeated), zero
    )
    between = np.maximum(spread - interaction, 0.0)
    question_parts.append((between + 2 * change**2, freedom))
  question_variance, question_freedom = _sum_variances(question_parts)
  run_variance, run_freedom = _sum_variances(run_parts or [(zero, 1)])
  table = np.stack(
    [question_variance, question_freedom, run_variance, run_freedom], axis=1
  )
  return [
    tuple(part for part in (row[:2], row[2:]) if part[0] != 0)
    for row in map(tuple, table.tolist())
  ]


def _jackknife(scores: np.ndarray) -> tuple[np.ndarray, int]:
  """Returns the variance from `[N, S]` scores, and its degrees of freedom."""
  n = len(scores)
  if n < 2:
    return np.full(scores.shape[1], np.nan), 1
  gap = scores - scores.mean(axis=0)
  return (n - 1) / n * (gap**2).sum(axis=0), n - 1


def _interaction(scores: np.ndarray) -> np.ndarray:
  """Returns the variance from `[R, G, S]` scores of trainings on clusters."""
  runs, n, _ = scores.shape
  inner = scores - scores.mean(axis=0)
  inner = inner - inner.mean(axis=1, keepdims=True)
  scale = runs / (runs - 1) * n / max(n - 1, 1)
  return scale * (inner**2).sum(axis=(0, 1))


def _sum_variances(
  parts: Sequence[tuple[np.ndarray, int]],
) -> tuple[np.ndarray, np.ndarray]:
  """Returns the sum of variances of one kind, and its degrees of freedom.

  Those are Satterthwaite's, https://doi.org/10.2307/3002019.
  """
  total = np.sum([part for part, _ in parts], axis=0)
  squares = np.sum([part**2 / df for part, df in parts], axis=0)
  largest = max(df for _, df in parts)
  with np.errstate(divide="ignore", invalid="ignore"):
    return total, np.where(squares > 0, total**2 / squares, largest)


def reach(parts: Parts, tail: float) -> float:
  """Returns the half-width of an interval with `tail` on each side."""
  total = sum(part for part, _ in parts)
  weighted = sum(-float(special.stdtrit(df, tail)) * part for part, df in parts)
  return weighted / math.sqrt(total) if total else 0.0


@dataclasses.dataclass(frozen=True)
class Effect:
  """A number, its interval and its test against zero.

  Attributes:
    estimate: the value and its 95 % interval.
    parts: the parts of its variance; empty if the number has no interval or no
      error.
    trainings: number of trainings of the row that has fewer.
  """

  estimate: Estimate
  parts: Parts = ()
  trainings: int = 1

  @property
  def detectable(self) -> float | None:
    """The smallest true effect whose interval excludes zero in 80 % of cases.

    None if the number has no interval.
    """
    if not self.parts:
      return None
    return reach(self.parts, _TAIL) + reach(self.parts, 1 - POWER)

  @property
  def p(self) -> float | None:
    """The two-sided p value of no effect: where the interval reaches zero.

    None if there is no interval, or if a row has fewer than `DECIDING`
    trainings.
    """
    if self.trainings < DECIDING or self.estimate.low is None:
      return None
    gap = abs(self.estimate.value or 0.0)
    if not gap:
      return 1.0
    if reach(self.parts, _SMALLEST) <= gap:
      return 2 * _SMALLEST if self.parts else 0.0
    return 2 * math.exp(
      optimize.brentq(
        lambda log: reach(self.parts, math.exp(log)) - gap,
        math.log(_SMALLEST),
        math.log(0.5),
      )
    )


UNKNOWN = Effect(NOTHING)


def effects(numbers: Linear) -> list[Effect]:
  """Returns unbounded numbers, such as means and differences."""
  out = []
  for value, parts in zip(numbers.value, variance(numbers), strict=True):
    half = reach(parts, _TAIL)
    out.append(_effect(numbers, value, value - half, value + half, parts))
  return out


def rates(
  numbers: Linear, trials: Sequence[float] | None = None
) -> list[Effect]:
  """Returns numbers in [0, 1], with Wilson's interval.

  The number of trials of Wilson's formula is that of independent trials with
  the same variance (Rao and Scott 1992). If no question varies it is the number
  of questions, as if all answers to a question were one.

  Args:
    numbers: rates, or averages of rates.
    trials: for each rate, its number of trials, an upper bound of the number
      of independent ones; None: no bound.
  """
  # Wilson's interval stays open at 0 and 1, so no answer need change.
  zeros = tuple(np.zeros_like(part) for part in numbers.one_answer)
  closed = dataclasses.replace(numbers, one_answer=zeros, all_answers=zeros)
  out = []
  for i, (value, parts) in enumerate(
    zip(numbers.value, variance(closed), strict=True)
  ):
    total = sum(part for part, _ in parts)
    if np.isnan(value) or (np.isnan(total) and len(numbers.cluster) > 1):
      out.append(_effect(numbers, value, np.nan, np.nan, parts))
      continue
    one_trial = value * (1 - value)  # Variance of a single trial.
    n = float(numbers.question_count)
    quantile = _NORMAL
    if np.isnan(total):  # There is one cluster.
      n = 1.0
    elif one_trial > 1e-12 and total > 0:
      # The jackknife's variance of one trial a question is p (1 - p) / (n - 1).
      n = one_trial / total + 1
      quantile = reach(parts, _TAIL) / total**0.5
    if trials is not None and n >= trials[i] * (1 - 1e-9):
      n = float(trials[i])
      quantile = _NORMAL
    low, high = score(value, n, quantile)
    out.append(_effect(numbers, value, low, high, parts))
  return out


def _effect(
  numbers: Linear, value: float, low: float, high: float, parts: Parts
) -> Effect:
  if np.isnan(value):
    return UNKNOWN
  if np.isnan(low):
    return Effect(Estimate(float(value), None, None))
  _, trainings = np.unique(numbers.group, return_counts=True)
  if np.isnan(sum(part for part, _ in parts)):
    parts = ()
  estimate = Estimate(float(value), float(low), float(high))
  return Effect(estimate, parts, int(trainings.min()))


def holm(p_values: npt.ArrayLike) -> np.ndarray:
  """Returns p values `[M]` with Holm's adjustment, in the order given.

  It controls the family-wise error rate. NaN entries are skipped and returned
  as NaN.
  """
  p = np.array(p_values, dtype=np.float64)
  order = np.argsort(p)[: np.count_nonzero(~np.isnan(p))]  # NaN come last.
  scaled = p[order] * np.arange(len(order), 0, -1)
  p[order] = np.minimum(1.0, np.maximum.accumulate(scaled))
  return p
