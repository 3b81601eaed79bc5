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
# Largest number of searches in the first tables; larger budgets enlarge them.
_INITIAL_SEARCHES = 8
# States that each cache holds, of a few KB each.
_CACHED_STATES = 6000

Chain = tuple[str, ...]  # Names of relations.
Fact = tuple[int, int]  # Indices of an entity and of a relation.
# Kinds of doubt about the value of a hop.
_MEMORY = "memory"  # The value is from memory.
_MISSED = "missed"  # The value is from memory, and a search missed the fact.
_CHOICE = "choice"  # The value is one of the two that a search found.
# The doubtful hops behind the agent, ascending, with the kind of each doubt, in
# capitals if a fact after the hop was found.
_Doubts = tuple[tuple[int, str], ...]


class Odds(NamedTuple):
  """What an agent knows of a relation's facts; n subjects, m possible values.

  Attributes:
    subjects: indices of the entities that may be a subject.
    values: indices of the entities that may be a value.
    remembered: bool `[n]`, memory holds the fact.
    memory: int `[n]`, the index of the remembered value within `values`; 0
      where memory does not hold the fact.
    reliability: P(a memory is right).
    twin: `[n]`, P(a fact that memory does not hold has a false twin).
    transition: `[n, m]`, P(value) before any search.
  """

  subjects: range
  values: range
  remembered: np.ndarray
  memory: np.ndarray
  reliability: float
  twin: np.ndarray
  transition: np.ndarray


