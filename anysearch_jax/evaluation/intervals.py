"""Estimates, Wilson's interval, and sums by question."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

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
  if not n:
    return Estimate(None, 0.0, 1.0)
  at = statistics.NormalDist().inv_cdf((1 + confidence) / 2)
  return Estimate(successes / n, *score(successes / n, n, at))


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
