"""Inference for ratios of sums over questions, seeds and trainings.

Every number of a report is a weighted sum of ratios with linearised scores
(`linear`), so one variance serves rates, means, tool productivity, averages
over sets, areas and differences.

Questions and trainings are crossed: every training plays every question. The
variance of a number is then that between questions, plus that between
trainings, minus that of their interaction, which both contain (Cameron,
Gelbach and Miller 2011, https://doi.org/10.1198/jbes.2010.07136). Scores are
those of the jackknife (Efron and Stein 1981), which leave out one question or
one training: with few of them the plain residuals are too small.

Each of the two variances has its own Student quantile, and the reach of an
interval is the root of the sum of squares of both parts (Howe 1974,
https://doi.org/10.1080/01621459.1974.10480177). Degrees of freedom of the sum,
by Satterthwaite, are too many if the few trainings happen to agree: with three
they cover .92 instead of .95.

With one training nothing is known about others: the interval then covers the
choice of questions and the policy's own draws, and is of this policy only.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
from scipy import optimize, special

from anysearch_jax.evaluation import intervals, linear

CONFIDENCE = 0.95
POWER = 0.8  # Of the smallest detectable effect.
_NORMAL = float(special.ndtri((1 + CONFIDENCE) / 2))
_SMALLEST = 1e-15  # P values are at least this.


@dataclasses.dataclass(frozen=True, eq=False)
class Variance:
  """The variance of S numbers and its parts; float `[S]` each.

  Attributes:
    questions: variance between questions, which contains the interaction.
    trainings: variance between trainings without the interaction; 0 if every
      method has one training.
    interaction: variance of trainings on questions, with that of evaluation
      seeds inside it.
    of_questions, of_trainings: degrees of freedom of the first two.
  """

  questions: np.ndarray
  trainings: np.ndarray
  interaction: np.ndarray
  of_questions: np.ndarray
  of_trainings: np.ndarray

  @property
  def total(self) -> np.ndarray:
    """The variance: at least that of these trainings on other questions."""
    return self.questions + self.trainings

  def reach(self, tail: float) -> np.ndarray:
    """Returns the half-width of an interval with `tail` on each side."""
    questions = special.stdtrit(self.of_questions, tail)
    trainings = special.stdtrit(self.of_trainings, tail)
    return np.sqrt(
      questions**2 * self.questions + trainings**2 * self.trainings
    )


def variance(found: linear.Linear) -> Variance:
  """Returns the variance of each number, by question and by training."""
  asked = _questions(found)
  trained = [
    _trainings(found, found.group == group) for group in np.unique(found.group)
  ]
  apart = [np.maximum(spread - inner, 0.0) for spread, inner, _ in trained]
  freedom = [max(count - 1, 1) for *_, count in trained]
  return Variance(
    np.sum([part for part, _ in asked], axis=0),
    np.sum(apart, axis=0),
    np.sum([inner for _, inner, _ in trained], axis=0),
    _satterthwaite(*zip(*asked, strict=True)),
    _satterthwaite(apart, freedom),
  )


def _questions(found: linear.Linear) -> list[tuple[np.ndarray, int]]:
  """Returns the variance between questions of each stratum, and its freedom."""
  out = []
  for scores, one, whole in zip(
    found.question, found.answer, found.answers, strict=True
  ):
    n = len(scores)
    if n < 2:
      out.append((np.full(len(found.value), np.nan), 1))
      continue
    spread = (n - 1) / n * ((scores - scores.mean(axis=0)) ** 2).sum(axis=0)
    # Two answers that change, one for the better and one for the worse, keep
    # an interval open where few questions vary (after Bonett and Price 2012);
    # where none varies, all answers to a question may change together.
    change = np.where(spread > 0, one, whole)
    out.append((spread + 2 * change**2, n - 1))
  return out


def _trainings(
  found: linear.Linear, own: np.ndarray
) -> tuple[np.ndarray, np.ndarray, int]:
  """Returns the variance between trainings, its interaction, their number."""
  count = int(own.sum())
  spread, interaction = np.zeros((2, len(found.value)))
  if count < 2:
    return spread, interaction, count
  runs = found.run[own]
  spread = ((runs - runs.mean(axis=0)) ** 2).sum(axis=0) * (count - 1) / count
  for scores in found.both:
    n = scores.shape[1]
    inner = scores[own] - scores[own].mean(axis=0)
    inner = inner - inner.mean(axis=1, keepdims=True)
    scale = count / (count - 1) * n / max(n - 1, 1)
    interaction = interaction + scale * (inner**2).sum(axis=(0, 1))
  return spread, interaction, count


def _satterthwaite(
  parts: Sequence[np.ndarray], freedom: Sequence[int]
) -> np.ndarray:
  """Returns the degrees of freedom of a sum of variances of one kind.

  https://doi.org/10.2307/3002019
  """
  each = [part**2 / df for part, df in zip(parts, freedom, strict=True)]
  squares = np.sum(each, axis=0)
  with np.errstate(divide="ignore", invalid="ignore"):
    found = np.sum(parts, axis=0) ** 2 / squares
  return np.where(squares > 0, found, max(freedom))


@dataclasses.dataclass(frozen=True)
class Effect:
  """A number with what is known about it.

  Attributes:
    estimate: the value and its 95 % interval.
    parts: variance and degrees of freedom of each part of the error; empty
      without an interval.
  """

  estimate: intervals.Estimate
  parts: tuple[tuple[float, float], ...] = ()

  def reach(self, tail: float) -> float:
    """Returns the half-width of an interval with `tail` on each side."""
    return math.sqrt(
      sum(special.stdtrit(df, tail) ** 2 * v for v, df in self.parts)
    )

  @property
  def detectable(self) -> float | None:
    """The smallest true effect that is found with a probability of 80 %.

    Found: its 95 % interval excludes zero.
    """
    if not self.parts:
      return None
    return self.reach((1 - CONFIDENCE) / 2) + self.reach(1 - POWER)

  @property
  def p(self) -> float | None:
    """The two-sided p value of no effect."""
    one = self._tail(0.0)
    return None if one is None else 2 * min(one, 1 - one)

  def not_below(self, bound: float) -> float | None:
    """Returns the one-sided p value of an effect of at most `bound`.

    A small value shows that the effect is larger than `bound`.
    """
    return self._tail(bound)

  def within(self, margin: float) -> float | None:
    """Returns the p value of two one-sided tests (Schuirmann 1987).

    A small value shows that the effect lies within `margin` of zero. A lack of
    data cannot make it small. https://doi.org/10.1007/BF01068419

    Args:
      margin: largest effect that counts as none, > 0.
    """
    below, above = self._tail(-margin), self._tail(margin)
    return None if below is None or above is None else max(below, 1 - above)

  def _tail(self, bound: float) -> float | None:
    """Returns the tail whose one-sided interval just reaches `bound`."""
    if not self.parts or self.estimate.value is None:
      return None
    gap = self.estimate.value - bound
    if not gap:
      return 0.5
    if self.reach(_SMALLEST) <= abs(gap):
      tail = _SMALLEST if self.reach(0.25) else 0.0
    else:
      tail = math.exp(
        optimize.brentq(
          lambda log: self.reach(math.exp(log)) - abs(gap),
          math.log(_SMALLEST),
          math.log(0.5),
        )
      )
    return tail if gap > 0 else 1 - tail


UNKNOWN = Effect(intervals.Estimate(*intervals.NOTHING))


def effects(found: linear.Linear) -> list[Effect]:
  """Returns numbers without bounds, such as means and differences."""
  spread = variance(found)
  reach = spread.reach((1 - CONFIDENCE) / 2)
  return [
    _effect(value, value - half, value + half, parts)
    for value, half, parts in zip(
      found.value, reach, _parts(spread), strict=True
    )
  ]


def rates(
  found: linear.Linear, trials: Sequence[float] | None = None
) -> list[Effect]:
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
  spread = variance(dataclasses.replace(found, answer=closed, answers=closed))
  reach = spread.reach((1 - CONFIDENCE) / 2)
  count = sum(len(scores) for scores in found.question)
  out = []
  for place, (value, total, half, parts) in enumerate(
    zip(found.value, spread.total, reach, _parts(spread), strict=True)
  ):
    if np.isnan(value) or (np.isnan(total) and len(found.question) > 1):
      out.append(_effect(value, np.nan, np.nan, parts))
      continue
    independent = value * (1 - value)
    n, at = float(count), _NORMAL
    if independent > 1e-12 and total > 0:
      # The jackknife's variance of one trial a question is p (1 - p) / (n - 1).
      n = independent / total * count / max(count - 1, 1)
      at = half / total**0.5
    if trials is not None and n >= trials[place] * (1 - 1e-9):
      n, at = float(trials[place]), _NORMAL
    out.append(_effect(value, *intervals.score(value, n, at), parts))
  return out


def _parts(spread: Variance) -> list[tuple[tuple[float, float], ...]]:
  """Returns the parts of each number's error, see `Effect`."""
  return [
    ((float(a), float(b)), (float(c), float(d)))
    for a, b, c, d in zip(
      spread.questions,
      spread.of_questions,
      spread.trainings,
      spread.of_trainings,
      strict=True,
    )
  ]


def _effect(
  value: float,
  low: float,
  high: float,
  parts: tuple[tuple[float, float], ...],
) -> Effect:
  if np.isnan(value):
    return UNKNOWN
  if np.isnan(low):
    return Effect(intervals.Estimate(float(value), None, None))
  ends = intervals.Estimate(float(value), float(low), float(high))
  return Effect(ends, tuple(part for part in parts if part[0] > 0))
