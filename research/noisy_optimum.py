"""The best decisions in the noisy world, exactly.

What an agent knows is a few counters: for each value, whether memory holds it
and how many passages of either search stated it. Values with equal counters are
alike, so a belief is a sorted tuple of counters, and the decisions follow from
dynamic programming over beliefs and the searches that are left.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import NamedTuple

from research import noisy_world as world

ANSWER, STAY_SILENT = "answer", "abstain"
ENDS = (ANSWER, STAY_SILENT)
_COUNT = len(world.VALUES)
# Searching must be better by more than rounding errors.
_TIE = 1e-9


class Belief(NamedTuple):
  """What is known of a question.

  Attributes:
    trust: P(memory holds the answer | there is one); 0 without a memory.
    counters: sorted, for each value that memory holds or a passage stated:
      whether memory holds it, and the numbers of cheap and of dear passages.
  """

  trust: float
  counters: tuple[tuple[int, int, int], ...]


class Posterior(NamedTuple):
  """P(answer) of each value of `Belief.counters`, of each other value, and the
  probability that there is no answer."""

  listed: tuple[float, ...]
  other: float
  none: float

  @property
  def best(self) -> float:
    """P(right) of the most probable value."""
    return max(*self.listed, self.other, 0.0)


def begin(trust: float) -> Belief:
  """Returns what is known before the first search."""
  return Belief(trust, ((1, 0, 0),) if trust else ())


@functools.cache
def posterior(belief: Belief) -> Posterior:
  """Returns the probabilities by Bayes' rule."""
  shown = [sum(each[1 + s] for each in belief.counters) for s in (0, 1)]

  def weight(held: int, *stated: int) -> float:
    prior = 1 / _COUNT
    if belief.trust:
      prior = belief.trust if held else (1 - belief.trust) / (_COUNT - 1)
    for source, n, of in zip(world.SOURCES, stated, shown):
      right = world.RIGHT[source]
      prior *= right**n * ((1 - right) / (_COUNT - 1)) ** (of - n)
    return (1 - world.NO_ANSWER) * prior

  listed = [weight(*each) for each in belief.counters]
  unlisted = _COUNT - len(listed)
  other = weight(0, 0, 0) if unlisted else 0.0
  none = world.NO_ANSWER * _COUNT ** -float(sum(shown))
  total = sum(listed) + unlisted * other + none
  return Posterior(
    tuple(w / total for w in listed), other / total, none / total
  )


def after(belief: Belief, index: int | None, source: str) -> Belief:
  """Returns the belief after a passage that states a value.

  `index` is the value's in `counters`; None: it is not there yet.
  """
  counters = list(belief.counters)
  held, cheap, dear = (0, 0, 0) if index is None else counters.pop(index)
  more = source == world.CHEAP
  counters.append((held, cheap + more, dear + (not more)))
  return Belief(belief.trust, tuple(sorted(counters)))


@functools.cache
def value(belief: Belief, left: int) -> float:
  """Returns the largest expected reward from here on, with `left` searches."""
  return max(options(belief, left).values())


@functools.cache
def options(belief: Belief, left: int) -> Mapping[str, float]:
  """Returns what each decision is worth, the best ones following it.

  `answer` is that with the most probable value; without searches left, there
  are no searches.
  """
  known = posterior(belief)
  found = {ANSWER: known.best, STAY_SILENT: world.ABSTAIN}
  for source in world.SOURCES if left else ():
    right = world.RIGHT[source]

    def states(p: float, right: float = right) -> float:
      """P(the passage states a value that is the answer with probability p)."""
      wrong = (1 - right) / (_COUNT - 1) * (1 - p - known.none)
      return right * p + wrong + known.none / _COUNT

    cases: list[tuple[float, int | None]] = [
      (states(p), i) for i, p in enumerate(known.listed)
    ]
    if unlisted := _COUNT - len(known.listed):
      cases.append((unlisted * states(known.other), None))
    found[source] = -world.CHARGE[source] + sum(
      p * value(after(belief, i, source), left - 1) for p, i in cases
    )
  return found


def best(belief: Belief, left: int) -> str:
  """Returns the best decision; of equal ones, the first of `options`."""
  found = options(belief, left)
  top = max(found.values())
  return next(name for name, worth in found.items() if worth > top - _TIE)


def mean_value(budget: int) -> float:
  """Returns the optimum's expected reward, over the relations."""
  each = [value(begin(trust), budget) for trust in world.TRUST.values()]
  return sum(each) / len(each)
