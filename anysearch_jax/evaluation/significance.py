"""Tests of paired differences, and what many tests at once cost."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np

_EXACT = 12  # Questions up to which every assignment of signs is looked at.
_CHUNK = 4_000_000  # Signs held at once: bounds memory, not the result.


def mcnemar(wins: int, losses: int, *, mid: bool = True) -> float:
  """McNemar's exact test of two discordant counts, two-sided.

  Pairs must be independent: one episode of each row a question.

  Args:
    wins: pairs where only the first is right.
    losses: pairs where only the second is.
    mid: the mid-p variant, which is not conservative (Fagerland 2013); False
      for the exact binomial test.

  Returns:
    The p value, 1 without any discordant pair.

  Raises:
    ValueError: a negative count.
  """
  if min(wins, losses) < 0:
    raise ValueError(
      f"Found {wins} wins and {losses} losses, expected counts from 0 on."
    )
  n, few = wins + losses, min(wins, losses)
  tail = math.fsum(_binomial(k, n) for k in range(few + 1))
  if mid:
    return min(1.0, 2 * tail - _binomial(few, n)) if n else 1.0
  return min(1.0, 2 * tail)


def _binomial(k: int, n: int) -> float:
  """P(k heads of n fair coins)."""
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
  """Permutation tests of differences between two rows, two-sided.

  Under the null hypothesis a question's episodes could as well be the other
  row's: whole questions are exchanged between the rows. All tests see the same
  exchanges. Exact up to 12 questions, else by seeded draws, where the observed
  assignment counts as one of them.

  Args:
    ours, theirs: float `[N, K]`, K sums for each of N >= 1 questions.
    statistic: maps both rows' totals, each `[R, D, K]`, to S differences
      `[R, S]` that change their sign when the rows are exchanged; nan is
      undefined.
    stratum: int `[N]`, the stratum of each question, all of [0, D); None: one.
    draws: random exchanges.
    seed: of the draws.

  Returns:
    p values `[S]`; nan where the observed difference is not defined. Exchanges
    under which it is not defined are left out.
  """
  questions = len(ours)
  if stratum is None:
    stratum = np.zeros(questions, dtype=np.int64)
  masks = [stratum == code for code in range(int(stratum.max()) + 1)]
  sums = [(ours + theirs)[mask].sum(axis=0) for mask in masks]
  gaps = [(ours - theirs)[mask] for mask in masks]

  def differences(signs: np.ndarray) -> np.ndarray:
    gap = np.stack(
      [signs[:, m] @ g for m, g in zip(masks, gaps, strict=True)], axis=1
    )
    both = np.stack(sums)
    return np.abs(statistic((both + gap) / 2, (both - gap) / 2))

  observed = differences(np.ones((1, questions)))[0]
  # Sums in another order differ in the last bits; equal must count as equal.
  bound = observed * (1 - 1e-9) - 1e-12
  exact = questions <= _EXACT
  reached, defined = np.zeros(len(observed)), np.zeros(len(observed))
  for signs in _all(questions) if exact else _drawn(questions, draws, seed):
    found = differences(signs)
    reached += (found >= bound).sum(axis=0)
    defined += (~np.isnan(found)).sum(axis=0)
  extra = 0 if exact else 1
  p = (reached + extra) / np.maximum(defined + extra, 1)
  return np.where(np.isnan(observed), np.nan, p)


def _all(questions: int) -> Iterator[np.ndarray]:
  bits = np.arange(2**questions)[:, None] >> np.arange(questions) & 1
  yield 1.0 - 2.0 * bits


def _drawn(questions: int, draws: int, seed: int) -> Iterator[np.ndarray]:
  rng = np.random.default_rng(seed)
  step = max(1, _CHUNK // questions)
  for start in range(0, draws, step):
    shape = min(step, draws - start), questions
    yield 1.0 - 2.0 * rng.integers(2, size=shape, dtype=np.int8)


def holm(p_values: Sequence[float]) -> np.ndarray:
  """Holm's correction: the chance of any false claim in the family.

  Args:
    p_values: `[M]`; nan is no test and stays nan.

  Returns:
    Adjusted p values `[M]`, in the order given.
  """
  return _adjusted(
    p_values, lambda p, m: np.maximum.accumulate(p * (m - np.arange(m)))
  )


def benjamini_hochberg(p_values: Sequence[float]) -> np.ndarray:
  """Benjamini and Hochberg's: the share of false claims among the claims.

  Args:
    p_values: `[M]`; nan is no test and stays nan.

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
  p_values: Sequence[float],
  rule: Callable[[np.ndarray, int], np.ndarray],
) -> np.ndarray:
  p = np.asarray(p_values, dtype=np.float64)
  adjusted = np.full(p.shape, np.nan)
  tested = np.flatnonzero(~np.isnan(p))
  order = tested[np.argsort(p[tested], kind="stable")]
  adjusted[order] = np.minimum(1.0, rule(p[order], len(order)))
  return adjusted
