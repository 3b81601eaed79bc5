"""Exact stand-ins, in the generated world, for retrievers that ask a model."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Sequence
from typing import Any

from anysearch_jax import types
from anysearch_jax.environment import protocol
from anysearch_jax.generative_retrieval import text_model
from anysearch_jax.rollout import searching
from anysearch_jax.world import world as world_lib

_WORD = re.compile(r"\w+")


class WorldSimulator:
  """A simulator of `simulation.SimulatedRetriever`, without a model.

  Useful passages are the world's own. In noisy ones, every entity of the text
  is replaced by another one of its kind that is no golden answer. The title is
  replaced only if it is a golden answer. The retriever is that of the world's
  passages, the seed that of the run.
  """

  def __init__(self, world: world_lib.World, retriever: Any, *, seed: int):
    self._world, self._retriever, self._seed = world, retriever, seed

  async def find(
    self, request: types.SearchRequest, *, noisy: bool
  ) -> Sequence[types.Passage]:
    """See `simulation.ModelSimulator`."""
    found = await self._retriever.search(request)
    if not noisy:
      return found
    context = request.known_context()
    gold = frozenset(context.question.golden_answers)

    def misstated(passage: types.Passage) -> types.Passage:
      title = passage.title
      if title in gold:
        title = self._other(title, context, gold)
      avoid = gold | {title}
      text = " ".join(
        self._other(word, context, avoid) if word in self._world.index else word
        for word in passage.text.split()
      )
      return dataclasses.replace(
        passage, id=f"noisy/{passage.id}", title=title, text=text
      )

    return [misstated(passage) for passage in found]

  def identity(self, corpora: Sequence[str]) -> dict[str, Any]:
    """See `simulation.ModelSimulator`."""
    return {"kind": "world", "of": self._retriever.identity(corpora)}

  def _other(
    self, name: str, context: types.SearchContext, avoid: frozenset[str]
  ) -> str:
    """Draws another entity of the same kind, the same one within a search."""
    at = self._world.index[name]
    (members,) = (m for m in self._world.members.values() if at in m)
    others = [
      other
      for other in self._world.entities[members.start : members.stop]
      if other != name and other not in avoid
    ]
    drawn = text_model.uniform(context.address, context.turn, name, self._seed)
    return others[int(drawn * len(others))]


class SelfSimulator:
  """A simulator that asks the world's policy itself (SSRL).

  The policy is asked the query as a question without a search. The query's
  words and its answer are the one passage. Without an answer nothing is found.
  `prompt` is that of an episode, with `{B}` and `{Question}`.
  """

  def __init__(self, model: text_model.TextModel, *, prompt: str):
    self._model, self._prompt = model, prompt
    self.attach = functools.partial(searching.attach, model)

  async def find(
    self, request: types.SearchRequest, *, noisy: bool
  ) -> Sequence[types.Passage]:
    """See `simulation.ModelSimulator`; `noisy` has no effect."""
    del noisy
    context = request.known_context()
    entity, *relation = request.query.split() or [""]
    asked = protocol.render(
      self._prompt, searches=0, question=f"{request.query} ?"
    )
    reply = await self._model.complete(
      asked, address=context.address, turn=context.turn
    )
    # The end of the answer is a stop, which replies do not have.
    _, opened, answer = reply.rpartition("<answer>")
    if not opened or not answer.strip():
      return ()
    text = " ".join((*relation, answer.strip()))
    return (types.Passage(f"self/{request.query}", entity, text),)

  def identity(self, corpora: Sequence[str]) -> dict[str, Any]:
    """See `simulation.ModelSimulator`."""
    del corpora
    return {"kind": "self", "of": self._model.identity()}


class WorldRefiner:
  """A refiner of `refining.RefiningRetriever` for the world, without a model.

  A passage is relevant if its title is a word of the query and its text has a
  word of it too. Other passages keep only the padding words, which state no
  fact. They are not removed, because the world's policies can only read results
  of the usual form: with passages left out, the warm start answers a quarter as
  many questions. The question and its answer are not used.
  """

  async def refine(
    self, request: types.SearchRequest, found: Sequence[types.Passage]
  ) -> Sequence[types.Passage]:
    """See `refining.ModelRefiner`."""
    asked = set(_WORD.findall(request.query.lower()))

    def helps(passage: types.Passage) -> bool:
      words = _WORD.findall(passage.text.lower())
      return passage.title.lower() in asked and not asked.isdisjoint(words)

    def emptied(passage: types.Passage) -> types.Passage:
      words = [w for w in passage.text.split() if w in world_lib.PADS]
      return dataclasses.replace(passage, text=" ".join(words))

    return [each if helps(each) else emptied(each) for each in found]

  def identity(self) -> dict[str, Any]:
    """See `refining.ModelRefiner`."""
    return {"kind": "world"}
