"""The accuracy of an exact agent on given questions, without playing them.

A question of the world names its snapshot, so everything that the agent sees is
known. Only its guesses, and its choices between two values, are random: the
probability of a right answer is computed over those.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

import numpy as np

from anysearch_jax.world import expert
from anysearch_jax.world import relations as relations_lib
from anysearch_jax.world import world as world_lib


def table(
  world: world_lib.World,
  strategy: expert.Strategy,
  ids: Iterable[str],
  budgets: Sequence[int],
) -> np.ndarray:
  """Returns P(right answer) of an agent for each question and budget.

  The agent searches again after a miss and verifies two values if the strategy
  says so; it makes no search that the budget does not allow.

  Args:
    world: its memory is the agent's.
    strategy: decides on searches; returns 0 or 1.
    ids: ids of N questions of the world.
    budgets: B numbers of searches, >= 0.

  Returns:
    float64 `[N, B]`, in [0, 1].

  Raises:
    ValueError: an id is not that of a question of the world.
  """
  found = [
    [_Walk(world, strategy, name).right(budget) for budget in budgets]
    for name in ids
  ]
  return np.array(found, dtype=float).reshape(-1, len(budgets))


def _read(
  world: world_lib.World, name: str
) -> tuple[world_lib.Snapshot, int, tuple[int, ...]]:
  """Returns the snapshot, first entity and relations of a question's id."""
  parts = name.split("/")
  try:
    _, snapshot, start, chain = parts
    relations = [relations_lib.INDEX[word] for word in chain.split("-")]
    return world.snapshot(int(snapshot)), world.index[start], tuple(relations)
  except (KeyError, ValueError):
    raise ValueError(
      f"Found the question {name!r}; expected one of the generated world, such "
      "as held-out/34/bedur/river-mouth-mayor. The evaluation's config.json "
      "names another world."
    ) from None


class _Walk:
  """An agent's ways through one question."""

  def __init__(
    self, world: world_lib.World, strategy: expert.Strategy, name: str
  ):
    self._world, self._strategy = world, strategy
    self._snapshot, self._start, self._relations = _read(world, name)
    self._names = tuple(relations_lib.ALL[r].name for r in self._relations)
    self._answer = self._start
    for relation in self._relations:
      self._answer = int(self._snapshot.values[self._answer, relation])
    self._after = functools.cache(self._after_uncached)

  def right(self, budget: int) -> float:
    """Returns P(right answer) with `budget` searches."""
    return self._after(0, self._start, budget, ())

  def _after_uncached(
    self, hop: int, entity: int, left: int, settled: tuple
  ) -> float:
    """Returns P(right answer) from an entity on, with `left` searches."""
    if hop == len(self._relations):
      return float(entity == self._answer)
    known = bool(self._world.known[entity, self._relations[hop]])
    first = "known" if known else "unknown"
    if not self._searches(first, known, hop, left, settled):
      return self._unsearched(hop, entity, left, settled)
    left -= 1
    if self._snapshot.alternative[entity, self._relations[hop]]:
      if not self._searches("miss", known, hop, left, settled):
        return self._unsearched(hop, entity, left, settled)
      left -= 1
    place = entity, self._relations[hop]
    value, twin = self._snapshot.values[place], self._snapshot.twins[place]
    if twin < 0:
      return self._with([value], "found", hop, left, settled)
    if self._searches("conflict", known, hop, left, settled):
      return self._with([value], "found", hop, left - 1, settled)
    return self._with([value, twin], "choice", hop, left, settled)

  def _searches(
    self, decision: str, known: bool, hop: int, left: int, settled: tuple
  ) -> bool:
    if not left:
      return False
    relations = self._names[hop:]
    return bool(
      self._strategy(
        expert.Situation(decision, known, relations, left, settled)
      )
    )

  def _unsearched(
    self, hop: int, entity: int, left: int, settled: tuple
  ) -> float:
    relation = relations_lib.ALL[self._relations[hop]]
    memory = self._world.memory[entity, self._relations[hop]]
    if memory >= 0:
      return self._with([memory], "recall", hop, left, settled)
    every = self._world.members[relation.object]
    return self._with(every, "guess", hop, left, settled)

  def _with(
    self,
    values: Iterable[int],
    how: str,
    hop: int,
    left: int,
    settled: tuple,
  ) -> float:
    """Returns the mean of P(right answer) over values of equal probability."""
    # Without searches left, nothing depends on how facts were settled.
    settled = (*settled, (self._names[hop], how)) if left else ()
    return float(
      np.mean([self._after(hop + 1, int(v), left, settled) for v in values])
    )
