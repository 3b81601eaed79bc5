"""The best use of a search budget in the generated world, exactly.

The agent reads the relations of a question, and knows the statistics of the
world: how often each relation is in memory, how often that memory is right, how
often a search misses or finds two values. What it searches is decided by
dynamic programming over the facts that are left and the searches that are left.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from anysearch_jax.world import expert
from anysearch_jax.world import relations as relations_lib
from anysearch_jax.world import world as world_lib

# Searching must be better by more than rounding errors.
_TIE = 1e-9


class Odds(NamedTuple):
  """Probabilities of a relation's facts.

  Attributes:
    known: memory holds the fact.
    right: what memory holds is true.
    guess: a guess is true.
    twin: a fact that memory does not hold has a false twin.
  """

  known: float
  right: float
  guess: float
  twin: float


class Optimum:
  """A strategy that maximises P(right answer) - price E[searches].

  A wrong value leads to a wrong answer, whatever follows: the few exceptions
  are ignored. So is that some facts of one entity exclude each other's twins.

  Args:
    world: its statistics are the agent's.
    price: of a search, >= 0, where a right answer is worth 1.
  """

  def __init__(self, world: world_lib.World, *, price: float = 0.0):
    if not price >= 0:
      raise ValueError(f"Found the price {price}; expected at least 0.")
    self._price = price
    self._miss = world.config.alternative
    self._odds = relation_odds(world)
    self._values: dict[tuple[tuple[str, ...], int, float], float] = {}

  def __call__(self, situation: expert.Situation) -> float:
    """Returns 1 if searching is best in this situation, otherwise 0."""
    if not situation.remaining:
      return 0.0
    search, stop = self._options(
      situation.decision,
      situation.known,
      situation.relations,
      situation.remaining,
      self._confidence(situation.settled),
    )
    return float(search > stop + _TIE)

  def value(self, relations: tuple[str, ...], searches: int) -> float:
    """Returns the maximum for a chain of facts with this budget."""
    return self._value(relations, searches, 1.0)

  def options(
    self, decision: str, known: bool, relations: tuple[str, ...], searches: int
  ) -> tuple[float, float]:
    """Returns the maxima after searching and after not searching.

    Args:
      decision, known, relations: as in `expert.Situation`; all facts before
        this one are settled rightly.
      searches: that are left.
    """
    return self._options(decision, known, relations, searches, 1.0)

  def _confidence(self, settled: tuple[tuple[str, str], ...]) -> float:
    """Returns P(all values so far are right)."""
    if not self._price:
      return 1.0  # The best decisions then do not depend on it.
    q = 1.0
    for relation, how in settled:
      odds = self._odds[relation]
      q *= {
        "found": 1.0,
        "recall": odds.right,
        "guess": odds.guess,
        "choice": 0.5,
      }[how]
    return q

  def _value(self, relations: tuple[str, ...], r: int, q: float) -> float:
    """Returns the maximum with r searches left, if all is right with prob. q.

    Without a decision left, P(right answer) is q.
    """
    if not relations:
      return q
    key = relations, r, q
    if key not in self._values:
      known = self._odds[relations[0]].known
      self._values[key] = known * max(
        self._options("known", True, relations, r, q)
      ) + (1 - known) * max(self._options("unknown", False, relations, r, q))
    return self._values[key]

  def _options(
    self,
    decision: str,
    known: bool,
    relations: tuple[str, ...],
    r: int,
    q: float,
  ) -> tuple[float, float]:
    """Returns the values of searching and of not searching."""
    odds, rest = self._odds[relations[0]], relations[1:]

    def best(decision: str, r: int) -> float:
      return max(self._options(decision, known, relations, r, q))

    def found(r: int) -> float:
      one = self._value(rest, r, q)
      if known:
        return one
      return (1 - odds.twin) * one + odds.twin * best("conflict", r)

    if decision == "conflict":
      stop = self._value(rest, r, q / 2)
    else:
      stop = self._value(rest, r, q * (odds.right if known else odds.guess))
    if not r:
      return -np.inf, stop
    match decision:
      case "conflict":
        search = self._value(rest, r - 1, q)
      case "miss":
        search = found(r - 1)
      case _:
        search = (1 - self._miss) * found(r - 1)
        search += self._miss * best("miss", r - 1)
    return search - self._price, stop


def search_unknown(situation: expert.Situation) -> float:
  """Searches for every fact that memory does not hold, until it is certain."""
  return float(not situation.known)


def search_everything(situation: expert.Situation) -> float:
  """Searches for every fact, until it is certain."""
  del situation
  return 1.0


def relation_odds(world: world_lib.World) -> dict[str, Odds]:
  """Returns the statistics of each relation, over the training snapshots."""
  snapshots = [world.snapshot(i) for i in world.split_snapshots("train")]
  odds = {}
  for r, relation in enumerate(relations_lib.ALL):
    subjects = np.array(world.members[relation.subject])
    known = world.known[subjects, r]
    twins = np.stack([s.twins[subjects, r] >= 0 for s in snapshots])
    unknown = twins[:, ~known]
    odds[relation.name] = Odds(
      known=float(known.mean()),
      right=world.reliability(relation.name),
      guess=1 / len(world.members[relation.object]),
      twin=float(unknown.mean()) if unknown.size else 0.0,
    )
  return odds
