"""Tests of paired differences, and corrections for multiple tests."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from anysearch_jax.evaluation import draws as draws_lib

_EXACT = 12  # Up to this number of questions, all sign assignments are tested.


def mcnemar(wins: int, losses: int, *, mid: bool = True) -> float:
  """Returns the two-sided p value of McNemar's test of discordant counts.

  Pairs must be independent: one episode of each row for each question.

  Args:
    wins: number of pairs in which only the first is right.
    losses: number of pairs in which only the second is right.
    mid: True for the mid-p variant, which is less conservative (Fagerland et
      al. 2013, https://doi.org/10.1186/1471-2288-13-91); False for the exact
      binomial test.

  Returns:
    The p value; 1 without discordant pairs.

  Raises:
    ValueError: a count is negative.
  """
  if min(wins, losses) < 0:
    raise ValueError(
      f"Found {wins} wins and {losses} losses, expected counts of at least 0."
    )
  n, few = wins + losses, min(wins, losses)
  tail = math.fsum(_binomial(k, n) for k in range(few + 1))
  if mid:
    return min(1.0, 2 * tail - _binomial(few, n)) if n else 1.0
  return min(1.0, 2 * tail)


def _binomial(k: int, n: int) -> float:
  """Returns the probability of k heads among n fair coins."""
  return math.exp(
    math.lgamma(n + 1)
    - math.lgamma(k + 1)
    - math.lgamma(n - k + 1)
    - n * math.log(2)
  )


def sign_flips(
  ours: np.ndarray,
  theirs: np.ndarray,
  statistic: Callable[[np.ndarray, np.ndarray], np.ndarray],
  *,
  stratum: np.ndarray | None = None,
  draws: int = 10_000,
  seed: int = 0,
) -> np.ndarray:
  """Returns p values of two-sided permutation tests between two rows.

  Under the null hypothesis the rows are exchangeable within a question, so a
  permutation swaps the rows of a random subset of questions. All S tests use
  the same permutations. The test is exact up to 12 questions; beyond, it uses
  seeded random permutations and counts the observed assignment as one of them.

  Args:
    ours, theirs: float `[N, K]`, K sums for each of N >= 1 questions.
    statistic: maps both rows' totals, each `[R, D, K]`, to S differences
      `[R, S]`; they must change sign if the rows are exchanged; nan means
      undefined.
    stratum: int `[N]`, the stratum of each question; every number in [0, D)
      occurs. None: a single stratum.
    draws: number of random permutations.
    seed: seed of the draws.

  Returns:
    p values `[S]`; nan where the observed difference is undefined. Permutations
    with an undefined difference are left out.
  """
  questions = len(ours)
  if stratum is None:
    stratum = np.zeros(questions, dtype=np.int64)
  masks = [stratum == code for code in range(int(stratum.max()) + 1)]
  sums = [(ours + theirs)[mask].sum(axis=0) for mask in masks]
  gaps = [(ours - theirs)[mask] for mask in masks]

  def differences(signs: np.ndarray) -> np.ndarray:
    # Selecting all columns of a mask would copy them.
    parts = [signs] if len(masks) == 1 else [signs[:, m] for m in masks]
    gap = np.stack(
      [draws_lib.product(p, g) for p, g in zip(parts, gaps, strict=True)],
      axis=1,
    )
    both = np.stack(sums)
    return np.abs(statistic((both + gap) / 2, (both - gap) / 2))

  observed = differences(np.ones((1, questions)))[0]
  # A different summation order changes the last bits; the tolerance lets equal
  # differences count as equal.
  bound = observed * (1 - 1e-9) - 1e-12
  exact = questions <= _EXACT
  reached, defined = np.zeros(len(observed)), np.zeros(len(observed))
  for signs in (
    _all(questions) if exact else draws_lib.signs(questions, draws, seed)
  ):
    found = differences(signs)
    reached += (found >= bound).sum(axis=0)
    defined += (~np.isnan(found)).sum(axis=0)
  extra = 0 if exact else 1
  p = (reached + extra) / np.maximum(defined + extra, 1)
  return np.where(np.isnan(observed), np.nan, p)


def _all(questions: int) -> Iterator[np.ndarray]:
  bits = np.arange(2**questions)[:, None] >> np.arange(questions) & 1
  yield 1.0 - 2.0 * bits


def holm(p_values: npt.ArrayLike) -> np.ndarray:
  """Returns Holm's adjustment, which controls the family-wise error rate.

  Args:
    p_values: `[M]`; NaN entries are skipped and returned as NaN.

  Returns:
    Adjusted p values `[M]`, in the order given.
  """
  return _adjusted(
    p_values, lambda p, m: np.maximum.accumulate(p * (m - np.arange(m)))
  )


def benjamini_hochberg(p_values: npt.ArrayLike) -> np.ndarray:
  """Returns Benjamini and Hochberg's adjustment: the false discovery rate.

  Args:
    p_values: `[M]`; NaN entries are skipped and returned as NaN.

  Returns:
    Adjusted p values `[M]`, in the order given.
  """
  return _adjusted(
    p_values,
    lambda p, m: np.minimum.accumulate((p * m / np.arange(1, m + 1))[::-1])[
      ::-1
    ],
  )


def _adjusted(
  p_values: npt.ArrayLike,
  rule: Callable[[np.ndarray, int], np.ndarray],
) -> np.ndarray:
  p = np.asarray(p_values, dtype=np.float64)
  adjusted = np.full(p.shape, np.nan)
  tested = np.flatnonzero(~np.isnan(p))
  order = tested[np.argsort(p[tested], kind="stable")]
  adjusted[order] = np.minimum(1.0, rule(p[order], len(order)))
  return adjusted
