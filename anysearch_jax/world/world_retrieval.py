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
  is replaced by another one of its kind that is not a golden answer. The title
  is replaced only if it is a golden answer.

  Args:
    world: names the entities of a kind.
    retriever: finds the world's passages.
    seed: the run's seed.
  """

  def __init__(self, world: world_lib.World, retriever: Any, *, seed: int):
    self._world = world
    self._retriever = retriever
    self._seed = seed

  async def find(
    self, request: types.SearchRequest, *, noisy: bool
  ) -> Sequence[types.Passage]:
    """See `simulation.ModelSimulator`."""
    passages = await self._retriever.search(request)
    if not noisy:
      return passages
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

    return [misstated(passage) for passage in passages]

  def identity(self, corpora: Sequence[str]) -> dict[str, Any]:
    """See `simulation.ModelSimulator`."""
    return {"kind": "world", "of": self._retriever.identity(corpora)}

  def _other(
    self, name: str, context: types.SearchContext, avoid: frozenset[str]
  ) -> str:
    """Draws another entity of the same kind, the same one within a search."""
    index = self._world.index[name]
    (members,) = (m for m in self._world.members.values() if index in m)
    others = [
      other
      for other in self._world.entities[members.start : members.stop]
      if other != name and other not in avoid
    ]
    drawn = text_model.uniform(context.address, context.turn, name, self._seed)
    return others[int(drawn * len(others))]


class SelfSimulator:
  """A simulator that asks the world's policy itself (SSRL).

  The policy gets the query as a question without a search. The query's words
  and the policy's answer make the only passage. Without an answer nothing is
  found.

  Args:
    model: the policy.
    prompt: the prompt of an episode, with `{B}` and `{Question}`.
  """

  def __init__(self, model: text_model.TextModel, *, prompt: str):
    self._model = model
    self._prompt = prompt
    self.attach = functools.partial(searching.attach, model)

  async def find(
    self, request: types.SearchRequest, *, noisy: bool
  ) -> Sequence[types.Passage]:
    """See `simulation.ModelSimulator`; `noisy` has no effect."""
    del noisy
    context = request.known_context()
    entity, *relation = request.query.split() or [""]
    prompt = protocol.render(
      self._prompt, searches=0, question=f"{request.query} ?"
    )
    reply = await self._model.complete(
      prompt, address=context.address, turn=context.turn
    )
    # The end of the answer is a stop, which replies do not have.
    _, tag, answer = reply.rpartition("<answer>")
    if not tag or not answer.strip():
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
    self, request: types.SearchRequest, passages: Sequence[types.Passage]
  ) -> Sequence[types.Passage]:
    """See `refining.ModelRefiner`."""
    query_words = set(_WORD.findall(request.query.lower()))

    def is_relevant(passage: types.Passage) -> bool:
      words = _WORD.findall(passage.text.lower())
      same_subject = passage.title.lower() in query_words
      return same_subject and not query_words.isdisjoint(words)

    def emptied(passage: types.Passage) -> types.Passage:
      words = [w for w in passage.text.split() if w in world_lib.PADS]
      return dataclasses.replace(passage, text=" ".join(words))

    return [
      passage if is_relevant(passage) else emptied(passage)
      for passage in passages
    ]

  def identity(self) -> dict[str, Any]:
    """See `refining.ModelRefiner`."""
    return {"kind": "world"}
