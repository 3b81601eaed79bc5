"""A retriever behind HTTP: servers of Search-R1's protocol.

    POST /retrieve  {"queries": [...], "topk": 3, "return_scores": true}
    {"result": [[{"document": {"id": ..., "contents": ...}, "score": ...}]]}

Scores are always asked for: Search-R1's server fails without. What comes back
is believed when it is all that was asked for.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import httpx2

from retrieval import calls, errors, passages, redaction, wire

if TYPE_CHECKING:
  from retrieval import lexical  # It loads JAX.

Answer = tuple[passages.Passage, ...]

_ADVICE = "Is a retriever running there (launch.serve_retriever)?"
# Statuses by which servers refuse a query, or too many.
_ABOUT_QUERIES = (400, 413, 422)
# So often the parts of a batch are refused before it is no query's fault.
_REFUSALS = 16


class HttpRetriever:
  """Asks a server; from any event loop and thread.

  Args:
    url: of the server, with or without `/retrieve`.
    batch: queries of one call at most.
    corpus: the name of what the server searches; requests name it or none.
    patience: how long the server is waited for.
    token_variable: the environment variable with the server's bearer token;
      "" sends none.
    largest: bytes of an answer at most.
    transport: answers instead of the network.
    clock: seconds of the circuit breaker.

  Raises:
    ValueError: a url that is none, a token that is not there.

  `counters` are `calls.Caller`'s, and the `queries`.
  """

  def __init__(
    self,
    url: str,
    *,
    batch: int = 256,
    corpus: str = "",
    patience: calls.Patience = calls.DEFAULT,
    token_variable: str = "",
    largest: int = 1 << 26,
    transport: httpx2.AsyncBaseTransport | None = None,
    clock: Callable[[], float] = time.monotonic,
  ):
    if not redaction.is_address(url):
      # Which may hold a password.
      raise ValueError(
        "The retriever's url is not one; expected an address such as "
        "http://127.0.0.1:8000, with no user, query or fragment."
      )
    if batch < 1:
      raise ValueError(f"batch: found {batch}, expected at least 1.")
    self.url = url.rstrip("/").removesuffix("/retrieve").rstrip("/")
    self._batch, self._corpus = batch, corpus
    token = token_variable and calls.secret_in(
      token_variable, "the retriever's token"
    )
    headers = {"Content-Type": "application/json"}
    if token:
      headers["Authorization"] = f"Bearer {token}"
    self._caller = calls.Caller(
      patience,
      headers=headers,
      secret=token,
      advice=_ADVICE,
      largest=largest,
      transport=transport,
      clock=clock,
    )
    self.counters: Counter[str] = self._caller.counters

  async def search(self, request: lexical.Request) -> Answer:
    """At most `k` passages in the server's order; see `search_many`."""
    (answer,) = await self.search_many([request])
    if isinstance(answer, Exception):
      raise answer
    return answer

  async def search_many(
    self, requests: Sequence[lexical.Request]
  ) -> list[Answer | Exception]:
    """Answers in the order of the requests, one call for each `k`.

    Returns:
      For each request its passages or a `RetrievalError`. Where the server
      refuses a batch, its parts are asked, so that one query it does not take
      fails alone.

    Raises:
      ValueError: as `calls.check`.
    """
    for request in requests:
      calls.check(request, self._corpus)
    if not requests:
      return []
    return await self._caller.wait(self._search(list(requests)))

  def identity(self) -> Any:
    """JSON values that say what answers come from; asks the server.

    Returns:
      What `GET /health` calls its `identity`, else the address.

    Raises:
      RetrievalError: the server is out of reach.
    """
    return self._caller.run(self._identity())

  def close(self) -> None:
    """Closes connections; searches under way fail."""
    self._caller.close()

  async def _search(
    self, requests: list[lexical.Request]
  ) -> list[Answer | Exception]:
    until = self._caller.until()
    self.counters["queries"] += len(requests)
    rows_of: dict[int, list[int]] = {}
    for row, request in enumerate(requests):
      rows_of.setdefault(request.k, []).append(row)
    batches = [
      (k, rows[start : start + self._batch])
      for k, rows in rows_of.items()
      for start in range(0, len(rows), self._batch)
    ]
    found = await asyncio.gather(
      *(
        self._ask_batch([requests[row].query for row in rows], k, until)
        for k, rows in batches
      )
    )
    answers: dict[int, Answer | Exception] = {}
    for (_, rows), some in zip(batches, found, strict=True):
      answers |= zip(rows, some, strict=True)
    return [answers[row] for row in range(len(requests))]

  async def _ask_batch(
    self, queries: list[str], k: int, until: float
  ) -> list[Answer | Exception]:
    """Answers of one call, or of its parts where it is refused."""
    answers: list[Answer | Exception] = []
    parts, refusals = [queries], 0
    while parts:
      part = parts.pop()
      try:
        answers += await self._ask(part, k, until)
        refusals = -math.inf
        continue
      except calls.RefusedError as error:
        failure = error
        if error.status in _ABOUT_QUERIES and len(part) > 1:
          refusals += 1
          if refusals <= _REFUSALS:
            half = len(part) // 2
            parts += [part[half:], part[:half]]
            continue
      except errors.RetrievalError as error:
        failure = error
      answers += [failure] * len(part)
    return answers

  async def _ask(
    self, queries: list[str], k: int, until: float
  ) -> list[Answer]:
    url = f"{self.url}/retrieve"
    asked = {"queries": queries, "topk": k, "return_scores": True}
    return await self._caller.ask(
      "POST",
      url,
      content=wire.body(asked),
      read=lambda data: _answers(
        data, len(queries), k, url, self._caller.redact
      ),
      until=until,
    )

  async def _identity(self) -> Any:
    url = f"{self.url}/health"
    unnamed = {"kind": "http", "url": self.url}

    def named(data: bytes) -> Any:
      try:
        value = wire.parse(data, url, self._caller.redact)
      except errors.RetrievalError:
        return unnamed
      named = isinstance(value, dict) and value.get("identity")
      return named or unnamed

    try:
      return await self._caller.ask(
        "GET", url, read=named, until=self._caller.until()
      )
    except calls.RefusedError as error:
      if error.status in (404, 405):
        return unnamed
      raise


