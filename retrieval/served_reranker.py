"""A reranker over HTTP, for servers of `POST /rerank`.

They answer in one of two ways:

    {"query": "...", "texts": [...]}              text-embeddings-inference
    [{"index": 1, "score": 3.2}, ...]

    {"model": "...", "query": "...", "documents": [...]}
    {"results": [{"index": 1, "relevance_score": 0.9}, ...]}
                                     Jina, Cohere, vLLM, Infinity and others
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pydantic

from anysearch_jax import types
from anysearch_jax.host import http_calls

BATCH = 32  # The limit of text-embeddings-inference, unless it is raised.


class _Score(pydantic.BaseModel):
  index: pydantic.StrictInt
  score: float = pydantic.Field(
    strict=True,
    allow_inf_nan=False,
    validation_alias=pydantic.AliasChoices("score", "relevance_score"),
  )


_SCORES = pydantic.TypeAdapter(list[_Score])


class ServedReranker:
  """Asks a reranking server; safe to use from any event loop and thread.

  Args:
    url: address of the server, with or without `/rerank`.
    model: name of the model, for servers of Jina's and Cohere's format; "": the
      server has the format of text-embeddings-inference.
    batch: the most passages of a call.
    key_variable: environment variable with the bearer token; "": none is sent.
    settings: further arguments of `http_calls.Caller`, such as its `patience`.

  Raises:
    ValueError: the url is invalid or the key is missing.

  `counters` has the counters of `http_calls.Caller`.
  """

  def __init__(
    self,
    url: str,
    *,
    model: str = "",
    batch: int = BATCH,
    key_variable: str = "",
    **settings: Any,
  ):
    self._url, self._caller = http_calls.at_address(
      url,
      "/rerank",
      "reranker",
      key_variable=key_variable,
      advice="Is a reranker running there?",
      **settings,
    )
    self._model = model
    self._batch = batch
    self.counters: Counter[str] = self._caller.counters
    self.close = self._caller.close

  def identity(self) -> dict[str, Any]:
    """Returns the address and the name of the model as JSON values."""
    return {"kind": "served", "url": self._url, "model": self._model}

  async def scores(
    self, pairs: Sequence[tuple[str, Sequence[str]]]
  ) -> list[Sequence[float] | Exception]:
    """Returns a score for each text of each (query, texts).

    A query whose call fails has a `RetrievalError` instead.
    """

    async def score_texts(
      query: str, texts: Sequence[str]
    ) -> Sequence[float] | Exception:
      starts = range(0, len(texts), self._batch)
      batches = [texts[start : start + self._batch] for start in starts]
      calls = (self._ask(query, batch) for batch in batches)
      try:
        part_scores = await asyncio.gather(*calls)
        return [*itertools.chain.from_iterable(part_scores)]
      except types.RetrievalError as error:
        return error

    return await asyncio.gather(*(score_texts(*pair) for pair in pairs))

  async def _ask(self, query: str, texts: Sequence[str]) -> list[float]:
    body: dict[str, Any] = {"query": query}
    if self._model:
      body |= {"model": self._model, "documents": texts}
      body |= {"return_documents": False}
    else:
      body |= {"texts": texts, "raw_scores": True, "truncate": True}

    def read(value: Any) -> list[float]:
      """Returns the score of each text; raises AnswerError without them."""
      results = value.get("results") if isinstance(value, dict) else value
      try:
        entries = _SCORES.validate_python(results)
      except pydantic.ValidationError:
        entries = []
      scores = {entry.index: entry.score for entry in entries}
      if sorted(entry.index for entry in entries) != list(range(len(texts))):
        raise self._caller.unexpected(
          self._url,
          value,
          f"a finite score for each of {len(texts)} texts, such as "
          "[{'index': 0, 'score': 1.5}]; is it a server of /rerank?",
        )
      return [scores[i] for i in range(len(texts))]

    return await self._caller.ask(
      "POST", self._url, content=http_calls.body(body), read=read
    )
