"""Uncertainty of what is measured: Wilson and a bootstrap over questions."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

import chex
import numpy as np

_CHUNK = 1_000_000  # Draws held at once: bounds memory, not the result's shape.


class Estimate(NamedTuple):
  """A value and its interval; None where it is not defined."""

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
  """Wilson's score interval of a rate.

  Args:
    successes: in [0, n].
    n: independent trials, >= 0; with none the interval is all of [0, 1].
    confidence: in (0, 1).

  Raises:
    ValueError: successes outside [0, n].
  """
  if not 0 <= successes <= n:
    raise ValueError(f"Found {successes} successes, expected 0 to n = {n}.")
  if n == 0:
    return Estimate(None, 0.0, 1.0)
  z = statistics.NormalDist().inv_cdf((1 + confidence) / 2)
  rate = successes / n
  center = (rate + z**2 / (2 * n)) / (1 + z**2 / n)
  half = z * (rate * (1 - rate) / n + z**2 / (4 * n**2)) ** 0.5 / (1 + z**2 / n)
  return Estimate(rate, max(0.0, center - half), min(1.0, center + half))


def ratio(numerator: np.ndarray, denominator: np.ndarray) -> np.ndarray:
  """numerator / denominator; nan, never infinite, where nothing divides."""
  numerator, denominator = np.broadcast_arrays(numerator, denominator)
  result = np.full(numerator.shape, np.nan)
  np.divide(numerator, denominator, out=result, where=denominator > 0)
  return result


def cluster_sums(
  cluster: np.ndarray, columns: Sequence[np.ndarray], *, clusters: int
) -> np.ndarray:
  """Sums `columns` within clusters.

  Args:
    cluster: int `[P]`, in [0, clusters).
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
  confidence: float = 0.95,
  resamples: int = 10_000,
  seed: int = 0,
) -> list[Estimate]:
  """Percentile intervals from resampling whole questions.

  A question is drawn with all its budgets, seeds and both compared rows, so
  that what they share stays together (a paired, clustered bootstrap). Equal
  arguments give equal intervals.

  Args:
    sums: float `[N, K]`, K sums for each of N >= 1 questions.
    statistic: maps totals `[R, K]` to values `[R, S]`; nan is undefined.
    confidence: in (0, 1).
    resamples: R >= 1.
    seed: of the draws.

  Returns:
    S estimates. Where the statistic is not defined on the sample, or on more
    than 1 - confidence of the resamples, there is no interval.
  """
  chex.assert_rank(sums, 2)
  questions = sums.shape[0]
  rng = np.random.default_rng(seed)
  step = max(1, _CHUNK // questions)
  totals = np.concatenate(
    [
      _counts(rng, min(step, resamples - start), questions) @ sums
      for start in range(0, resamples, step)
    ]
  )
  values = statistic(sums.sum(axis=0, keepdims=True))[0]
  return [
    _percentiles(float(value), column, confidence)
    for value, column in zip(values, statistic(totals).T, strict=True)
  ]


def _counts(
  rng: np.random.Generator, resamples: int, questions: int
) -> np.ndarray:
  """How often each resample draws each question, float64 `[R, N]`."""
  draws = rng.integers(questions, size=(resamples, questions))
  draws += np.arange(resamples)[:, None] * questions
  counts = np.bincount(draws.ravel(), minlength=resamples * questions)
  return counts.reshape(resamples, questions).astype(np.float64)


def _percentiles(
  value: float, resampled: np.ndarray, confidence: float
) -> Estimate:
  if np.isnan(value):
    return Estimate(None, None, None)
  defined = resampled[~np.isnan(resampled)]
  if len(defined) < confidence * len(resampled):
    return Estimate(value, None, None)
  tail = (1 - confidence) / 2
  low, high = np.quantile(defined, [tail, 1 - tail])
  return Estimate(value, float(low), float(high))
