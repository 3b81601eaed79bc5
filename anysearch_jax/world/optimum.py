"""The best use of a search budget in the generated world.

The agent knows what memory holds of every entity, and the statistics of the
world: how often a memory is right, how often a search misses or finds two
values. It may search the facts of a question in any order, and come back to a
fact that it has passed by memory. It answers what is most likely by all that it
knows, also where it has lost the chain.

What it does is decided by dynamic programming. A state is a hop of the chain,
the doubts that were left behind and the searches left. Its value is an array
over the entities that may stand there; `Optimum` says what it neglects.

A question names its snapshot, so everything that an agent sees is known:
`accuracy` is computed without a retriever.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from anysearch_jax.world import world as world_lib

# Searching must be better by more than rounding errors.
_TIE = 1e-9
_BUDGET = 8  # Searches that are computed at once; more if more are asked for.
_KEPT = 6000  # States that each cache keeps, of a few KB each.

Chain = tuple[str, ...]  # Names of relations.
Fact = tuple[int, int]  # Indices of an entity and of a relation.
# Kinds of doubt: a value is from memory; from memory, and a search missed it;
# or one of the two that were found.
_MEMORY, _MISSED, _CHOICE = "memory", "missed", "choice"
# What was left behind: hops, ascending, and their kinds of doubt, in capitals
# if a fact after the hop was found.
_Doubts = tuple[tuple[int, str], ...]


class Odds(NamedTuple):
  """What an agent knows of a relation's facts; n subjects, m possible values.

  Attributes:
    subjects, values: their indices.
    known: bool `[n]`, memory holds the fact.
    memory: int `[n]`, which of the values; 0 if it does not.
    right: P(a memory is right).
    twin: `[n]`, P(a fact that memory does not hold has a false twin).
    step: `[n, m]`, P(value) before any search.
  """

  subjects: range
  values: range
  known: np.ndarray
  memory: np.ndarray
  right: float
  twin: np.ndarray
  step: np.ndarray


class Move(NamedTuple):
  """A search, or the answer.

  Attributes:
    value: P(right answer) - price E[searches], if all that follows is best.
    fact: that is searched, of this relation; None: the answer.
    wording: of the search.
  """

  value: float
  fact: Fact | None = None
  relation: str = ""
  wording: str = ""


class Optimum:
  """The agent that maximises P(right answer) - price E[searches].

  It searches for facts of the most likely chain only. Its values neglect that
  an entity occurs once in a chain. Where it comes back to a fact and finds
  another value, it forgets what it found after that fact, and takes the mean
  over all m values, which is off by their spread / m. The answer is the most
  likely one by all that was found.

  Args:
    world: its memory and its statistics are the agent's.
    price: of a search, >= 0, where a right answer is worth 1.
  """

  def __init__(self, world: world_lib.World, *, price: float = 0.0):
    if not price >= 0:
      raise ValueError(f"Found the price {price}; expected at least 0.")
    self.world, self._price = world, price
    self._odds, self._most = relation_odds(world), _BUDGET
    self.play = functools.cache(self.play)  # type: ignore[method-assign]
    self._forget()

  def value(self, start: str, chain: Chain, searches: int) -> float:
    """Returns the maximum, for the relations `chain` from an entity on."""
    return self.moves(start, chain, searches, {})[0].value

  def moves(
    self,
    start: str,
    chain: Chain,
    searches: int,
    found: Mapping[Fact, Sequence[int]],
  ) -> list[Move]:
    """Returns what the agent may do, the best first.

    Args:
      start, chain: the question.
      searches: that are left.
      found: by fact that was searched: no value after a miss, two values until
        the verdict is known, otherwise one.
    """
    if searches > self._most:
      self._most = searches
      self._forget()
    return self._moves(self.world.index[start], (), (), chain, searches, found)

  def answers(
    self, start: str, chain: Chain, found: Mapping[Fact, Sequence[int]]
  ) -> np.ndarray:
    """Returns P(right answer) of each entity, `[E]`; arguments: see `moves`."""
    chances = np.zeros(len(self.world.entities))
    chances[self.world.index[start]] = 1
    for name in chain:
      odds = self._odds[name]
      step = odds.step.copy()
      for (entity, r), values in found.items():
        if values and r == world_lib.INDEX[name]:
          row = step[entity - odds.subjects.start]
          row[:] = 0
          row[np.array(values) - odds.values.start] = 1 / len(values)
      after = chances[odds.subjects] @ step
      chances = np.zeros_like(chances)
      chances[odds.values] = after
    return chances

  def play(self, name: str, budget: int) -> tuple[float, int]:
    """Plays the question with this id.

    Returns:
      1 if the answer is right, otherwise 0; the number of searches.
    """
    snapshot, start, chain, answer = _asked(self.world, name)
    found: dict[Fact, tuple[int, ...]] = {}
    for left in range(budget, -1, -1):
      move = self.moves(start, chain, left, found)[0]
      if not move.fact:
        break
      query = f"{self.world.entities[move.fact[0]]} {move.wording}"
      shown = seen(self.world, snapshot, query)
      found[move.fact] = shown[move.fact, move.wording]
    right = self.answers(start, chain, found).argmax() == answer
    return float(right), budget - left

  def _forget(self) -> None:
    for name in ("_ends", "_value", "_best", "_fresh", "_found"):
      method = getattr(type(self), name).__get__(self)
      setattr(self, name, functools.lru_cache(_KEPT)(method))

  def _moves(
    self,
    entity: int,
    facts: tuple[Fact, ...],
    doubts: _Doubts,
    chain: Chain,
    searches: int,
    found: Mapping[Fact, Sequence[int]],
  ) -> list[Move]:
    """Returns the moves, with the facts of the chain up to this entity."""
    hop, missed = len(facts), False
    if hop < len(chain):
      odds = self._odds[chain[hop]]
      fact = entity, world_lib.INDEX[chain[hop]]
      facts = (*facts, fact)
      place, values = entity - odds.subjects.start, found.get(fact)
      missed = values is not None
      more = doubts
      if values:
        choice = ((hop, _CHOICE),) if len(values) > 1 else ()
        more = (*_passed(doubts), *choice)
      elif odds.known[place]:
        values = (odds.values[odds.memory[place]],)
        if odds.right < 1:
          more = (*doubts, (hop, _MISSED if missed else _MEMORY))
      if values:
        return max(
          (self._moves(v, facts, more, chain, searches, found) for v in values),
          key=lambda moves: moves[0].value,
        )
    else:
      place = entity - self._odds[chain[-1]].values.start
    made = []
    options = self._options(chain, doubts, hop, missed)
    for at, rows in options.items():
      value = rows[searches, place]
      if at < 0:
        made.append(Move(value))
      elif searches:
        name = chain[at]
        wording = world_lib.RELATIONS[facts[at][1]][:2][facts[at] in found]
        if dict(doubts).get(at, "").lower() == _CHOICE:
          wording = world_lib.VERDICT
        made.append(Move(value, facts[at], name, wording))
    best = made[0]
    for move in made[1:]:
      best = move if move.value > best.value + _TIE else best
    return [best, *(move for move in made if move is not best)]

  # Below, rows are values `[L + 1, n]`, by the searches left and by the entity
  # at a hop.

  def _options(
    self, chain: Chain, doubts: _Doubts, at: int, missed: bool
  ) -> dict[int, np.ndarray]:
    """Returns the rows of the answer, -1, and of a search for a hop's fact.

    Memory does not hold the fact of hop `at`, or this is the chain's end.
    """
    stop = self._stop(chain, doubts, at)
    options = {-1: np.tile(stop, (self._most + 1, 1))}

    miss = world_lib.ALTERNATIVE
    if at < len(chain):
      here = _shift(chain, doubts, at)
      found = self._found(*here)
      if not missed:
        found = (1 - miss) * found + miss * self._best(*here, True)
      options[at] = self._before(found)
    for i, (hop, kind) in enumerate(doubts):
      before, after = doubts[:i], doubts[i + 1 :]
      kept = self._kept(chain, (hop, kind))
      found = (1 - kept) * self._fresh(*_shift(chain, before, hop + 1))
      sure = _shift(chain, (*_passed(before), *after), at)
      found = found + kept * self._best(*sure, missed)
      if kind.lower() == _MEMORY:
        other = _MISSED if kind == _MEMORY else _MISSED.upper()
        again = (*before, (hop, other), *after)
        other_rows = self._best(chain, again, at, missed)
        found = (1 - miss) * found + miss * other_rows
      options[hop] = self._before(found)
    return options

  def _stop(self, chain: Chain, doubts: _Doubts, at: int) -> np.ndarray:
    """Returns P(right) of the most likely answer `[n]`."""
    right, others = 1.0, np.zeros(())
    for doubt in doubts:
      kept = self._kept(chain, doubt)
      mean = self._ends(chain[-1:], chain[doubt[0] + 1 :])[1]
      others = others + right * (1 - kept) * mean
      right *= kept
    return (right * self._ends(chain[-1:], chain[at:])[0] + others).max(1)

  def _ends(self, last: Chain, chain: Chain) -> tuple[np.ndarray, np.ndarray]:
    """Returns P(final value) `[n, m]` without a search, and its mean `[m]`."""
    odds = self._odds[(chain or last)[0]]
    ends = np.eye(len(odds.values))
    if chain:
      ends = odds.step @ self._ends(last, chain[1:])[0]
    return ends, ends.mean(0)

  def _kept(self, chain: Chain, doubt: tuple[int, str]) -> float:
    """Returns P(a value is right), or else any value is as likely as another.

    Where nothing was found after it, those others include the value itself.
    """
    hop, kind = doubt
    right = 0.5 if kind.lower() == _CHOICE else self._odds[chain[hop]].right
    m = len(self._odds[chain[hop]].values)
    return right if kind.isupper() else (m * right - 1) / (m - 1)

  def _best(
    self, chain: Chain, doubts: _Doubts, at: int, missed: bool
  ) -> np.ndarray:
    best, *others = self._options(chain, doubts, at, missed).values()
    for rows in others:
      best = np.where(rows > best + _TIE, rows, best)
    return best

  def _value(self, chain: Chain, doubts: _Doubts, at: int) -> np.ndarray:
    """Returns the best rows, with or without a memory of the fact at a hop."""
    if at == len(chain):
      return self._best(chain, doubts, at, False)
    odds = self._odds[chain[at]]
    more = (*doubts, (at, _MEMORY)) if odds.right < 1 else doubts
    rows = self._value(*_shift(chain, more, at + 1))[:, odds.memory]
    if odds.known.all():
      return rows
    return np.where(
      odds.known, rows, self._best(*_shift(chain, doubts, at), False)
    )

  def _fresh(self, chain: Chain, doubts: _Doubts, at: int) -> np.ndarray:
    """Returns the mean over all entities at a hop `[L + 1, 1]`."""
    return self._value(chain, doubts, at).mean(1, keepdims=True)

  def _found(self, chain: Chain, doubts: _Doubts, at: int) -> np.ndarray:
    """Returns the rows after a search that has found the fact at a hop."""
    doubts = _passed(doubts)
    one = _shift(chain, doubts, at + 1)
    go = self._value(*_shift(chain, (*doubts, (at, _CHOICE)), at + 1))
    ask = self._before(self._value(*one))
    n = go.shape[1]
    # Of two values, the agent goes on with the better one, or asks for the
    # verdict first. Weights are those of each value, over all pairs.
    order = np.argsort(-go, axis=1, kind="stable")
    rank = np.argsort(order, axis=1)
    better = rank[:, :, None] < rank[:, None]
    asks = ask[:, :, None] + ask[:, None, :]
    asks = better & (asks / 2 > go[:, :, None] + _TIE)
    pairs = n * (n - 1) / 2
    weights = (asks.sum(1) + asks.sum(2)) / (2 * pairs)
    two = (weights * np.where(weights > 0, ask, 0)).sum(1, keepdims=True)
    goes = (better & ~asks).sum(2) / pairs
    two = two + (goes * go).sum(1, keepdims=True)
    twin = self._odds[chain[at]].twin
    return (1 - twin) * self._fresh(*one) + twin * two

  def _before(self, rows: np.ndarray) -> np.ndarray:
    """Returns the rows before a search, of those after it."""
    before = np.full_like(rows, -np.inf)
    before[1:] = rows[:-1] - self._price
    return before


class Thorough(Optimum):
  """An agent that searches for one fact after another, until it is certain.

  With `known`, it also searches for what memory holds.
  """

  def __init__(self, world: world_lib.World, *, known: bool):
    super().__init__(world)
    self._known = known

  def moves(
    self,
    start: str,
    chain: Chain,
    searches: int,
    found: Mapping[Fact, Sequence[int]],
  ) -> list[Move]:
    """Returns the one move that it makes; it has no value."""
    entity = self.world.index[start]
    for name in chain if searches else ():
      fact = entity, world_lib.INDEX[name]
      values, memory = found.get(fact), int(self.world.memory[fact])
      if values and len(values) == 1:
        entity = values[0]
      elif memory >= 0 and not self._known:
        entity = memory
      else:
        wording = world_lib.RELATIONS[fact[1]][:2][values is not None]
        wording = world_lib.VERDICT if values else wording
        return [Move(np.nan, fact, name, wording)]
    return [Move(np.nan)]


def _passed(doubts: _Doubts) -> _Doubts:
  """Marks doubts: a fact after them was found."""
  return tuple((hop, kind.upper()) for hop, kind in doubts)


def _shift(
  chain: Chain, doubts: _Doubts, at: int
) -> tuple[Chain, _Doubts, int]:
  """Leaves out the hops before the first doubt, but not the last relation."""
  first = min(doubts[0][0] if doubts else at, len(chain) - 1)
  doubts = tuple((hop - first, kind) for hop, kind in doubts)
  return chain[first:], doubts, at - first


def relation_odds(world: world_lib.World) -> dict[str, Odds]:
  """Returns what an agent knows of each relation."""
  snapshot = world.snapshot(0)
  count = ((snapshot.values >= 0) & ~world.known).sum(1)
  # Of the facts in random order, the first of each entity get twins until
  # enough have one: those within this share of the facts.
  shares = np.linspace(0, 1, 10001)
  twins = (1 - (1 - shares[:, None]) ** count).sum(1)
  share = np.interp((snapshot.twins >= 0).sum(), twins, shares)
  twin = (1 - (1 - share) ** count) / np.maximum(count, 1)
  odds = {}
  for r, relation in enumerate(world_lib.RELATIONS):
    subjects = world.members[relation.subject]
    values = world.members[relation.object]
    known = world.known[subjects, r]
    memory = np.where(known, world.memory[subjects, r] - values.start, 0)
    m = len(values)
    right = world.reliability(relation.name)
    step = np.full((len(subjects), m), 1 / m)
    step[known] = (1 - right) / (m - 1)
    step[known, memory[known]] = right
    odds[relation.name] = Odds(
      subjects, values, known, memory, right, twin[subjects], step
    )
  return odds


def seen(
  world: world_lib.World, snapshot: world_lib.Snapshot, query: str
) -> dict[tuple[Fact, str], tuple[int, ...]]:
  """Returns the values that a search shows in this order, by fact and wording.

  Without both a subject and a relation it returns nothing.
  """
  subject, _, word = world.searched(query).partition(" ")
  found: dict[tuple[Fact, str], tuple[int, ...]] = {}
  for r, relation in enumerate(world_lib.RELATIONS if word else ()):
    fact = world.index[subject], r
    value, twin = int(snapshot.values[fact]), int(snapshot.twins[fact])
    if word == world_lib.VERDICT and twin >= 0:
      found[fact, word] = (value,)
    elif value >= 0 and word in relation[:2]:
      values = (value,) if twin < 0 else (value, twin)
      hit = word == relation[int(snapshot.alternative[fact])]
      first = -1 if snapshot.twin_first[fact] else 1
      found[fact, word] = values[::first] if hit else ()
  return found


def accuracy(
  agent: Optimum, ids: Iterable[str], budgets: Sequence[int]
) -> np.ndarray:
  """Returns whether an agent is right, float64 `[N, B]`, at N ids, B budgets.

  Raises ValueError if an id is not that of a question of the agent's world.
  """
  ids = list(ids)
  # Chains with equal ends share states.
  for name in sorted(ids, key=lambda name: name.split("-")[::-1]):
    for budget in budgets:
      agent.play(name, budget)
  found = [[agent.play(name, budget)[0] for budget in budgets] for name in ids]
  return np.array(found, dtype=float).reshape(-1, len(budgets))


def _asked(
  world: world_lib.World, name: str
) -> tuple[world_lib.Snapshot, str, Chain, int]:
  """Returns the snapshot, the chain and the answer of the question of an id."""
  try:
    _, index, start, chain = name.split("/")
    names = tuple(chain.split("-"))
    relations = [world_lib.INDEX[word] for word in names]
    snapshot, answer = world.snapshot(int(index)), world.index[start]
  except (KeyError, ValueError):
    raise ValueError(
      f"Found the question {name!r}; expected one of the generated world, such "
      "as held-out/38/bedur/river-mouth-mayor. The evaluation's config.json "
      "names another world."
    ) from None
  for relation in relations:
    answer = int(snapshot.values[answer, relation])
  return snapshot, start, names, answer
