"""A cheap and noisy retriever of the generated world.

It knows each fact by the usual wording of its relation alone. Whether it
answers a fact rightly, wrongly or not at all is drawn once for each fact of a
snapshot, so that asking again brings nothing new.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from anysearch_jax import types
from anysearch_jax.world import relations as relations_lib
from anysearch_jax.world import world as world_lib

# Distinguishes these draws from those of the world itself.
_STREAM = 5


class Odds(NamedTuple):
  """Probabilities of an answer; with the rest of them there is none.

  Attributes:
    right: that it states the fact.
    wrong: that it states another value of the same kind.
  """

  right: float
  wrong: float


_EASY = Odds(right=0.9, wrong=0.02)
_HARD = Odds(right=0.15, wrong=0.15)
# What is on a map is easy to find; what people do is not.
ODDS: Mapping[str, Odds] = {
  relation.name: _HARD
  if "person" in (relation.subject, relation.object)
  and relation.name != "birthplace"
  else _EASY
  for relation in relations_lib.ALL
}


class CheapRetriever:
  """A `types.BatchRetriever` of one wording, with errors.

  Args:
    world: whose facts it finds.
    odds: of each relation.

  Raises:
    ValueError: probabilities are negative or sum to more than 1, or a relation
      has none.
  """

  def __init__(
    self, world: world_lib.World, odds: Mapping[str, Odds] | None = None
  ):
    self._world = world
    self._odds = dict(ODDS if odds is None else odds)
    for relation in relations_lib.ALL:
      found = self._odds.get(relation.name)
      if found is None or min(found) < 0 or sum(found) > 1:
        raise ValueError(
          f"Found the odds {found} of the relation {relation.name!r}; expected "
          "two probabilities whose sum is at most 1."
        )

  def lookup(
    self, query: str, k: int, corpus: str = ""
  ) -> tuple[types.Passage, ...]:
    """Returns the passage about a fact, or none.

    Args:
      query: an entity and a relation, two words; nothing else is found.
      k: the most passages, >= 1; there is never more than one.
      corpus: `snapshot-<index>`.

    Raises:
      ValueError: `k` is less than 1, or the corpus is unknown.
    """
    if k < 1:
      raise ValueError(f"Found k={k}; expected 1 or more passages.")
    self._world.corpus(corpus)
    entity, _, relation = query.strip().partition(" ")
    if entity not in self._world.index or relation not in relations_lib.INDEX:
      return ()
    value = self.value(
      int(corpus.partition("-")[2]),
      self._world.index[entity],
      relations_lib.INDEX[relation],
    )
    if value < 0:
      return ()
    text = f"{relation} {self._world.entities[value]}"
    name = f"{corpus}/{entity}/{relation}/cheap"
    return (types.Passage(name, entity, text),)

  @functools.cache  # noqa: B019 - a retriever lives as long as its process.
  def value(self, snapshot: int, entity: int, relation: int) -> int:
    """Returns the value that the retriever states of a fact, -1 for none.

    Args:
      snapshot, entity, relation: indices of the fact; they are the address of
        its draws.
    """
    truth = int(self._world.snapshot(snapshot).values[entity, relation])
    if truth < 0:
      return -1
    kind = relations_lib.ALL[relation]
    odds = self._odds[kind.name]
    rng = np.random.Generator(
      np.random.PCG64(
        (self._world.config.seed, _STREAM, snapshot, entity, relation)
      )
    )
    drawn = rng.random()
    if drawn < odds.right:
      return truth
    if drawn >= odds.right + odds.wrong:
      return -1
    others = [
      value
      for value in self._world.members[kind.object]
      if value not in (entity, truth)
    ]
    return int(rng.choice(others))

  def identity(self, corpora: Sequence[str] = ("",)) -> dict[str, Any]:
    """Returns JSON values that identify the answers, with their hash."""
    del corpora
    made = {"world_seed": self._world.config.seed, "odds": self._odds}
    canonical = json.dumps(made, sort_keys=True).encode()
    digest = hashlib.sha256(canonical).hexdigest()
    return {"kind": "cheap", **made, "sha256": digest}

  async def search(
    self, request: types.SearchRequest
  ) -> Sequence[types.Passage]:
    """Answers a request; see `lookup`."""
    return self.lookup(request.query, request.k, request.corpus)

  async def search_many(
    self, requests: Sequence[types.SearchRequest]
  ) -> list[Sequence[types.Passage]]:
    """Answers requests in their order; see `lookup`."""
    return [self.lookup(r.query, r.k, r.corpus) for r in requests]
