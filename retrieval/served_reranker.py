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
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import httpx2

from anysearch_jax import types
from anysearch_jax.host import http_calls, redaction

BATCH = 32  # The limit of text-embeddings-inference, unless it is raised.
_ADVICE = "Is a reranker running there?"
_LARGEST = 1 << 24


class ServedReranker:
  """Asks a reranking server; safe to use from any event loop and thread.

  Args:
    url: address of the server, with or without `/rerank`.
    model: name of the model, for servers of Jina's and Cohere's format; "": the
      server has the format of text-embeddings-inference.
    batch: the most passages of a call.
    key_variable: environment variable with the bearer token; "": none is sent.
    patience: deadlines and retries.
    transport, clock: for tests.

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
    patience: http_calls.Patience = http_calls.DEFAULT,
    transport: httpx2.AsyncBaseTransport | None = None,
    clock: Callable[[], float] = time.monotonic,
  ):
    if not redaction.is_address(url):
      # The message does not quote the url, which may contain a password.
      raise ValueError(
        "The reranker's url is invalid; expected an address such as "
        "http://127.0.0.1:8080, with no user, query or fragment."
      )
    if batch < 1:
      raise ValueError(f"batch: found {batch}, expected at least 1.")
    base = url.rstrip("/").removesuffix("/rerank").rstrip("/")
    self._url, self._model, self._batch = f"{base}/rerank", model, batch
    token = key_variable and http_calls.secret_in(
      key_variable, "the reranker's key"
    )
    self._caller = http_calls.Caller(
      patience,
      headers=http_calls.json_headers(token),
      secret=token,
      advice=_ADVICE,
      largest=_LARGEST,
      transport=transport,
      clock=clock,
    )
    self.counters: Counter[str] = self._caller.counters

  def identity(self) -> dict[str, Any]:
    """Returns the address and the model's name, all that is known of it."""
    return {"kind": "served", "url": self._url, "model": self._model}

  def close(self) -> None:
    """Closes all connections; running calls fail."""
    self._caller.close()

  async def scores(
    self, asked: Sequence[tuple[str, Sequence[str]]]
  ) -> list[Sequence[float] | Exception]:
    """See `pipeline.Reranker`; a query whose call fails has its exception."""
    until = self._caller.until()
    return await asyncio.gather(
      *(self._of_query(query, texts, until) for query, texts in asked)
    )

  async def _of_query(
    self, query: str, texts: Sequence[str], until: float
  ) -> Sequence[float] | Exception:
    parts = [
      texts[start : start + self._batch]
      for start in range(0, len(texts), self._batch)
    ]
    try:
      found = await asyncio.gather(
        *(self._ask(query, part, until) for part in parts)
      )
    except types.RetrievalError as error:
      return error
    return [score for some in found for score in some]

  async def _ask(
    self, query: str, texts: Sequence[str], until: float
  ) -> list[float]:
    asked: dict[str, Any] = {"query": query}
    if self._model:
      asked |= {"model": self._model, "documents": texts}
      asked |= {"return_documents": False}
    else:
      asked |= {"texts": texts, "raw_scores": True, "truncate": True}
    return await self._caller.ask(
      "POST",
      self._url,
      content=http_calls.body(asked),
      read=lambda data: _scores(
        data, len(texts), self._url, self._caller.redact
      ),
      until=until,
    )


def _scores(
  data: bytes, count: int, url: str, redact: redaction.Redactor
) -> list[float]:
  """Returns the score of each text, from a server's answer.

  Raises:
    AnswerError: the answer has not exactly one finite score for each text.
  """
  value = http_calls.parse(data, url, redact)
  if isinstance(value, dict):
    value = value.get("results")
  scores: dict[int, float] = {}
  for item in value if isinstance(value, list) else ():
    fields: dict[str, Any] = item if isinstance(item, dict) else {}
    score: Any = fields.get("score", fields.get("relevance_score"))
    index = fields.get("index")
    if (
      type(index) is not int
      or type(score) not in (int, float)
      or not abs(score) < math.inf
    ):
      raise http_calls.AnswerError(
        f"{url}: found {redact.quote(repr(item), 80)}, expected an index and a "
        "finite score, as in {'index': 0, 'score': 1.5}."
      )
    scores[index] = float(score)
  if sorted(scores) != list(range(count)) or len(value) != count:
    raise http_calls.AnswerError(
      f"{url}: found {redact.quote(repr(value), 80)}, expected a list of "
      f"{count} scores, one for each text. Is it a server of /rerank?"
    )
  return [scores[i] for i in range(count)]