class Move(NamedTuple):
  """A search, or the answer.

  Attributes:
    value: P(right answer) - price E[searches], if all later moves are best.
    fact: the fact to search for; None: the agent answers.
    relation: name of the fact's relation.
    wording: the relation's word in the search.
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
    self.world = world
    self._price = price
    self._odds = relation_odds(world)
    self._max_searches = _INITIAL_SEARCHES
    self.play = functools.cache(self.play)  # type: ignore[method-assign]
    self._reset_caches()

  def value(self, start: str, chain: Chain, searches: int) -> float:
    """Returns the largest P(right answer) - price E[searches].

    Args:
      start: the entity at which the question starts.
      chain: the relations to follow.
      searches: number of searches that the agent may make.
    """
    return self.moves(start, chain, searches, {})[0].value

  def moves(
    self,
    start: str,
    chain: Chain,
    searches: int,
    found_values: Mapping[Fact, Sequence[int]],
  ) -> list[Move]:
    """Returns what the agent may do, the best first.

    Args:
      start: the entity at which the question starts.
      chain: the relations to follow.
      searches: number of searches that the agent may still make.
      found_values: for each searched fact, the values that were found: none
        after a miss, two until the verdict is known, otherwise one.
    """
    if searches > self._max_searches:
      self._max_searches = searches
      self._reset_caches()
    return self._moves(
      self.world.index[start], (), (), chain, searches, found_values
    )

  def answers(
    self, start: str, chain: Chain, found_values: Mapping[Fact, Sequence[int]]
  ) -> np.ndarray:
    """Returns P(right answer) of each of the E entities, float `[E]`.

    Args:
      start: the entity at which the question starts.
      chain: the relations to follow.
      found_values: for each searched fact, the values, see `moves`.
    """
    chances = np.zeros(len(self.world.entities))
    chances[self.world.index[start]] = 1
    for name in chain:
      odds = self._odds[name]
      transition = odds.transition.copy()
      for (entity, r), values in found_values.items():
        if values and r == world_lib.INDEX[name]:
          row = transition[entity - odds.subjects.start]
          row[:] = 0
          row[np.array(values) - odds.values.start] = 1 / len(values)
      value_chances = chances[odds.subjects] @ transition
      chances = np.zeros_like(chances)
      chances[odds.values] = value_chances
    return chances

  def play(self, name: str, budget: int) -> tuple[float, int]:
    """Plays the question with this id.

    Returns:
      1 if the answer is right, otherwise 0; the number of searches.
    """
    snapshot, start, chain, answer = _parse_question(self.world, name)
    found_values: dict[Fact, tuple[int, ...]] = {}
    for remaining in range(budget, -1, -1):
      move = self.moves(start, chain, remaining, found_values)[0]
      if not move.fact:
        break
      query = f"{self.world.entities[move.fact[0]]} {move.wording}"
      results = visible_values(self.world, snapshot, query)
      found_values[move.fact] = results[move.fact, move.wording]
    right = self.answers(start, chain, found_values).argmax() == answer
    return float(right), budget - remaining

  def _reset_caches(self) -> None:
    """Gives each recursive method a new cache, of tables of the new size."""
    methods = (
      "_final_chances",
      "_arrival_rows",
      "_best_rows",
      "_mean_rows",
      "_found_rows",
    )
    for name in methods:
      method = getattr(type(self), name).__get__(self)
      setattr(self, name, functools.lru_cache(_CACHED_STATES)(method))

  def _moves(
    self,
    entity: int,
    facts: tuple[Fact, ...],
    doubts: _Doubts,
    chain: Chain,
    searches: int,
    found_values: Mapping[Fact, Sequence[int]],
  ) -> list[Move]:
    """Follows the chain from an entity to where the agent has no value.

    Args:
      entity: the entity at hop `len(facts)`.
      facts: the facts of the chain up to this entity.
      doubts: the doubtful ones of these hops.
      chain: the relations to follow.
      searches: number of searches that the agent may still make.
      found_values: the values that were found, see `moves`.

    Returns:
      The moves, the best first. Where two values were found, the chain of the
      better one is followed.
    """
    hop = len(facts)
    missed = False
    if hop < len(chain):
      odds = self._odds[chain[hop]]
      fact = entity, world_lib.INDEX[chain[hop]]
      facts = (*facts, fact)
      row_index = entity - odds.subjects.start
      values = found_values.get(fact)
      missed = values is not None
      next_doubts = doubts
      if values:
        next_doubts = _mark_passed(doubts)
        if len(values) > 1:
          next_doubts = (*next_doubts, (hop, _CHOICE))
      elif odds.remembered[row_index]:
        values = (odds.values[odds.memory[row_index]],)
        if odds.reliability < 1:
          kind = _MISSED if missed else _MEMORY
          next_doubts = (*doubts, (hop, kind))
      if values:
        return max(
          (
            self._moves(
              value, facts, next_doubts, chain, searches, found_values
            )
            for value in values
          ),
          key=lambda moves: moves[0].value,
        )
    else:
      row_index = entity - self._odds[chain[-1]].values.start
    moves = []
    options = self._options(chain, doubts, hop, missed)
    for target, rows in options.items():
      value = rows[searches, row_index]
      if target < 0:
        moves.append(Move(value))
      elif searches:
        fact = facts[target]
        wording = _usual_wording(fact, fact in found_values)
        if dict(doubts).get(target, "").lower() == _CHOICE:
          wording = world_lib.VERDICT
        moves.append(Move(value, fact, chain[target], wording))
    best = moves[0]
    for move in moves[1:]:
      best = move if move.value > best.value + _TIE else best
    return [best, *(move for move in moves if move is not best)]

  # Below, rows are values `[L + 1, n]`: by the number of searches left, 0 to L,
  # and by the entity at a hop. Tables over all entities at once replace a
  # recursion over single entities, which would visit each of n^hops paths.

  def _options(
    self, chain: Chain, doubts: _Doubts, hop: int, missed: bool
  ) -> dict[int, np.ndarray]:
    """Returns the rows of the answer, -1, and of a search for a hop's fact.

    Args:
      chain: the relations to follow.
      doubts: the doubtful hops before `hop`.
      hop: the hop whose fact memory does not hold, or the chain's end.
      missed: whether a search for this hop's fact has missed.
    """
    answer = self._answer_value(chain, doubts, hop)
    options = {-1: np.tile(answer, (self._max_searches + 1, 1))}

    miss = world_lib.ALTERNATIVE
    if hop < len(chain):
      state = _drop_sure_hops(chain, doubts, hop)
      rows = self._found_rows(*state)
      if not missed:
        rows = (1 - miss) * rows + miss * self._best_rows(*state, True)
      options[hop] = self._before_search(rows)
    for i, (doubtful_hop, kind) in enumerate(doubts):
      earlier = doubts[:i]
      later = doubts[i + 1 :]
      # The search finds another value, after which the agent starts anew from
      # this hop, or confirms the value, and one doubt less is left.
      right = self._right_chance(chain, (doubtful_hop, kind))
      changed = _drop_sure_hops(chain, earlier, doubtful_hop + 1)
      rows = (1 - right) * self._mean_rows(*changed)
      sure = _drop_sure_hops(chain, (*_mark_passed(earlier), *later), hop)
      rows = rows + right * self._best_rows(*sure, missed)
      if kind.lower() == _MEMORY:
        missed_kind = _MISSED if kind == _MEMORY else _MISSED.upper()
        after_miss = (*earlier, (doubtful_hop, missed_kind), *later)
        miss_rows = self._best_rows(chain, after_miss, hop, missed)
        rows = (1 - miss) * rows + miss * miss_rows
      options[doubtful_hop] = self._before_search(rows)
    return options

  def _answer_value(
    self, chain: Chain, doubts: _Doubts, hop: int
  ) -> np.ndarray:
    """Returns P(right) of the most likely answer, `[n]`, without a search."""
    all_right = 1.0
    others = np.zeros(())
    for doubt in doubts:
      right = self._right_chance(chain, doubt)
      _, mean = self._final_chances(chain[-1:], chain[doubt[0] + 1 :])
      others = others + all_right * (1 - right) * mean
      all_right *= right
    final, _ = self._final_chances(chain[-1:], chain[hop:])
    return (all_right * final + others).max(1)

  def _final_chances(
    self, last: Chain, chain: Chain
  ) -> tuple[np.ndarray, np.ndarray]:
    """Returns P(final value) `[n, m]` without a search, and its mean `[m]`.

    `chain` has the remaining relations; if it is empty, `last` has the last.
    """
    odds = self._odds[(chain or last)[0]]
    chances = np.eye(len(odds.values))
    if chain:
      later, _ = self._final_chances(last, chain[1:])
      chances = odds.transition @ later
    return chances, chances.mean(0)

  def _right_chance(self, chain: Chain, doubt: tuple[int, str]) -> float:
    """Returns P(a doubtful value is right), else all values are equally likely.

    If no later fact was found, those values include the doubtful one itself.
    """
    hop, kind = doubt
    right = self._odds[chain[hop]].reliability
    if kind.lower() == _CHOICE:
      right = 0.5
    m = len(self._odds[chain[hop]].values)
    return right if kind.isupper() else (m * right - 1) / (m - 1)

  def _best_rows(
    self, chain: Chain, doubts: _Doubts, hop: int, missed: bool
  ) -> np.ndarray:
    """Returns the rows of the best option, see `_options`."""
    best, *searches = self._options(chain, doubts, hop, missed).values()
    for rows in searches:
      best = np.where(rows > best + _TIE, rows, best)
    return best

  def _arrival_rows(
    self, chain: Chain, doubts: _Doubts, hop: int
  ) -> np.ndarray:
    """Returns the best rows at a hop, with or without a memory of its fact."""
    if hop == len(chain):
      return self._best_rows(chain, doubts, hop, False)
    odds = self._odds[chain[hop]]
    next_doubts = (*doubts, (hop, _MEMORY)) if odds.reliability < 1 else doubts
    state = _drop_sure_hops(chain, next_doubts, hop + 1)
    rows = self._arrival_rows(*state)[:, odds.memory]
    if odds.remembered.all():
      return rows
    unknown = self._best_rows(*_drop_sure_hops(chain, doubts, hop), False)
    return np.where(odds.remembered, rows, unknown)

  def _mean_rows(self, chain: Chain, doubts: _Doubts, hop: int) -> np.ndarray:
    """Returns the mean over all entities at a hop, `[L + 1, 1]`."""
    return self._arrival_rows(chain, doubts, hop).mean(1, keepdims=True)

  def _found_rows(self, chain: Chain, doubts: _Doubts, hop: int) -> np.ndarray:
    """Returns the rows after a search that has found the fact at a hop."""
    doubts = _mark_passed(doubts)
    one_value = _drop_sure_hops(chain, doubts, hop + 1)
    two_values = _drop_sure_hops(chain, (*doubts, (hop, _CHOICE)), hop + 1)
    go_on = self._arrival_rows(*two_values)
    verify = self._before_search(self._arrival_rows(*one_value))
    n = go_on.shape[1]
    # Of two values, the agent goes on with the better one, or asks for the
    # verdict first. Weights are those of each value, over all pairs.
    order = np.argsort(-go_on, axis=1, kind="stable")
    rank = np.argsort(order, axis=1)
    better = rank[:, :, None] < rank[:, None]
    pair_sums = verify[:, :, None] + verify[:, None, :]
    verifies = better & (pair_sums / 2 > go_on[:, :, None] + _TIE)
    pairs = n * (n - 1) / 2
    weights = (verifies.sum(1) + verifies.sum(2)) / (2 * pairs)
    # Rows without a search left are -inf; their weight is 0.
    verified = weights * np.where(weights > 0, verify, 0)
    contradicted = verified.sum(1, keepdims=True)
    goes_on = (better & ~verifies).sum(2) / pairs
    contradicted = contradicted + (goes_on * go_on).sum(1, keepdims=True)
    twin = self._odds[chain[hop]].twin
    return (1 - twin) * self._mean_rows(*one_value) + twin * contradicted

  def _before_search(self, rows: np.ndarray) -> np.ndarray:
    """Returns the rows before a search, given those after it."""
    shifted = np.full_like(rows, -np.inf)
    shifted[1:] = rows[:-1] - self._price
    return shifted


class Thorough(Optimum):
  """An agent that searches for one fact after another, until it is certain.

  Args:
    world: its memory is the agent's.
    search_known: whether the agent also searches for facts in memory.
  """

  def __init__(self, world: world_lib.World, *, search_known: bool):
    super().__init__(world)
    self._search_known = search_known

  def moves(
    self,
    start: str,
    chain: Chain,
    searches: int,
    found_values: Mapping[Fact, Sequence[int]],
  ) -> list[Move]:
    """Returns the agent's only move, without a value.

    Args:
      start: the entity at which the question starts.
      chain: the relations to follow.
      searches: number of searches that the agent may still make.
      found_values: by fact that was searched, the values, see `Optimum.moves`.
    """
    entity = self.world.index[start]
    for name in chain if searches else ():
      fact = entity, world_lib.INDEX[name]
      values = found_values.get(fact)
      memory = int(self.world.memory[fact])
      if values and len(values) == 1:
        entity = values[0]
      elif memory >= 0 and not self._search_known:
        entity = memory
      else:
        wording = _usual_wording(fact, values is not None)
        if values:
          wording = world_lib.VERDICT
        return [Move(np.nan, fact, name, wording)]
    return [Move(np.nan)]


def _usual_wording(fact: Fact, missed: bool) -> str:
  """Returns the wording of a search: the alternative one after a miss."""
  relation = world_lib.RELATIONS[fact[1]]
  return relation.alternative if missed else relation.name


def _mark_passed(doubts: _Doubts) -> _Doubts:
  """Returns the doubts after a later fact was found, see `_Doubts`."""
  return tuple((hop, kind.upper()) for hop, kind in doubts)


def _drop_sure_hops(
  chain: Chain, doubts: _Doubts, hop: int
) -> tuple[Chain, _Doubts, int]:
  """Drops the hops before the first doubt, but not the last relation.

  States with equal remaining hops then share one table.
  """
  first = min(doubts[0][0] if doubts else hop, len(chain) - 1)
  doubts = tuple((doubtful - first, kind) for doubtful, kind in doubts)
  return chain[first:], doubts, hop - first


def relation_odds(world: world_lib.World) -> dict[str, Odds]:
  """Returns what an agent knows of each relation's facts, by its name."""
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
    remembered = world.known[subjects, r]
    memory = np.where(remembered, world.memory[subjects, r] - values.start, 0)
    m = len(values)
    reliability = world.reliability(relation.name)
    transition = np.full((len(subjects), m), 1 / m)
    transition[remembered] = (1 - reliability) / (m - 1)
    transition[remembered, memory[remembered]] = reliability
    odds[relation.name] = Odds(
      subjects=subjects,
      values=values,
      remembered=remembered,
      memory=memory,
      reliability=reliability,
      twin=twin[subjects],
      transition=transition,
    )
  return odds


