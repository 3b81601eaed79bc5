"""Search-o1's reason-in-documents: a search shows what helps of what it found.

A second call to the policy reads the documents with the reasoning so far and
the query at hand, and only what it hands back goes into the episode. Its tokens
are no part of the trajectory; the model counts them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Protocol

from anysearch_jax import config as config_lib
from anysearch_jax import types
from anysearch_jax.generative_retrieval import simulation, text_model
from anysearch_jax.rollout import searching

NOTHING = "No helpful information found."
_FINAL = "**Final Information**"
_MOST_CHARACTERS = 3000
_LAST_STEPS = 4
_BLANK = re.compile(r"\n\s*\n")

_PROMPT = """\
Somebody reasons towards the answer of a question and has just searched. Read \
the documents that were found and hand back what helps with the next step.

- Look in every document for facts that answer the query or carry the \
reasoning on, and check that they are about the same things.
- Keep what the documents say, add nothing of your own, and do not answer the \
question.
- End with the line {final} and, after it, those facts in a few sentences. If \
no document helps, write there: {nothing}

Reasoning so far:
{reasoning}

Query: {query}

Documents:
{documents}
"""


class Refiner(Protocol):
  """Reads what a search found."""

  async def refine(
    self, request: types.SearchRequest, found: Sequence[types.Passage]
  ) -> Sequence[types.Passage]:
    """What of it goes into the episode of `request.asker`.

    Raises:
      types.EngineError, types.RetrievalError: it cannot say.
    """
    ...

  def identity(self) -> dict[str, Any]:
    """JSON values that say who reads."""
    ...


class RefiningRetriever:
  """`types.Retriever` that shows what a refiner makes of another's passages.

  Args:
    retriever: finds them; its batches and its cache are as ever.
    refiner: reads them.
    config: of those batches.
  """

  by_asker = True

  def __init__(
    self,
    retriever: Any,
    refiner: Refiner,
    *,
    config: config_lib.SearchConfig,
  ):
    self._retriever, self._refiner = retriever, refiner
    self._searcher = searching.Searcher(retriever, config)

  def attach(self, engine: types.Engine, codec: types.TextCodec) -> None:
    """As `text_model.attach`."""
    text_model.attach(self._retriever, engine, codec)
    text_model.attach(self._refiner, engine, codec)

  async def search(
    self, request: types.SearchRequest
  ) -> Sequence[types.Passage]:
    """What helps. Raises as retriever and `Refiner.refine` do."""
    found = await self._searcher.search(request)
    return tuple(await self._refiner.refine(request, found))

  def identity(self, corpora: Sequence[str] = ("",)) -> dict[str, Any]:
    """What answers come from, with its hash."""
    return text_model.identified(
      {
        "kind": "refined",
        "by": self._refiner.identity(),
        "of": self._retriever.identity(corpora),
      }
    )


class ModelRefiner:
  """A second call to a language model; it never sees a right answer.

  Args:
    model: reads.
    marks: texts by which a step of the reasoning is a search or its result.
  """

  def __init__(self, model: text_model.TextModel, *, marks: Sequence[str]):
    self._model, self._marks = model, tuple(marks)

  def attach(self, engine: types.Engine, codec: types.TextCodec) -> None:
    """As `text_model.attach`."""
    text_model.attach(self._model, engine, codec)

  async def refine(
    self, request: types.SearchRequest, found: Sequence[types.Passage]
  ) -> Sequence[types.Passage]:
    """One passage, whose id names those that were read."""
    if not found:
      return (types.Passage("", "", NOTHING),)
    asker = simulation.asking(request)
    prompt = _PROMPT.format(
      final=_FINAL,
      nothing=NOTHING,
      reasoning=reasoning(asker.text, self._marks),
      query=request.query,
      documents=documents(found),
    )
    reply = await self._model.complete(
      prompt, address=asker.address, turn=asker.turn
    )
    read = "+".join(passage.id for passage in found)
    return (types.Passage(read, "", final(reply)),)

  def identity(self) -> dict[str, Any]:
    """See `Refiner`."""
    return self._model.identity()


def reasoning(text: str, marks: Sequence[str]) -> str:
  """The steps of a response that the second call is shown.

  Args:
    text: of the response; a blank line ends a step.
    marks: of searches and their results.

  Returns:
    The first step, the last four and all that hold a mark; `...` for others.
  """
  steps = [step.strip() for step in _BLANK.split(text) if step.strip()]
  kept: list[str] = []
  for i, step in enumerate(steps):
    if (
      i == 0
      or i >= len(steps) - _LAST_STEPS
      or any(mark in step for mark in marks)
    ):
      kept.append(step)
    elif kept[-1] != "...":
      kept.append("...")
  return "\n\n".join(kept)


def documents(found: Sequence[types.Passage]) -> str:
  """Passages as the second call reads them, each cut at 3,000 characters."""
  return "\n".join(
    f"Doc {rank}(Title: {passage.title}) {passage.text}"[:_MOST_CHARACTERS]
    for rank, passage in enumerate(found, 1)
  )


def final(reply: str) -> str:
  """What a reply hands back; `NOTHING` where it does not say so."""
  _, mark, text = reply.rpartition(_FINAL)
  text = text.strip().strip("`").strip() if mark else ""
  return text or NOTHING
