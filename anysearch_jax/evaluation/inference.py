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
POWER = 0.8  # Of the smallest detectable effect.
DECIDING = 3  # Trainings of a row that a p value needs, at least.
_TAIL = (1 - CONFIDENCE) / 2
_NORMAL = float(special.ndtri((1 + CONFIDENCE) / 2))
_SMALLEST = 1e-15  # P values are at least this.


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


def score(rate: float, n: float, at: float) -> tuple[float, float]:
  """Returns the ends of the score interval of a rate (Wilson 1927).

  Args:
    rate: the observed rate, in [0, 1].
    n: number of independent trials, > 0; need not be whole.
    at: quantile of the standardised rate, 1.96 for 95 %.
  """
  center = (rate + at**2 / (2 * n)) / (1 + at**2 / n)
  spread = rate * (1 - rate) / n + at**2 / (4 * n**2)
  half = at * spread**0.5 / (1 + at**2 / n)
  # Rounding must not exclude the rate itself.
  return max(0.0, min(rate, center - half)), min(1.0, max(rate, center + half))


def ratio(numerator: np.ndarray, denominator: np.ndarray) -> np.ndarray:
  """Returns numerator / denominator; nan where the denominator is not > 0."""
  numerator, denominator = np.broadcast_arrays(numerator, denominator)
  result = np.full(numerator.shape, np.nan)
  np.divide(numerator, denominator, out=result, where=denominator > 0)
  return result


