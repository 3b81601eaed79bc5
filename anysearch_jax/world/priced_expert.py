"""A scripted expert of the generated world with a cheap and a dear search.

It thinks as the expert of `expert` does, and begins each thought with the money
that is left, `remaining= n ;`, in cents. A query for the cheap search begins
with `priced_tools.MARK`.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from anysearch_jax import types
from anysearch_jax.environment import priced_tools
from anysearch_jax.world import expert
from anysearch_jax.world import relations as relations_lib
from anysearch_jax.world import world as world_lib

SETTLE, RECALL, CHEAP, DEAR = ACTIONS = ("settle", "recall", "cheap", "dear")


class Cents(NamedTuple):
  """Prices of the two searches, in cents."""

  cheap: int = 1
  dear: int = 3


class Fact(NamedTuple):
  """What is known about a fact.

  Attributes:
    relation: of the fact.
    known: whether memory holds it.
    cheap: what the cheap search gave: "" if it was not asked; `nothing`;
      `agrees` or `differs`, a value compared with memory; `value`, if memory
      holds none. After a conflict, a value that is neither of the two counts as
      nothing.
    dear: what the dear search gave: "" if it was not asked, `missed` after the
      usual wording, `conflict` for two values, `found`.
  """

  relation: str
  known: bool
  cheap: str = ""
  dear: str = ""

  @property
  def has_value(self) -> bool:
    """Whether the cheap search gave a value that still counts."""
    return self.cheap not in ("", "nothing")

  @property
  def actions(self) -> tuple[str, ...]:
    """What may be done about the fact while there is money."""
    found = []
    if self.has_value or self.dear == "conflict":
      found.append(SETTLE)
    if self.dear != "conflict" and self.cheap != "value":
      found.append(RECALL)
    if not self.cheap:
      found.append(CHEAP)
    return (*found, DEAR)


# As in configs/priced_tools.py.
CENTS = Cents()


class Situation(NamedTuple):
  """What a decision depends on.

  Attributes:
    fact: that is needed now.
    rest: relations of the facts that follow.
    money: cents left.
    settled: the earlier facts as they were settled, with the action that did
      (`settle`, `recall` or `dear`).
  """

  fact: Fact
  rest: tuple[str, ...]
  money: int
  settled: tuple[tuple[Fact, str], ...]


# Returns probabilities of actions; those that are impossible do not count.
Strategy = Callable[[Situation], Mapping[str, float]]
_Value = Generator[expert.Turn, Sequence[types.Passage] | None, str]


class PricedExpert:
  """Writes the turns of one episode.

  Args:
    question: a chain of facts.
    world: its memory is the expert's.
    money: cents, >= 0.
    cents: prices of the searches.
    strategy: decides.
    rng: random numbers of the decisions.
    p_beyond: probability of asking a search that the money does not pay for,
      at most once an episode.
  """

  def __init__(
    self,
    question: types.Question,
    *,
    world: world_lib.World,
    money: int,
    cents: Cents,
    strategy: Strategy,
    rng: np.random.Generator,
    p_beyond: float = 0.0,
  ):
    self._chain = question.text.split()[:-1]
    self._world, self._money, self._cents = world, money, cents
    self._strategy, self._rng = strategy, rng
    self._p_beyond = p_beyond
    self._settled: tuple[tuple[Fact, str], ...] = ()

  def turns(self) -> expert.Turns:
    """Yields turns; send it a search's passages, or None if it was refused."""
    entity, *relations = self._chain
    self._open()
    for hop, relation in enumerate(relations, 1):
      entity = yield from self._resolve(entity, relation, relations[hop:])
    self._turn.words.extend(("</think>", "<answer>"))
    self._turn.write(entity, "answer")
    self._turn.words.append("</answer>")
    yield self._turn

  def _resolve(self, entity: str, relation: str, rest: Sequence[str]) -> _Value:
    """Finds, recalls or guesses one value."""
    memory = self._world.recall(entity, relation)
    fact = Fact(relation, memory is not None)
    seen: list[str] = []  # By the cheap search.
    both: list[str] = []  # Of a conflict.
    self._turn.clause("need", entity, (relation, "relation"))
    action = self._choose(fact, rest, "first")
    while True:
      if action == SETTLE:
        self._settled += ((fact, action),)
        if fact.dear != "conflict":
          return seen[0]
        chosen = seen[0] if fact.has_value else both[self._rng.integers(2)]
        self._turn.clause(("guess", "choice"), chosen)
        return chosen
      if action == RECALL:
        self._settled += ((fact, action),)
        return self._unsearched(relation, memory)
      passages = yield from self._search(entity, fact, action)
      if passages is None:
        self._open()
        self._turn.clause("need", entity, (relation, "relation"))
        action = self._choose(fact, rest, "choice", refused=True)
        continue
      values = _values(passages, entity, fact, action)
      self._open()
      if action == CHEAP:
        fact = _after_cheap(fact, values, memory, both)
        seen = values
      elif len(values) == 1:
        self._turn.clause(("found", "found"), (values[0], "copy"))
        self._settled += ((fact._replace(dear="found"), DEAR),)
        return values[0]
      elif values:
        both = values
        cheap = fact.cheap
        if fact.has_value and seen[0] not in values:
          cheap = "nothing"
        fact = fact._replace(cheap=cheap, dear="conflict")
      else:
        fact = fact._replace(dear="missed")
      action = self._report(entity, fact, rest, action, values)

  def _report(
    self,
    entity: str,
    fact: Fact,
    rest: Sequence[str],
    action: str,
    values: Sequence[str],
  ) -> str:
    """Writes what a search showed, and returns the next action."""
    if len(values) == 2:
      self._turn.clause(("conflict", "conflict"))
    elif values:
      self._turn.clause(("found", "found"), (values[0], "copy"))
    else:
      self._turn.clause(("nothing", "nothing"))
    asked = action
    action = self._choose(fact, rest, "choice")
    if action != SETTLE or fact.dear == "conflict":
      wording = fact.relation if action == CHEAP else _wording(fact)
      kind = "choice" if asked == CHEAP and values else ""
      self._turn.clause(("need", kind), entity, (wording, "relation"))
    return action

  def _unsearched(self, relation: str, memory: str | None) -> str:
    if memory is not None:
      self._turn.clause(("recall", self._kind), (memory, "memory"))
      return memory
    members = self._world.objects(relation)
    value = members[int(self._rng.integers(len(members)))]
    self._turn.clause(("guess", self._kind), value)
    return value

  def _choose(
    self, fact: Fact, rest: Sequence[str], kind: str, *, refused: bool = False
  ) -> str:
    """Draws an action; `kind` is that of its mark.

    After a refusal, no search that the money does not pay for is asked.
    """
    prices = {CHEAP: self._cents.cheap, DEAR: self._cents.dear}
    chances = self._strategy(
      Situation(fact, tuple(rest), self._money, self._settled)
    )
    beyond = not refused and self._rng.random() < self._p_beyond
    chances = {
      action: chance
      for action, chance in chances.items()
      if chance > 0
      and action in fact.actions
      and (beyond or prices.get(action, 0) <= self._money)
    }
    if kind == "first":
      kind = "recall_known" if fact.known else "recall_unknown"
    self._kind = kind if self._money >= self._cents.cheap else "choice"
    if not chances:
      return SETTLE if SETTLE in fact.actions else RECALL
    ends = list(itertools.accumulate(chances.values()))
    at = bisect.bisect_right(ends, self._rng.random() * ends[-1])
    action = list(chances)[min(at, len(ends) - 1)]
    if prices.get(action, 0) > self._money:
      self._p_beyond = 0.0
    return action

  def _search(
    self, entity: str, fact: Fact, action: str
  ) -> Generator[
    expert.Turn, Sequence[types.Passage] | None, Sequence[types.Passage] | None
  ]:
    """Ends the turn with a search; returns its passages, None if refused."""
    cheap = action == CHEAP
    self._turn.write("</think>", self._kind)
    self._turn.words.append("<search>")
    if cheap:
      self._turn.write(priced_tools.MARK, "tool")
      self._turn.words.append(entity)
    else:
      self._turn.write(entity, "tool")
    wording = fact.relation if cheap else _wording(fact)
    self._turn.words.extend((wording, "</search>"))
    passages = yield self._turn
    if passages is not None:
      self._money -= self._cents.cheap if cheap else self._cents.dear
    return passages

  def _open(self) -> None:
    self._turn = expert.Turn(["<think>"], [])
    self._turn.clause("remaining=", (str(self._money), "money"))


def _wording(fact: Fact) -> str:
  """Returns how the dear search is asked next."""
  if fact.dear == "conflict":
    return world_lib.VERDICT
  relation = relations_lib.ALL[relations_lib.INDEX[fact.relation]]
  return relation.alternative if fact.dear else relation.name


def _after_cheap(
  fact: Fact, values: Sequence[str], memory: str | None, both: Sequence[str]
) -> Fact:
  """Returns the fact after the cheap search gave one value or none."""
  if not values or (both and values[0] not in both):
    return fact._replace(cheap="nothing")
  if memory is None:
    return fact._replace(cheap="value")
  return fact._replace(cheap="agrees" if values[0] == memory else "differs")


def _values(
  passages: Sequence[types.Passage], entity: str, fact: Fact, action: str
) -> list[str]:
  """Returns the distinct values that a search showed of a fact."""
  if action == DEAR and fact.dear == "conflict":
    return expert.values_of(passages, entity, (world_lib.VERDICT,))
  relation = relations_lib.ALL[relations_lib.INDEX[fact.relation]]
  return expert.values_of(
    passages, entity, (relation.name, relation.alternative)
  )
