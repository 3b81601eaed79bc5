"""Search-o1's reason-in-documents: a model condenses what a search found.

A second call to the policy reads the documents, the reasoning so far and the
query. Only the text that it returns enters the episode. The call's tokens are
not part of the trajectory; the model's counters include them. See
https://arxiv.org/abs/2501.05366.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Hashable, Sequence
from typing import Any

from anysearch_jax import config as config_lib
from anysearch_jax import types
from anysearch_jax.environment import wording
from anysearch_jax.generative_retrieval import text_model
from anysearch_jax.host import json_files
from anysearch_jax.methods import search_o1
from anysearch_jax.rollout import searching

# Limits of the released code: characters of a page that the model reads, and
# steps at the end of a response, with the empty one that ends it.
_MAX_CHARACTERS = 6000
_LAST_STEPS = 4


class RefiningRetriever:
  """A `types.Retriever` that refines the passages of another one.

  Args:
    retriever: finds passages; its searches are batched and cached.
    refiner: condenses the passages of each search: has `refine` and `identity`
      as `ModelRefiner`.
    config: sizes of the retriever's batches and cache.
  """

  def __init__(
    self, retriever: Any, refiner: Any, *, config: config_lib.SearchConfig
  ):
    self._retriever = retriever
    self._refiner = refiner
    self._searcher = searching.BatchingRetriever(retriever, config)

  def attach(self, engine: types.Engine, codec: types.TextCodec) -> None:
    """See `types.EngineUser`."""
    searching.attach(self._retriever, engine, codec)
    searching.attach(self._refiner, engine, codec)

  def context_key(self, context: types.SearchContext) -> Hashable:
    """Returns what a refiner may depend on: each turn of each episode."""
    return context.address, context.turn

  async def search(
    self, request: types.SearchRequest
  ) -> Sequence[types.Passage]:
    """Returns refined passages. Raises as the retriever and refiner do."""
    passages = await self._searcher.search(request)
    return tuple(await self._refiner.refine(request, passages))

  def identity(self, corpora: Sequence[str] = ("",)) -> dict[str, Any]:
    """Returns JSON values that identify retriever and refiner, with a hash."""
    values = {
      "kind": "refined",
      "by": self._refiner.identity(),
      "of": self._retriever.identity(corpora),
    }
    return {**values, "sha256": json_files.sha256(values)}


class ModelRefiner:
  """A refiner that calls a language model, without the right answer.

  Args:
    model: reads the documents.
    marks: texts that begin searches and their results in a step.
    texts: Search-o1's; `reader`, `final_mark` and `nothing_found` are used.
  """

  def __init__(
    self,
    model: text_model.TextModel,
    *,
    marks: Sequence[str],
    texts: wording.Texts | None = None,
  ):
    self._model = model
    self._marks = tuple(marks)
    self.attach = functools.partial(searching.attach, model)
    texts = texts or search_o1.WORDINGS["search_o1"].texts()
    self._reader = texts.values["reader"]
    self._final = wording.template(texts.values["final_mark"])
    self._nothing = wording.template(texts.values["nothing_found"])
    self._sha256 = texts.sha256

  async def refine(
    self, request: types.SearchRequest, passages: Sequence[types.Passage]
  ) -> Sequence[types.Passage]:
    """Returns one passage, whose id joins the ids of `passages`.

    Raises:
      types.EngineError, types.RetrievalError: the model gave no reply.
    """
    if not passages:
      return (types.Passage("", "", self._nothing),)
    context = request.known_context()
    prompt = self._reader.format(
      final=self._final,
      nothing=self._nothing,
      reasoning=reasoning(context.text, self._marks),
      query=request.query,
      documents="".join(itertools.starmap(_page, enumerate(passages, 1))),
    )
    reply = await self._model.complete(
      prompt, address=context.address, turn=context.turn
    )
    _, _, text = reply.rpartition(self._final)
    text = text.replace("\n", "").strip("`") if self._final in reply else ""
    text = text.strip()
    joined_ids = "+".join(passage.id for passage in passages)
    return (types.Passage(joined_ids, "", text or self._nothing),)

  def identity(self) -> dict[str, Any]:
    """Returns JSON values that identify the refiner."""
    return {**self._model.identity(), "texts": self._sha256}


def _page(rank: int, passage: types.Passage) -> str:
  """Returns a passage as the released code shows a web page."""
  address = passage.id if passage.id.startswith("http") else ""
  fields = {
    "id": rank,
    "title": passage.title,
    "url": address,
    "site_name": "",
    "date": "",
    "snippet": "",
    "context": passage.text[:_MAX_CHARACTERS],
  }
  text = json.dumps(fields, ensure_ascii=False, indent=2)
  return f"**Web Page {rank}:**\n{text}\n"


def reasoning(text: str, marks: Sequence[str]) -> str:
  """Returns the steps of a response that the second call reads, numbered.

  Args:
    text: the response; each line is a step.
    marks: texts that begin searches and their results.

  Returns:
    All steps if they are at most four; otherwise the first, the last three and
    all with a mark, with `...` in place of each run of others.
  """
  lines = text.replace("\n\n", "\n").split("\n")
  steps = [f"Step {i}: {line}" for i, line in enumerate(lines, 1)]
  steps.append("")  # The released code counts the end of the text as a step.
  read_steps: list[str] = []
  for i, step in enumerate(steps):
    if (
      len(steps) <= _LAST_STEPS + 1
      or i == 0
      or i >= len(steps) - _LAST_STEPS
      or any(mark in step for mark in marks)
    ):
      read_steps.append(step)
    elif read_steps[-1] != "...":
      read_steps.append("...")
  return "\n\n".join(read_steps).strip("\n")