def cell_sums(
  at: Sequence[np.ndarray], shape: Sequence[int], columns: Sequence[np.ndarray]
) -> np.ndarray:
  """Sums `columns`, K arrays `[P]`, within the cells of a grid of some shape.

  `at` has for each of its axes, int `[P]`, the place of each episode. The sums
  are float64 `[*shape, K]`.
  """
  cell, cells = np.ravel_multi_index(at, shape), int(np.prod(shape))
  sums = [np.bincount(cell, c, minlength=cells) for c in columns]
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
    both: for each stratum, float `[R, G, S]`, scores of a training on a
      cluster.
    answer: for each stratum, float `[S]`: how much a number moves if a single
      answer changes; 0 for numbers without answers.
    answers: for each stratum, float `[S]`: how much it moves if all answers to
      one question change.
    asked: number of questions of all strata.
    runs: names of the R trainings.
    group: int `[R]`; trainings with equal numbers are draws of one method.
  """

  value: np.ndarray
  cluster: tuple[np.ndarray, ...]
  run: np.ndarray
  both: tuple[np.ndarray, ...]
  answer: tuple[np.ndarray, ...]
  answers: tuple[np.ndarray, ...]
  asked: int
  runs: tuple[str, ...]
  group: np.ndarray

  def combined(self, weights: np.ndarray) -> Linear:
    """Returns the sums of the numbers with `weights`, float `[T, S]`."""
    return self._each(
      lambda x: _weighted(x, weights), lambda x: _weighted(x, np.abs(weights))
    )

  def columns(self, chosen: Sequence[int]) -> Linear:
    """Returns some of the numbers."""
    return self._each(*[lambda x: x[..., chosen]] * 2)

  def _each(
    self,
    of: Callable[[np.ndarray], np.ndarray],
    size: Callable[[np.ndarray], np.ndarray],
  ) -> Linear:
    """Maps the arrays: `size` those of magnitudes, `of` all others."""
    return dataclasses.replace(
      self,
      value=of(self.value),
      cluster=tuple(map(of, self.cluster)),
      run=of(self.run),
      both=tuple(map(of, self.both)),
      answer=tuple(map(size, self.answer)),
      answers=tuple(map(size, self.answers)),
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
  asked = numerator.shape[1]
  if clusters is not None:
    order = np.argsort(clusters, kind="stable")
    _, first = np.unique(clusters[order], return_index=True)
    numerator, denominator = (
      np.add.reduceat(x[:, order], first, axis=1)
      for x in (numerator, denominator)
    )
  total = denominator.sum(axis=(0, 1))
  value = ratio(numerator.sum(axis=(0, 1)), total)
  with np.errstate(divide="ignore", invalid="ignore"):
    both = (numerator - value * denominator) / total
    # Leaving out a cluster changes the denominator too; a cluster with all
    # of the denominator cannot be left out, and leaves nan.
    cluster = both.sum(axis=0) / (1 - denominator.sum(axis=0) / total)
    run = both.sum(axis=1) / (1 - denominator.sum(axis=1) / total)
    if trials is None:
      answer = answers = np.zeros_like(total)
    else:
      answer = np.where(total > 0, 1 / total, np.nan)
      answers = answer * trials.sum(axis=0) / max(asked, 1)
  cluster[~np.isfinite(cluster)] = np.nan
  run[~np.isfinite(run)] = np.nan
  return Linear(
    *(value, (cluster,), run, (both,), (answer,), (answers,), asked),
    *(tuple(runs), np.zeros(len(runs), dtype=np.int64)),
  )


def average(parts: Sequence[Linear]) -> Linear:
  """Returns the unweighted mean of numbers of different questions."""
  scale = 1 / len(parts)

  def joined(name: str) -> tuple[np.ndarray, ...]:
    return tuple(scale * x for part in parts for x in getattr(part, name))

  return dataclasses.replace(
    parts[0],
    value=scale * np.sum([part.value for part in parts], axis=0),
    run=scale * np.sum([part.run for part in parts], axis=0),
    cluster=joined("cluster"),
    both=joined("both"),
    answer=joined("answer"),
    answers=joined("answers"),
    asked=sum(part.asked for part in parts),
  )


def minus(ours: Linear, theirs: Linear) -> Linear:
  """Returns the differences of numbers of two rows on the same questions.

  Trainings that both rows have are paired; the others are independent draws.
  """
  shared = [name for name in ours.runs if name in theirs.runs]
  mine = [i for i, name in enumerate(ours.runs) if name not in shared]
  other = [i for i, name in enumerate(theirs.runs) if name not in shared]
  ours_at = [ours.runs.index(name) for name in shared]
  theirs_at = [theirs.runs.index(name) for name in shared]

  def joined(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    paired = left[ours_at] - right[theirs_at]
    return np.concatenate([paired, left[mine], -right[other]])

  def each(of: Callable, name: str) -> tuple[np.ndarray, ...]:
    return tuple(map(of, getattr(ours, name), getattr(theirs, name)))

  def half(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return (a + b) / 2

  return Linear(
    ours.value - theirs.value,
    each(np.subtract, "cluster"),
    joined(ours.run, theirs.run),
    each(joined, "both"),
    each(half, "answer"),
    each(half, "answers"),
    ours.asked,
    (*shared, *(ours.runs[i] for i in mine), *(theirs.runs[i] for i in other)),
    np.repeat([0, 1, 2], [len(shared), len(mine), len(other)]),
  )


def _weighted(x: np.ndarray, weights: np.ndarray) -> np.ndarray:
  """Returns x @ weights.T; a nan counts only where its weight is not 0."""
  missing = np.isnan(x)
  if not missing.any():
    return x @ weights.T
  found = np.where(missing, 0.0, x) @ weights.T
  found[missing.astype(float) @ (weights != 0).T > 0] = np.nan
  return found


# Variance and degrees of freedom of each part of a number's error.
Parts = tuple[tuple[float, float], ...]


def variance(found: Linear) -> list[Parts]:
  """Returns the parts of each number's variance, those that are not 0.

  That between clusters contains the interaction (of trainings with questions,
  with that of evaluation seeds inside it) only where a row has one training.
  The parts of different strata, and of independent trainings, are one.
  """
  groups = [found.group == group for group in np.unique(found.group)]
  several = [own for own in groups if own.sum() > 1]
  nothing = np.zeros(len(found.value))
  trained = [_jackknife(found.run[own]) for own in several] or [(nothing, 1)]
  asked = []
  for scores, both, one, whole in zip(
    found.cluster, found.both, found.answer, found.answers, strict=True
  ):
    spread, freedom = _jackknife(scores)
    # Two answers that change, one for the better and one for the worse, keep
    # an interval open where few questions vary (after Bonett and Price 2012);
    # where none varies, all answers to a question may change together.
    change = np.where(spread > 0, one, whole)
    shared = sum((_interaction(both[own]) for own in several), nothing)
    asked.append((np.maximum(spread - shared, 0.0) + 2 * change**2, freedom))
  kinds = [_together(*zip(*kind, strict=True)) for kind in (asked, trained)]
  numbers = np.stack([x for kind in kinds for x in kind], axis=1).tolist()
  return [
    tuple(part for part in ((a, b), (c, d)) if part[0] != 0)
    for a, b, c, d in numbers
  ]


def _jackknife(scores: np.ndarray) -> tuple[np.ndarray, int]:
  """Returns the variance from `[N, S]` scores, and its degrees of freedom."""
  n = len(scores)
  if n < 2:
    return np.full(scores.shape[1], np.nan), 1
  gap = scores - scores.mean(axis=0)
  return (n - 1) / n * (gap**2).sum(axis=0), n - 1


def _interaction(both: np.ndarray) -> np.ndarray:
  """Returns the variance from `[R, G, S]` scores of trainings on clusters."""
  runs, n, _ = both.shape
  inner = both - both.mean(axis=0)
  inner = inner - inner.mean(axis=1, keepdims=True)
  scale = runs / (runs - 1) * n / max(n - 1, 1)
  return scale * (inner**2).sum(axis=(0, 1))


def _together(
  parts: Sequence[np.ndarray], freedom: Sequence[int]
) -> tuple[np.ndarray, np.ndarray]:
  """Returns the sum of variances of one kind, and its degrees of freedom.

  Those are Satterthwaite's, https://doi.org/10.2307/3002019.
  """
  total = np.sum(parts, axis=0)
  each = [part**2 / df for part, df in zip(parts, freedom, strict=True)]
  squares = np.sum(each, axis=0)
  with np.errstate(divide="ignore", invalid="ignore"):
    return total, np.where(squares > 0, total**2 / squares, max(freedom))


def reach(parts: Parts, tail: float) -> float:
  """Returns the half-width of an interval with `tail` on each side."""
  total = sum(v for v, _ in parts)
  weighted = sum(-float(special.stdtrit(df, tail)) * v for v, df in parts)
  return weighted / math.sqrt(total) if total else 0.0


@dataclasses.dataclass(frozen=True)
class Effect:
  """A number with what is known about it.

  Attributes:
    estimate: the value and its 95 % interval.
    parts: of the error; empty without an interval, or without an error.
    trainings: number of trainings of each row, the smaller one.
  """

  estimate: Estimate
  parts: Parts = ()
  trainings: int = 1

  @property
  def detectable(self) -> float | None:
    """The smallest true effect that is found with a probability of 80 %.

    Found: its 95 % interval excludes zero.
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


