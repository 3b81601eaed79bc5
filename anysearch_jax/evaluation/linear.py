"""Ratios of sums, linearised: what each question and training contributes.

A ratio y / x of sums moves by about (y_q - (y / x) x_q) / x if question q is
left out, and exactly by that over 1 - x_q / x. These scores add up over
weighted sums of ratios, so averages over sets, areas under curves and
differences of rows have scores too. `inference` makes intervals of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from anysearch_jax.evaluation import intervals


@dataclasses.dataclass(frozen=True, eq=False)
class Linear:
  """S numbers, and how much each question and each training moves them.

  The numbers are weighted sums of ratios. D strata hold different questions.

  Attributes:
    value: float `[S]`; nan where undefined.
    question: for each stratum, float `[N, S]`, jackknife scores of questions.
    run: float `[R, S]`, jackknife scores of trainings.
    both: for each stratum, float `[R, N, S]`, scores of a training on a
      question.
    answer: for each stratum, float `[S]`: how much a number moves if a single
      answer changes; 0 for numbers without answers.
    answers: for each stratum, float `[S]`: how much it moves if all answers to
      one question change.
    runs: names of the R trainings.
    group: int `[R]`; trainings with equal numbers are draws of one method.
  """

  value: np.ndarray
  question: tuple[np.ndarray, ...]
  run: np.ndarray
  both: tuple[np.ndarray, ...]
  answer: tuple[np.ndarray, ...]
  answers: tuple[np.ndarray, ...]
  runs: tuple[str, ...]
  group: np.ndarray

  def combined(self, weights: np.ndarray) -> Linear:
    """Returns the sums of the numbers with `weights`, float `[T, S]`."""

    return self._each(
      lambda x: _weighted(x, weights), lambda x: _weighted(x, np.abs(weights))
    )

  def columns(self, chosen: slice | Sequence[int]) -> Linear:
    """Returns some of the numbers."""

    def some(x: np.ndarray) -> np.ndarray:
      return x[..., chosen]

    return self._each(some, some)

  def _each(
    self,
    of: Callable[[np.ndarray], np.ndarray],
    size: Callable[[np.ndarray], np.ndarray],
  ) -> Linear:
    """Maps the arrays: `size` those of magnitudes, `of` all others."""
    return dataclasses.replace(
      self,
      value=of(self.value),
      question=tuple(map(of, self.question)),
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
) -> Linear:
  """Linearises C ratios of sums over R trainings and N questions.

  Args:
    numerator, denominator: float `[R, N, C]`, 0 where a training did not play
      a question.
    runs: names of the trainings.
    trials: float `[N, C]`, number of answers behind each numerator, which is
      their number of right ones; None: the numerators do not count answers.
  """
  total = denominator.sum(axis=(0, 1))
  value = intervals.ratio(numerator.sum(axis=(0, 1)), total)
  with np.errstate(divide="ignore", invalid="ignore"):
    both = (numerator - value * denominator) / total
    # Leaving out a question changes the denominator too; a question with all
    # of the denominator cannot be left out, and leaves nan.
    question = both.sum(axis=0) / (1 - denominator.sum(axis=0) / total)
    run = both.sum(axis=1) / (1 - denominator.sum(axis=1) / total)
    if trials is None:
      answer = answers = np.zeros_like(total)
    else:
      answer = np.where(total > 0, 1 / total, np.nan)
      answers = answer * trials.sum(axis=0) / np.maximum(len(trials), 1)
  question[~np.isfinite(question)] = np.nan
  run[~np.isfinite(run)] = np.nan
  return Linear(
    value,
    (question,),
    run,
    (both,),
    (answer,),
    (answers,),
    tuple(runs),
    np.zeros(len(runs), dtype=np.int64),
  )


def average(parts: Sequence[Linear]) -> Linear:
  """Returns the unweighted mean of numbers of different questions."""
  scale = 1 / len(parts)

  def joined(name: str) -> tuple[np.ndarray, ...]:
    return tuple(scale * x for part in parts for x in getattr(part, name))

  return dataclasses.replace(
    parts[0],
    value=scale * np.sum([part.value for part in parts], axis=0),
    question=joined("question"),
    run=scale * np.sum([part.run for part in parts], axis=0),
    both=joined("both"),
    answer=joined("answer"),
    answers=joined("answers"),
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

  return Linear(
    ours.value - theirs.value,
    tuple(a - b for a, b in zip(ours.question, theirs.question, strict=True)),
    joined(ours.run, theirs.run),
    tuple(map(joined, ours.both, theirs.both)),
    tuple((a + b) / 2 for a, b in zip(ours.answer, theirs.answer, strict=True)),
    tuple(
      (a + b) / 2 for a, b in zip(ours.answers, theirs.answers, strict=True)
    ),
    (
      *shared,
      *(ours.runs[i] for i in mine),
      *(theirs.runs[i] for i in other),
    ),
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
