"""The best use of cents in the generated world with two searches, exactly.

The agent knows the statistics of the world and of the cheap search. What it
does is decided by dynamic programming over the facts that are left, the cents
that are left and what it knows of the present fact.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from anysearch_jax.world import (
  cheap_retrieval,
  optimum,
  priced_expert,
)
from anysearch_jax.world import relations as relations_lib
from anysearch_jax.world import world as world_lib

SETTLE, RECALL, CHEAP, DEAR = priced_expert.ACTIONS
# An action must be better by more than rounding errors. Of equal ones the first
# in the order of `_PREFERRED` is taken, which costs least.
_TIE = 1e-9
_PREFERRED = (SETTLE, RECALL, CHEAP, DEAR)


class _Odds(NamedTuple):
  """Probabilities of a relation's facts.

  Attributes:
    known: memory holds the fact.
    memory: what memory holds is true.
    guess: a guess is true.
    twin: a fact that memory does not hold has a false twin.
    right, wrong: the cheap search states the truth, or another value.
    others: number of values that a wrong one is drawn from.
  """

  known: float
  memory: float
  guess: float
  twin: float
  right: float
  wrong: float
  others: int


class Outcome(NamedTuple):
  """What a way to play brings: P(right answer) and E[cents]."""

  right: float
  cents: float


class PricedOptimum:
  """A strategy that maximises P(right answer) - price E[cents].

  A wrong value leads to a wrong answer, whatever follows: the few exceptions
  are ignored. So is that some facts of one entity exclude each other's twins.

  Args:
    world: its statistics are the agent's.
    cents: prices of the searches.
    tools: those that the agent may use, `cheap` and `dear`.
    price: of a cent, >= 0, where a right answer is worth 1.
    odds: of the cheap search.

  Raises:
    ValueError: the price is negative or a tool is unknown.
  """

  def __init__(
    self,
    world: world_lib.World,
    *,
    cents: priced_expert.Cents = priced_expert.CENTS,
    tools: Sequence[str] = (CHEAP, DEAR),
    price: float = 0.0,
    odds: Mapping[str, cheap_retrieval.Odds] | None = None,
  ):
    if not price >= 0:
      raise ValueError(f"Found the price {price}; expected at least 0.")
    if unknown := {*tools} - {CHEAP, DEAR}:
      raise ValueError(
        f"Found the tool {min(unknown)!r}; expected {CHEAP!r} or {DEAR!r}."
      )
    self._cents = {CHEAP: cents.cheap, DEAR: cents.dear}
    self._tools, self._price = frozenset(tools), price
    self._miss = world.config.alternative
    self._odds = _odds(world, cheap_retrieval.ODDS if odds is None else odds)
    self._chain = functools.cache(self._chain_uncached)
    self._fact = functools.cache(self._fact_uncached)

  def __call__(self, situation: priced_expert.Situation) -> Mapping[str, float]:
    """Returns the best action, with probability 1."""
    s = situation
    q = 1.0
    if self._price:  # Otherwise decisions do not depend on it.
      for fact, action in s.settled:
        q *= self.right(fact, action)
    return {self._best(self.actions(s.fact, s.rest, s.money, q)): 1.0}

  def outcome(self, relations: Sequence[str], money: int) -> Outcome:
    """Returns what the strategy brings for a chain with this many cents."""
    return self._chain(tuple(relations), money, 1.0)

  def value(self, relations: Sequence[str], money: int) -> float:
    """Returns the maximum for a chain of facts with this many cents."""
    return self._worth(self.outcome(relations, money))

  def right(self, fact: priced_expert.Fact, action: str) -> float:
    """Returns P(the value is right) if a fact is settled by an action."""
    o = self._odds[fact.relation]
    if action == DEAR:
      return 1.0
    if fact.dear == "conflict":
      # A wrong value of the cheap search is the twin once in `others` times.
      if fact.has_value:
        return o.right / (o.right + o.wrong / o.others)
      return 0.5
    if not fact.has_value:
      return o.memory if fact.known else o.guess
    if fact.cheap == "value":
      return o.right / (o.right + o.wrong)
    agrees = o.memory * o.right + (1 - o.memory) * o.wrong / o.others
    if fact.cheap == "agrees":
      return o.memory * o.right / agrees
    differs = o.right + o.wrong - agrees
    if action == RECALL:
      return o.memory * o.wrong / differs
    return (1 - o.memory) * o.right / differs

  def actions(
    self,
    fact: priced_expert.Fact,
    rest: tuple[str, ...],
    money: int,
    q: float = 1.0,
  ) -> dict[str, Outcome]:
    """Returns what each possible action brings if the best ones follow.

    Args:
      fact, rest, money: see `priced_expert.Situation`.
      q: probability that all facts before this one are right.
    """
    found = {}
    for action in fact.actions:
      if action in (SETTLE, RECALL):
        found[action] = self._then(rest, money, q, self.right(fact, action))
      elif action in self._tools and self._cents[action] <= money:
        search = self._cheap if action == CHEAP else self._dear
        paid = self._cents[action]
        after = search(fact, rest, money - paid, q)
        found[action] = after._replace(cents=after.cents + paid)
    return found

  def _worth(self, outcome: Outcome) -> float:
    return outcome.right - self._price * outcome.cents

  def _best(self, found: Mapping[str, Outcome]) -> str:
    """Returns the action of the largest value; of equal ones the cheapest."""
    least = max(map(self._worth, found.values())) - _TIE
    best = (a for a in _PREFERRED if a in found)
    return next(a for a in best if self._worth(found[a]) >= least)

  def _then(
    self, rest: tuple[str, ...], money: int, q: float, p: float
  ) -> Outcome:
    """Returns what follows a fact that is right with probability p."""
    if self._price:
      return self._chain(rest, money, q * p)
    right, cents = self._chain(rest, money, 1.0)
    return Outcome(q * p * right, cents)

  def _chain_uncached(
    self, relations: tuple[str, ...], money: int, q: float
  ) -> Outcome:
    """Returns the best for facts of which nothing is known yet."""
    if not relations:
      return Outcome(q, 0.0)
    name, rest = relations[0], relations[1:]
    known = self._odds[name].known
    first = priced_expert.Fact(name, True)
    return _mean(
      (known, self._fact(first, rest, money, q)),
      (1 - known, self._fact(first._replace(known=False), rest, money, q)),
    )

  def _fact_uncached(
    self,
    fact: priced_expert.Fact,
    rest: tuple[str, ...],
    money: int,
    q: float,
  ) -> Outcome:
    found = self.actions(fact, rest, money, q)
    return found[self._best(found)]

  def _cheap(
    self,
    fact: priced_expert.Fact,
    rest: tuple[str, ...],
    money: int,
    q: float,
  ) -> Outcome:
    """Returns the mean over what the cheap search gives, after it is paid."""
    return _mean(
      *(
        (p, self._fact(fact._replace(cheap=found), rest, money, q))
        for found, p in self.cheap_outcomes(fact).items()
        if p > 0
      )
    )

  def cheap_outcomes(self, fact: priced_expert.Fact) -> dict[str, float]:
    """Returns the probability of each outcome of asking the cheap search."""
    o = self._odds[fact.relation]
    some = o.right + o.wrong
    if fact.dear == "conflict":
      among = o.right + o.wrong / o.others
      return {"value": among, "nothing": 1 - among}
    if not fact.known:
      return {"value": some, "nothing": 1 - some}
    agrees = o.memory * o.right + (1 - o.memory) * o.wrong / o.others
    return {"agrees": agrees, "differs": some - agrees, "nothing": 1 - some}

  def _dear(
    self,
    fact: priced_expert.Fact,
    rest: tuple[str, ...],
    money: int,
    q: float,
  ) -> Outcome:
    """Returns the mean over what the dear search gives, after it is paid."""
    found = settled = self._then(rest, money, q, 1.0)
    if fact.dear == "conflict":
      return settled
    if not fact.known:
      twin = self._odds[fact.relation].twin
      found = _mean(
        (1 - twin, settled),
        *(
          (twin * p, self._fact(each, rest, money, q))
          for each, p in self.conflicts(fact).items()
        ),
      )
    if fact.dear == "missed":
      return found
    missed = self._fact(fact._replace(dear="missed"), rest, money, q)
    return _mean((1 - self._miss, found), (self._miss, missed))

  def conflicts(
    self, fact: priced_expert.Fact
  ) -> dict[priced_expert.Fact, float]:
    """Returns the states after a conflict, with their probabilities."""
    clash = fact._replace(dear="conflict")
    if not fact.has_value:
      return {clash: 1.0}
    o = self._odds[fact.relation]
    among = (o.right + o.wrong / o.others) / (o.right + o.wrong)
    return {clash: among, clash._replace(cheap="nothing"): 1 - among}


def _mean(*parts: tuple[float, Outcome]) -> Outcome:
  """Returns the mean of outcomes with these probabilities."""
  return Outcome(
    sum(p * each.right for p, each in parts),
    sum(p * each.cents for p, each in parts),
  )


def _odds(
  world: world_lib.World, cheap: Mapping[str, cheap_retrieval.Odds]
) -> dict[str, _Odds]:
  """Returns the statistics of each relation, over the training snapshots."""
  found = {}
  for name, o in optimum.relation_odds(world).items():
    relation = relations_lib.ALL[relations_lib.INDEX[name]]
    same = relation.subject == relation.object
    found[name] = _Odds(
      o.known,
      o.right,
      o.guess,
      o.twin,
      *cheap[name],
      others=len(world.members[relation.object]) - 1 - same,
    )
  return found
