"""A retriever over HTTP, for servers with Search-R1's protocol.

    POST /retrieve  {"queries": [...], "topk": 3, "return_scores": true}
    {"result": [[{"document": {"id": ..., "contents": ...}, "score": ...}]]}

Requests always ask for scores, because Search-R1's server fails without. The
answer to a query is accepted only if all of it has the expected form.
"""

from __future__ import annotations

import functools
import hashlib
from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Any

import pydantic

from anysearch_jax import types
from anysearch_jax.host import http_calls, loop
from anysearch_jax.retrieval import passages
from anysearch_jax.retrieval import requests as requests_lib

Answer = tuple[types.Passage, ...]

# Queries that a server gets at a time.
_BATCH = 256
# Statuses that concern the caller or the address, not a query.
_ABOUT_CALLERS = (401, 402, 403, 404, 405, 407, 410, 415, 426)
# After this many failed calls of a batch, without any answer, bisecting stops:
# the server is at fault, not a query.
_MOST_FAILED_CALLS = 16


def _encodable(text: str) -> str:
  text.encode()  # Raises ValueError for half of a surrogate pair.
  return text


_Text = Annotated[str, pydantic.Strict(), pydantic.AfterValidator(_encodable)]


class _Document(pydantic.BaseModel, extra="allow"):
  contents: _Text
  # Search-R1's BM25 server returns no ids.
  id: _Text | pydantic.StrictInt | None = None


class _Hit(pydantic.BaseModel):
  document: _Document
  score: float = pydantic.Field(strict=True, allow_inf_nan=False)


_HITS = pydantic.TypeAdapter(list[_Hit])


class HttpRetriever(requests_lib.OneByBatch):
  """Asks a retrieval server; safe to use from any event loop and thread.

  Args:
    url: address of the server, with or without `/retrieve`.
    batch: the most queries in one call.
    token_variable: the environment variable with the server's bearer token;
      "" sends no token.
    largest: the most bytes of an answer.
    settings: further arguments of `http_calls.Caller`, such as its `patience`.

  Raises:
    ValueError: the url is invalid or the token is missing.

  `counters` has the counters of `http_calls.Caller`, the `queries`, and the
  `splits` of batches. A batch that was split does not count as one of the
  `failures`; its failed queries do.
  """

  def __init__(
    self,
    url: str,
    *,
    batch: int = _BATCH,
    token_variable: str = "",
    largest: int = 1 << 26,
    **settings: Any,
  ):
    self._route, self._caller = http_calls.at_address(
      url,
      "/retrieve",
      "retriever",
      key_variable=token_variable,
      advice="Is a retriever running there (launch.serve_retriever)?",
      largest_bytes=largest,
      **settings,
    )
    self.url = self._route.removesuffix("/retrieve")
    self._batch = batch
    self.counters: Counter[str] = self._caller.counters
    self.close = self._caller.close

  async def search_many(
    self, requests: Sequence[types.SearchRequest]
  ) -> list[Answer | Exception]:
    """Returns passages or a `RetrievalError` for each request.

    There is one batch for each `k`. If the server answers it with an error that
    a single query may have caused, the batch is bisected, so that only this
    query fails.
    """
    return await requests_lib.ask_by_k(requests, self._ask, batch=self._batch)

  def identity(self) -> Any:
    """Returns the `identity` that `GET /health` reports, or the address.

    Raises:
      RetrievalError: the server cannot be reached.
    """
    unnamed = {"kind": "http", "url": self.url}

    def named(value: Any) -> Any:
      return (isinstance(value, dict) and value.get("identity")) or unnamed

    try:
      return loop.run(
        self._caller.ask("GET", f"{self.url}/health", read=named, counted=False)
      )
    except http_calls.AnswerError as error:
      # Other servers have no such route, or do not answer in JSON.
      if getattr(error, "status", 404) in (404, 405):
        return unnamed
      raise

  async def _ask(self, queries: list[str], k: int) -> list[Answer | Exception]:
    """Answers one batch; bisects it when a single query may be at fault."""
    self.counters["queries"] += len(queries)
    limit = self._caller.limit()
    answers: list[Answer | Exception] = []
    # Batches to send, each with whether it is the second try of a single query.
    pending = [(queries, False)]
    failed = 0
    is_well = False  # Whether the server has answered a part.
    while pending:
      batch, is_second_try = pending.pop()
      body = {"queries": batch, "topk": k, "return_scores": True}
      try:
        answers += await self._caller.ask(
          "POST",
          self._route,
          content=http_calls.body(body),
          read=functools.partial(self._answers, count=len(batch), k=k),
          limit=limit,
          counted=False,
        )
        is_well = True
        continue
      except types.RetrievalError as raised:
        error = raised
      is_answer = isinstance(error, http_calls.AnswerError)
      if is_answer and getattr(error, "status", 0) not in _ABOUT_CALLERS:
        failed += 1  # A query may cause it, and not the caller or the server.
        if not is_well and failed > _MOST_FAILED_CALLS:
          batch = queries[len(answers) :]
          pending = []
        elif len(batch) > 1:
          self.counters["splits"] += 1
          half = len(batch) // 2
          pending += [(batch[half:], False), (batch[:half], False)]
          continue
        elif not is_second_try and isinstance(error, http_calls.FailedError):
          pending.append((batch, True))
          continue
      # The caller leaves it to us to count these.
      self.counters["failures"] += is_answer
      answers += [error] * len(batch)
    return answers

  def _answers(
    self, value: Any, *, count: int, k: int
  ) -> list[Answer | Exception]:
    """Reads the passages of each query; those of malformed hits are an error.

    Raises AnswerError if the reply is malformed, or the hits of all queries.
    """

    def unexpected(value: Any, expected: str) -> http_calls.AnswerError:
      expected += " (is it a server of Search-R1's protocol?)"
      return self._caller.unexpected(self._route, value, expected)

    result = value.get("result") if isinstance(value, dict) else None
    if not isinstance(result, list):
      raise unexpected(value, 'an object with a list "result"')
    if len(result) != count:
      raise unexpected(f"{len(result)} answers", f"{count}, one a query")

    def read_hits(hits: Any) -> Answer | Exception:
      if isinstance(hits, list) and len(hits) > k:
        return unexpected(f"{len(hits)} hits", f"at most {k}")
      try:
        return tuple(map(_passage, _HITS.validate_python(hits)))
      except pydantic.ValidationError as error:
        reason = error.errors(include_url=False)[0]
        where = "/".join(map(str, reason["loc"]))
        return unexpected(
          reason["input"],
          'a hit such as {"document": {"contents": "..."}, "score": 1.0}; '
          f"at {where}: {reason['msg']}",
        )

    answers = [read_hits(hits) for hits in result]
    refused = [answer for answer in answers if isinstance(answer, Exception)]
    if refused and len(refused) == len(answers):
      raise refused[0]
    self.counters["failures"] += len(refused)
    return answers


def _passage(hit: _Hit) -> types.Passage:
  contents = hit.document.contents
  name = hit.document.id
  if name is None:
    name = hashlib.sha256(contents.encode()).hexdigest()[:16]
  title, _, text = contents.partition("\n")
  source = passages.document_source(hit.document.model_extra or {})
  return types.Passage(str(name), title, text, hit.score, source)
