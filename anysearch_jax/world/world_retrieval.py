"""The generated world's retrievers in place of those that ask a model."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

from anysearch_jax import types
from anysearch_jax.generative_retrieval import simulation, text_model
from anysearch_jax.world import world as world_lib

_WORD = re.compile(r"\w+")


class WorldSimulator:
  """The generated world's, without a model.

  Useful passages are the world's own. Noisy ones are those with every entity
  that they speak of replaced by another one of its kind, none of them a right
  answer; a passage keeps its title where that is none.

  Args:
    world: that the questions are of.
    retriever: of its passages.
    seed: of the run.
  """

  def __init__(self, world: world_lib.World, retriever: Any, *, seed: int):
    self._world, self._retriever, self._seed = world, retriever, seed

  async def find(
    self, request: types.SearchRequest, *, noisy: bool
  ) -> Sequence[types.Passage]:
    """See `simulation.Simulator`."""
    found = await self._retriever.search(request)
    if not noisy:
      return found
    asker = simulation.asking(request)
    gold = frozenset(asker.question.golden_answers)

    def misstated(passage: types.Passage) -> types.Passage:
      title = passage.title
      if title in gold:
        title = self._other(title, asker, gold)
      avoid = gold | {title}
      text = " ".join(
        self._other(word, asker, avoid) if word in self._world.index else word
        for word in passage.text.split()
      )
      return dataclasses.replace(
        passage, id=f"noisy/{passage.id}", title=title, text=text
      )

    return [misstated(passage) for passage in found]

  def identity(self, corpora: Sequence[str]) -> dict[str, Any]:
    """See `simulation.Simulator`."""
    return {"kind": "world", "of": self._retriever.identity(corpora)}

  def _other(self, name: str, asker: types.Asker, avoid: frozenset[str]) -> str:
    """Another entity of the same kind, the same one all over a search."""
    at = self._world.index[name]
    (members,) = (m for m in self._world.members.values() if at in m)
    others = [
      other
      for other in self._world.entities[members.start : members.stop]
      if other != name and other not in avoid
    ]
    drawn = text_model.uniform(asker.address, asker.turn, name, self._seed)
    return others[int(drawn * len(others))]


class WorldRefiner:
  """The generated world's, without a model: facts on what was asked.

  A passage helps if its title is a word of the query and its text has another
  one. Of the others nothing is left but words that state no fact, so that what
  a search shows has the form that the world's policies can read: with passages
  left out, the warm start answers a quarter of what it answers otherwise. The
  question and its answer are not looked at.
  """

  async def refine(
    self, request: types.SearchRequest, found: Sequence[types.Passage]
  ) -> Sequence[types.Passage]:
    """See `refining.Refiner`."""
    asked = set(_WORD.findall(request.query.lower()))

    def helps(passage: types.Passage) -> bool:
      words = _WORD.findall(passage.text.lower())
      return passage.title.lower() in asked and not asked.isdisjoint(words)

    def emptied(passage: types.Passage) -> types.Passage:
      words = [w for w in passage.text.split() if w in world_lib.PADS]
      return dataclasses.replace(passage, text=" ".join(words))

    return [each if helps(each) else emptied(each) for each in found]

  def identity(self) -> dict[str, Any]:
    """See `refining.Refiner`."""
    return {"kind": "world"}
