"""Confidence intervals of measures whose independent samples are questions.

Rates have Wilson's interval, ratios have the delta method's, and everything
else is bootstrapped over whole questions.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from anysearch_jax.evaluation import draws

# Drawing the count of one kind costs about as much as drawing 16 questions.
_PER_KIND = 16
NOTHING = (None, None, None)


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


def wilson(successes: int, n: int, *, confidence: float = 0.95) -> Estimate:
  """Returns Wilson's score interval of a rate.

  Args:
    successes: number of successes, in [0, n].
    n: number of independent trials, >= 0; for 0 the interval is [0, 1].
    confidence: coverage of the interval, in (0, 1).

  Raises:
    ValueError: `successes` is outside [0, n].
  """
  if not 0 <= successes <= n:
    raise ValueError(f"Found {successes} successes, expected 0 to n = {n}.")
  return _wilson(successes / n if n else 0.0, n, confidence)


def clustered_rate(
  successes: np.ndarray, n: np.ndarray, *, confidence: float = 0.95
) -> Estimate:
  """Returns Wilson's interval of a rate over trials that share questions.

  The number of trials is divided by the design effect: the ratio of the rate's
  variance with clusters of questions to that with independent trials, at least
  1. With one trial for each question this is Wilson's interval. If the rate is
  0 or 1, all trials of a question are assumed to be identical.

  Args:
    successes: float `[N]`, number of successes of each question.
    n: float `[N]`, number of trials of each question, >= 0.
    confidence: coverage of the interval, in (0, 1).
  """
  trials = float(n.sum())
  if not trials:
    return Estimate(None, 0.0, 1.0)
  rate = float(successes.sum()) / trials
  if np.isnan(rate):
    return Estimate(*NOTHING)
  independent = rate * (1 - rate) * trials
  residuals = successes - rate * n
  # The effective number of trials is n divided by the design effect (Rao and
  # Scott 1992). If the rate is 0 or 1 there is no variance to compare; assume
  # the worst case, in which all trials of a question are identical.
  shared = residuals @ residuals if independent > 0 else n @ n
  effect = max(1.0, float(shared) / (independent or trials))
  return _wilson(rate, trials / effect, confidence)


def _wilson(rate: float, n: float, confidence: float) -> Estimate:
  if n == 0:
    return Estimate(None, 0.0, 1.0)
  z = statistics.NormalDist().inv_cdf((1 + confidence) / 2)
  center = (rate + z**2 / (2 * n)) / (1 + z**2 / n)
  half = z * (rate * (1 - rate) / n + z**2 / (4 * n**2)) ** 0.5 / (1 + z**2 / n)
  return Estimate(rate, max(0.0, center - half), min(1.0, center + half))


def delta(
  numerator: np.ndarray, denominator: np.ndarray, *, confidence: float = 0.95
) -> Estimate:
  """Returns a ratio of two sums with the delta method's interval.

  The variance is the cluster-robust variance of a ratio of means. A mean is the
  ratio whose denominators are counts.

  Args:
    numerator, denominator: float `[N]`, sums of each question.
    confidence: coverage of the interval, in (0, 1).

  Returns:
    The estimate. All of it is None if the denominator's sum is zero or a value
    is nan; the interval is None with fewer than two questions.
  """
  total = float(denominator.sum())
  value = float(numerator.sum()) / total if total > 0 else np.nan
  if np.isnan(value):
    return Estimate(*NOTHING)
  questions = len(numerator)
  if questions < 2:
    return Estimate(value, None, None)
  residuals = numerator - value * denominator
  variance = residuals @ residuals / total**2 * questions / (questions - 1)
  z = statistics.NormalDist().inv_cdf((1 + confidence) / 2)
  half = z * float(variance) ** 0.5
  return Estimate(value, value - half, value + half)


def ratio(numerator: np.ndarray, denominator: np.ndarray) -> np.ndarray:
  """Returns numerator / denominator; nan where the denominator is not > 0."""
  numerator, denominator = np.broadcast_arrays(numerator, denominator)
  result = np.full(numerator.shape, np.nan)
  np.divide(numerator, denominator, out=result, where=denominator > 0)
  return result


def cluster_sums(
  cluster: np.ndarray, columns: Sequence[np.ndarray], *, clusters: int
) -> np.ndarray:
  """Sums `columns` within clusters.

  Args:
    cluster: int `[P]`, the cluster of each episode, in [0, clusters).
    columns: K arrays `[P]`.
    clusters: number of clusters N.

  Returns:
    float64 `[N, K]`.
  """
  return np.stack(
    [np.bincount(cluster, c, minlength=clusters) for c in columns], axis=-1
  )


def bootstrap(
  sums: np.ndarray,
  statistic: Callable[[np.ndarray], np.ndarray],
  *,
  stratum: np.ndarray | None = None,
  confidence: float = 0.95,
  resamples: int = 10_000,
  seed: int = 0,
) -> list[Estimate]:
  """Returns percentile intervals from resampling whole questions.

  A question is drawn together with all its budgets and seeds, in both compared
  rows (a paired, clustered bootstrap). With strata, every resample keeps the
  number of questions of each stratum, because an evaluation fixes these
  numbers. Equal arguments give equal intervals.

  Args:
    sums: float `[N, K]`, K sums for each of N >= 1 questions.
    statistic: maps totals `[R, K]`, or `[R, D, K]` with strata, to values
      `[R, S]`; nan means undefined.
    stratum: int `[N]`, the stratum of each question; every number in [0, D)
      occurs.
    confidence: coverage of the intervals, in (0, 1).
    resamples: R, the number of resamples, >= 1.
    seed: seed of the draws.

  Returns:
    S estimates. An estimate has no interval if the statistic is undefined on
    the sample, or on more than 1 - confidence of the resamples.
  """
  if sums.ndim != 2:
    raise ValueError(
      f"Found sums of shape {list(sums.shape)}, expected [N, K]: K sums for "
      "each of N questions."
    )
  rng = np.random.default_rng(seed)
  if stratum is None:
    observed, totals = _resample(rng, sums, resamples)
  else:
    parts = [
      _resample(rng, sums[stratum == code], resamples)
      for code in range(int(stratum.max()) + 1)
    ]
    observed, totals = (np.stack(part, axis=1) for part in zip(*parts))
  values = statistic(observed)[0]
  return [
    _percentiles(float(value), column, confidence)
    for value, column in zip(values, statistic(totals).T, strict=True)
  ]


def _resample(
  rng: np.random.Generator, sums: np.ndarray, resamples: int
) -> tuple[np.ndarray, np.ndarray]:
  """Returns the observed totals `[1, K]` and those of resamples `[R, K]`."""
  observed = sums.sum(axis=0, keepdims=True)
  questions = len(sums)
  kinds, times = np.unique(sums, axis=0, return_counts=True)
  if len(kinds) * _PER_KIND <= questions:
    # Questions with equal sums are interchangeable, so a resample is described
    # by the number of questions of each kind: one multinomial draw.
    drawn = rng.multinomial(questions, times / questions, size=resamples)
    return observed, drawn @ kinds
  return observed, draws.resampled_totals(rng, sums, resamples)


def _percentiles(
  value: float, resampled: np.ndarray, confidence: float
) -> Estimate:
  if np.isnan(value):
    return Estimate(*NOTHING)
  defined = resampled[~np.isnan(resampled)]
  if len(defined) < confidence * len(resampled):
    return Estimate(value, None, None)
  tail = (1 - confidence) / 2
  low, high = np.quantile(defined, [tail, 1 - tail])
  return Estimate(value, float(low), float(high))