def _answers(
  data: bytes, queries: int, k: int, url: str, redact: redaction.Redactor
) -> list[Answer]:
  """The passages of each query.

  Raises:
    RetrievalError: anything else than what was asked for.
  """

  def refuse(found: Any, expected: str) -> errors.RetrievalError:
    return errors.RetrievalError(
      f"{url}: found {redact.quote(repr(found), 80)}, expected {expected}. Is "
      "it a server of Search-R1's protocol?"
    )

  def passage(item: Any) -> passages.Passage:
    document = item.get("document") if isinstance(item, dict) else None
    contents = document.get("contents") if isinstance(document, dict) else None
    if not isinstance(contents, str) or not _is_unicode(contents):
      raise refuse(
        item, 'a hit such as {"document": {"contents": "..."}, "score": 1.0}'
      )
    score = item.get("score")
    if not _is_finite(score):
      raise refuse(score, "a finite score")
    # Search-R1's BM25 gives none.
    identifier = document.get("id")
    if identifier is None:
      identifier = hashlib.sha256(contents.encode()).hexdigest()[:16]
    elif isinstance(identifier, bool) or not isinstance(identifier, str | int):
      raise refuse(identifier, "an id that is text or a number")
    elif not _is_unicode(str(identifier)):
      raise refuse(identifier, "an id of Unicode characters")
    title, _, text = contents.partition("\n")
    return passages.Passage(str(identifier), title, text, float(score))

  value = wire.parse(data, url, redact)
  result = value.get("result") if isinstance(value, dict) else None
  if not isinstance(result, list):
    raise refuse(value, 'an object with a list "result"')
  if len(result) != queries:
    raise refuse(f"{len(result)} answers", f"{queries}, one a query")
  for hits in result:
    if not isinstance(hits, list):
      raise refuse(hits, "a list of hits for each query")
    if len(hits) > k:
      raise refuse(f"{len(hits)} hits", f"at most {k}")
  return [tuple(map(passage, hits)) for hits in result]


def _is_finite(score: Any) -> bool:
  if isinstance(score, bool) or not isinstance(score, int | float):
    return False
  try:
    return math.isfinite(score)
  except OverflowError:  # An integer that no float is near to.
    return False


def _is_unicode(text: str) -> bool:
  """Half a surrogate pair cannot be encoded, by no tokenizer either."""
  try:
    text.encode()
  except UnicodeEncodeError:
    return False
  return True