def visible_values(
  world: world_lib.World, snapshot: world_lib.Snapshot, query: str
) -> dict[tuple[Fact, str], tuple[int, ...]]:
  """Returns the values that a search finds, by fact and wording.

  Args:
    world: the world of the snapshot.
    snapshot: the facts of the corpus that is searched.
    query: any text. Unless the search reads both a subject and a relation's
      word, nothing is found.

  Returns:
    The values in the order of their passages; none after a miss.
  """
  subject, _, word = world.searched(query).partition(" ")
  results: dict[tuple[Fact, str], tuple[int, ...]] = {}
  for r, relation in enumerate(world_lib.RELATIONS if word else ()):
    fact = world.index[subject], r
    value = int(snapshot.values[fact])
    twin = int(snapshot.twins[fact])
    if word == world_lib.VERDICT and twin >= 0:
      results[fact, word] = (value,)
    elif value >= 0 and word in relation[:2]:
      values = (value,) if twin < 0 else (value, twin)
      direction = -1 if snapshot.twin_first[fact] else 1
      wording = relation[int(snapshot.alternative[fact])]
      results[fact, word] = values[::direction] if word == wording else ()
  return results


def accuracy(
  agent: Optimum, ids: Iterable[str], budgets: Sequence[int]
) -> np.ndarray:
  """Returns whether an agent answers right, 1 or 0, float64 `[N, B]`.

  Args:
    agent: the agent that plays.
    ids: N ids of questions of the agent's world.
    budgets: B numbers of searches.

  Raises:
    ValueError: an id is not that of a question of the agent's world.
  """
  ids = list(ids)
  # Chains with equal ends share states, so play those in succession.
  for name in sorted(ids, key=lambda name: name.split("-")[::-1]):
    for budget in budgets:
      agent.play(name, budget)
  right = [[agent.play(name, budget)[0] for budget in budgets] for name in ids]
  return np.array(right, dtype=float).reshape(-1, len(budgets))


def _parse_question(
  world: world_lib.World, name: str
) -> tuple[world_lib.Snapshot, str, Chain, int]:
  """Returns the snapshot, start, chain and answer of the question of an id."""
  try:
    _, index, start, chain = name.split("/")
    names = tuple(chain.split("-"))
    relations = [world_lib.INDEX[word] for word in names]
    snapshot = world.snapshot(int(index))
    answer = world.index[start]
  except (KeyError, ValueError):
    raise ValueError(
      f"Found the question {name!r}; expected one of the generated world, such "
      "as held-out/38/bedur/river-mouth-mayor. The evaluation's config.json "
      "names another world."
    ) from None
  for relation in relations:
    answer = int(snapshot.values[answer, relation])
  return snapshot, start, names, answer