def effects(found: Linear) -> list[Effect]:
  """Returns numbers without bounds, such as means and differences."""
  return [
    _effect(found, value, value - half, value + half, parts)
    for value, parts in zip(found.value, variance(found), strict=True)
    for half in [reach(parts, _TAIL)]
  ]


def rates(found: Linear, trials: Sequence[float] | None = None) -> list[Effect]:
  """Returns numbers in [0, 1], with Wilson's interval.

  The number of trials of Wilson's formula is that of independent trials with
  the same variance (Rao and Scott 1992). If no question varies it is the number
  of questions, as if all answers to a question were one.

  Args:
    found: rates, or averages of rates.
    trials: for each rate, its number of trials, which the number of
      independent ones does not exceed; None: no bound.
  """
  closed = tuple(np.zeros_like(part) for part in found.answer)
  without = dataclasses.replace(found, answer=closed, answers=closed)
  out = []
  for place, (value, parts) in enumerate(
    zip(found.value, variance(without), strict=True)
  ):
    total, independent = sum(v for v, _ in parts), value * (1 - value)
    if np.isnan(value) or (np.isnan(total) and len(found.cluster) > 1):
      out.append(_effect(found, value, np.nan, np.nan, parts))
      continue
    n, at = float(found.asked), _NORMAL
    if np.isnan(total):  # There is one cluster.
      n = 1.0
    elif independent > 1e-12 and total > 0:
      # The jackknife's variance of one trial a question is p (1 - p) / (n - 1).
      n, at = independent / total + 1, reach(parts, _TAIL) / total**0.5
    if trials is not None and n >= trials[place] * (1 - 1e-9):
      n, at = float(trials[place]), _NORMAL
    out.append(_effect(found, value, *score(value, n, at), parts))
  return out


def _effect(
  found: Linear, value: float, low: float, high: float, parts: Parts
) -> Effect:
  if np.isnan(value):
    return UNKNOWN
  if np.isnan(low):
    return Effect(Estimate(float(value), None, None))
  _, trainings = np.unique(found.group, return_counts=True)
  known = () if np.isnan(sum(v for v, _ in parts)) else parts
  ends = Estimate(float(value), float(low), float(high))
  return Effect(ends, known, int(trainings.min()))


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
