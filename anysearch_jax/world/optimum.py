"""The best use of a search budget in the generated world, exactly.

The agent reads the relations of a question, and knows the statistics of the
world: how often each relation is in memory, how often that memory is right, how
often a search misses or finds two values. What it searches is decided by
dynamic programming over the facts that are left and the searches that are left.

`accuracy` is that of any exact agent on given questions, without playing them:
a question names its snapshot, so everything that the agent sees is known. Only
its guesses, and its choices between two values, are random. `forecasts` says
how well the best agent can tell how many searches it will still make.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from anysearch_jax.evaluation import forecast
from anysearch_jax.world import expert
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
    self._odds = relation_odds(world)
    self._values: dict[tuple[tuple[str, ...], int, float], float] = {}

  def __call__(self, situation: expert.Situation) -> float:
    """Returns 1 if searching is best in this situation, otherwise 0."""
    if not situation.remaining:
      return 0.0
    decision, known, relations, searches, settled = situation
    search, stop = self.options(
      decision, known, relations, searches, self._confidence(settled)
    )
    return float(search > stop + _TIE)

  def value(
    self, relations: tuple[str, ...], searches: int, q: float = 1.0
  ) -> float:
    """Returns the maximum for a chain of facts with these searches left.

    q is the probability that all is right so far; without a relation, it is
    P(right answer).
    """
    if not relations:
      return q
    if q != 1 and not self._price:
      return q * self.value(relations, searches)
    key = relations, searches, q
    if key not in self._values:
      known = self._odds[relations[0]].known
      self._values[key] = known * max(
        self.options("known", True, relations, searches, q)
      ) + (1 - known) * max(
        self.options("unknown", False, relations, searches, q)
      )
    return self._values[key]

  def options(
    self,
    decision: str,
    known: bool,
    relations: tuple[str, ...],
    searches: int,
    q: float = 1.0,
  ) -> tuple[float, float]:
    """Returns the maxima after searching and after not searching.

    Args:
      decision, known, relations: as in `expert.Situation`.
      searches: that are left.
      q: the probability that all facts before this one are settled rightly.
    """
    odds, rest = self._odds[relations[0]], relations[1:]

    def best(decision: str, r: int) -> float:
      return max(self.options(decision, known, relations, r, q))

    def found(r: int) -> float:
      one = self.value(rest, r, q)
      if known:
        return one
      return (1 - odds.twin) * one + odds.twin * best("conflict", r)

    sure = odds.right if known else odds.guess
    if decision == "conflict":
      sure = 0.5
    stop = self.value(rest, searches, q * sure)
    if not searches:
      return -np.inf, stop
    match decision:
      case "conflict":
        search = self.value(rest, searches - 1, q)
      case "miss":
        search = found(searches - 1)
      case _:
        search = (1 - world_lib.ALTERNATIVE) * found(searches - 1)
        search += world_lib.ALTERNATIVE * best("miss", searches - 1)
    return search - self._price, stop

  def _confidence(self, settled: tuple[tuple[str, str], ...]) -> float:
    """Returns P(all values so far are right)."""
    if not self._price:
      return 1.0  # The best decisions then do not depend on it.
    q = 1.0
    for relation, how in settled:
      _, right, guess, _ = self._odds[relation]
      q *= {"found": 1.0, "recall": right, "guess": guess, "choice": 0.5}[how]
    return q


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
  for r, relation in enumerate(world_lib.RELATIONS):
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


def accuracy(
  world: world_lib.World,
  strategy: expert.Strategy,
  ids: Iterable[str],
  budgets: Sequence[int],
) -> np.ndarray:
  """Returns P(right answer) of an agent for each question and budget.

  The world's memory is the agent's. It searches again after a miss and
  verifies two values if the strategy, which returns 0 or 1, says so; it makes
  no search that the budget does not allow.

  Returns:
    float64 `[N, B]`, in [0, 1], of N `ids` and B `budgets`.

  Raises:
    ValueError: an id is not that of a question of the world.
  """
  found = [_right(world, strategy, name, budgets) for name in ids]
  return np.array(found, dtype=float).reshape(-1, len(budgets))


def forecasts(
  best: Optimum, ids: Iterable[str], budgets: Sequence[int]
) -> np.ndarray:
  """Returns how well the best agent, without a price, forecasts its searches.

  It forecasts when `evaluation.forecast` does; its situation then tells it the
  distribution of the searches that follow.

  Returns:
    float64 `[N, B, 3]`: the expected number of forecasts, of those that hold,
    and the sum of their widths, by the world's statistics and the relations of
    N `ids`, at B `budgets`.
  """
  chains = [tuple(name.rpartition("/")[2].split("-")) for name in ids]
  # A state's array has these three numbers, of the forecasts that follow, and
  # P(0, 1, ... more searches); a fact takes up to three.
  end = np.zeros(4 + 3 * max(map(len, chains), default=0))
  end[3] = 1

  def told(state: np.ndarray, left: int) -> np.ndarray:
    low, high = forecast.interval(state[3:])
    own = 1, state[3 + low : 4 + high].sum(), high - low
    return np.append(state[:3] + own, state[3:]) if left else state

  @functools.cache
  def start(relations: tuple[str, ...], left: int, tells: bool) -> np.ndarray:
    if not relations:
      return told(end, left if tells else 0)
    p = best._odds[relations[0]].known
    return p * ahead("known", True, relations, left, tells) + (1 - p) * ahead(
      "unknown", False, relations, left, tells
    )

  @functools.cache
  def ahead(
    decision: str, known: bool, rest: tuple[str, ...], left: int, tells: bool
  ) -> np.ndarray:
    search, stop = best.options(decision, known, rest, left)
    state = start(rest[1:], left - (search > stop + _TIE), search > stop + _TIE)
    if search > stop + _TIE:
      twin, miss = best._odds[rest[0]].twin * (not known), world_lib.ALTERNATIVE
      if decision != "conflict" and twin:
        found = ahead("conflict", known, rest, left - 1, True)
        state = twin * found + (1 - twin) * state
      if decision in ("known", "unknown"):
        found = ahead("miss", known, rest, left - 1, True)
        state = miss * found + (1 - miss) * state
      state = np.append(state[:3], np.roll(state[3:], 1))
    return told(state, left if tells else 0)

  found = [[start(chain, b, True)[:3] for b in budgets] for chain in chains]
  return np.array(found, dtype=float).reshape(-1, len(budgets), 3)


def _right(
  world: world_lib.World,
  strategy: expert.Strategy,
  name: str,
  budgets: Sequence[int],
) -> list[float]:
  """Returns P(right answer) to the question with this id, by budget."""
  try:
    _, index, start, chain = name.split("/")
    names = tuple(chain.split("-"))
    relations = [world_lib.INDEX[word] for word in names]
    snapshot, first = world.snapshot(int(index)), world.index[start]
  except (KeyError, ValueError):
    raise ValueError(
      f"Found the question {name!r}; expected one of the generated world, such "
      "as held-out/34/bedur/river-mouth-mayor. The evaluation's config.json "
      "names another world."
    ) from None
  answer = first
  for relation in relations:
    answer = int(snapshot.values[answer, relation])

  @functools.cache
  def after(hop: int, entity: int, left: int, settled: tuple) -> float:
    """Returns P(right answer) from an entity on, with `left` searches."""
    if hop == len(relations):
      return float(entity == answer)
    place = entity, relations[hop]
    known = bool(world.known[place])

    def searches(decision: str) -> bool:
      here = expert.Situation(decision, known, names[hop:], left, settled)
      return left > 0 and strategy(here) > 0

    def mean(how: str, values: Iterable[int]) -> float:
      """Returns the mean over values of equal probability."""
      # Without searches left, nothing depends on how facts were settled.
      now = (*settled, (names[hop], how)) if left else ()
      return float(np.mean([after(hop + 1, int(v), left, now) for v in values]))

    found = searches("known" if known else "unknown")
    left -= found
    if found and snapshot.alternative[place]:
      found = searches("miss")
      left -= found
    if not found:
      if known:
        return mean("recall", [world.memory[place]])
      kind = world_lib.RELATIONS[relations[hop]].object
      return mean("guess", world.members[kind])
    values = [snapshot.values[place], snapshot.twins[place]]
    if values[1] < 0:
      return mean("found", values[:1])
    if searches("conflict"):
      left -= 1
      return mean("found", values[:1])
    return mean("choice", values)

  return [after(0, first, budget, ()) for budget in budgets]
