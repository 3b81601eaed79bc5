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
    self._model, self._batch = model, batch
    self.counters: Counter[str] = self._caller.counters
    self.close = self._caller.close

  def identity(self) -> dict[str, Any]:
    """Returns the address and the model's name, all that is known of it."""
    return {"kind": "served", "url": self._url, "model": self._model}

  async def scores(
    self, asked: Sequence[tuple[str, Sequence[str]]]
  ) -> list[Sequence[float] | Exception]:
    """Returns a score for each text of each (query, texts).

    A query whose call fails has a `RetrievalError` instead.
    """

    async def of_query(
      query: str, texts: Sequence[str]
    ) -> Sequence[float] | Exception:
      starts = range(0, len(texts), self._batch)
      parts = [texts[start : start + self._batch] for start in starts]
      calls = (self._ask(query, part) for part in parts)
      try:
        return [
          score for some in await asyncio.gather(*calls) for score in some
        ]
      except types.RetrievalError as error:
        return error

    return await asyncio.gather(*(of_query(*each) for each in asked))

  async def _ask(self, query: str, texts: Sequence[str]) -> list[float]:
    asked: dict[str, Any] = {"query": query}
    if self._model:
      asked |= {"model": self._model, "documents": texts}
      asked |= {"return_documents": False}
    else:
      asked |= {"texts": texts, "raw_scores": True, "truncate": True}

    def read(value: Any) -> list[float]:
      """Returns the score of each text; raises AnswerError without them."""
      results = value.get("results") if isinstance(value, dict) else value
      try:
        found = _SCORES.validate_python(results)
      except pydantic.ValidationError:
        found = []
      scores = {each.index: each.score for each in found}
      if sorted(each.index for each in found) != list(range(len(texts))):
        raise self._caller.unexpected(
          self._url,
          value,
          f"a finite score for each of {len(texts)} texts, such as "
          "[{'index': 0, 'score': 1.5}]; is it a server of /rerank?",
        )
      return [scores[i] for i in range(len(texts))]

    return await self._caller.ask(
      "POST", self._url, content=http_calls.body(asked), read=read
    )
