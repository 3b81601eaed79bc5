"""Tests of paired differences, and corrections for multiple tests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
from scipy import stats

from anysearch_jax.evaluation import inference

_EXACT = 12  # Up to this number of questions, all sign assignments are tested.
_CHUNK = 4_000_000  # Numbers held at once: bounds memory, not the result.


def mcnemar(wins: int, losses: int) -> float:
  """Returns the two-sided mid-p value of McNemar's test of discordant counts.

  Pairs must be independent: one episode of each row for each question. The
  mid-p variant is less conservative than the exact test (Fagerland et al. 2013,
  https://doi.org/10.1186/1471-2288-13-91). It is 1 without discordant pairs.
  """
  if not wins + losses:
    return 1.0
  exact = stats.binomtest(wins, wins + losses).pvalue
  middle = stats.binom.pmf(wins, wins + losses, 0.5)
  return float(min(1.0, exact - middle)) if wins != losses else 1.0


def null_scores(
  ours: Sequence[np.ndarray], theirs: Sequence[np.ndarray]
) -> np.ndarray:
  """Linearises differences of ratios under the hypothesis that they are equal.

  Args:
    ours, theirs: numerators and denominators, float `[N, C]` each.

  Returns:
    float `[N, C]`: scores of the questions, which add up to the observed
    differences and have mean 0 if both ratios are that of the rows together.
  """
  common = inference.ratio(*np.sum([ours, theirs], axis=(0, 2)))
  with np.errstate(divide="ignore", invalid="ignore"):
    mine, other = (
      (top - common * bottom) / bottom.sum(axis=0)
      for top, bottom in (ours, theirs)
    )
  return mine - other


def sign_flips(
  scores: Sequence[np.ndarray], *, draws: int = 10_000, seed: int = 0
) -> np.ndarray:
  """Returns two-sided p values of no difference, by flipping signs.

  If two rows do not differ, a question's score is as likely to be positive as
  negative. This tests equal values of a measure, not equal behaviour: rows of
  equal productivity may search differently. Flips are exact up to 12
  questions; beyond, they are drawn, and the observed signs count as one draw.

  Args:
    scores: for each of D datasets, float `[N, C]`, see `null_scores`; nan where
      a difference is undefined.
    draws: number of random assignments of signs.
    seed: seed of the draws.

  Returns:
    p values `[1 + D, C]`: of the mean over datasets, then of each dataset; nan
    where undefined.
  """
  ends = np.cumsum([len(part) for part in scores])
  exact = ends[-1] <= _EXACT

  def differences(signs: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore"):  # Undefined scores stay nan.
      parts = np.stack(
        [
          signs[:, end - len(part) : end].astype(float) @ part
          for end, part in zip(ends, scores, strict=True)
        ],
        axis=1,
      )
    together = parts.mean(axis=1, keepdims=True)
    return np.abs(np.concatenate([together, parts], axis=1))

  observed = differences(np.ones((1, ends[-1])))[0]
  # A different summation order changes the last bits; the tolerance lets equal
  # differences count as equal.
  bound = observed * (1 - 1e-9) - 1e-12
  reached, count = np.zeros(observed.shape), 0
  for signs in _all(ends[-1]) if exact else _drawn(ends[-1], draws, seed):
    reached += (differences(signs) >= bound).sum(axis=0)
    count += len(signs)
  extra = 0 if exact else 1
  p = (reached + extra) / (count + extra)
  return np.where(np.isnan(observed), np.nan, p)


def _all(questions: int) -> Iterator[np.ndarray]:
  bits = np.arange(2**questions)[:, None] >> np.arange(questions) & 1
  yield 1.0 - 2.0 * bits


def _drawn(questions: int, draws: int, seed: int) -> Iterator[np.ndarray]:
  """Yields random signs, 1 or -1, int8 `[r, N]` for `draws` rows in blocks.

  Tests over equally many questions and of one seed use the same signs.
  """
  rng = np.random.default_rng(seed)
  step = max(1, _CHUNK // questions)
  for start in range(0, draws, step):
    shape = min(step, draws - start), questions
    yield 1 - 2 * rng.integers(2, size=shape, dtype=np.int8)


def between_trainings(
  ours: np.ndarray, theirs: np.ndarray, *, paired: bool
) -> np.ndarray:
  """Returns p values of equal methods, by exchanging whole trainings.

  All exchanges are made if there are at most 10,000, otherwise as many random
  ones. Three trainings against three cannot reach a p value below .1, four
  against four .029.

  Args:
    ours, theirs: float `[R, S]`, values of each training.
    paired: whether the rows have the same trainings, in the same order.

  Returns:
    p values `[S]`; nan where a value is undefined or a row has one training.
  """
  if min(len(ours), len(theirs)) < 2:
    return np.full(ours.shape[1], np.nan)
  found = stats.permutation_test(
    (ours, theirs),
    lambda x, y, axis: x.mean(axis=axis) - y.mean(axis=axis),
    permutation_type="samples" if paired else "independent",
    n_resamples=10_000,
    vectorized=True,
    axis=0,
    rng=np.random.default_rng(0),
  )
  undefined = np.isnan(ours).any(axis=0) | np.isnan(theirs).any(axis=0)
  return np.where(undefined, np.nan, found.pvalue)


def holm(p_values: npt.ArrayLike) -> np.ndarray:
  """Returns Holm's adjustment, which controls the family-wise error rate.

  Args:
    p_values: `[M]`; NaN entries are skipped and returned as NaN.

  Returns:
    Adjusted p values `[M]`, in the order given.
  """
  p = np.array(p_values, dtype=np.float64)
  order = np.argsort(p)[: np.count_nonzero(~np.isnan(p))]  # NaN come last.
  scaled = p[order] * np.arange(len(order), 0, -1)
  p[order] = np.minimum(1.0, np.maximum.accumulate(scaled))
  return p
