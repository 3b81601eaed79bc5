"""A retriever over HTTP, for servers with Search-R1's protocol.

    POST /retrieve  {"queries": [...], "topk": 3, "return_scores": true}
    {"result": [[{"document": {"id": ..., "contents": ...}, "score": ...}]]}

Requests always ask for scores, because Search-R1's server fails without. The
answer to a query is accepted only if all of it has the expected form.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import httpx2

from anysearch_jax import types
from anysearch_jax.host.http import calls, errors, redaction, wire
from retrieval import requests as requests_lib

Answer = tuple[types.Passage, ...]

_ADVICE = "Is a retriever running there (launch.serve_retriever)?"
# Statuses that concern the caller or the address, not a query.
_ABOUT_CALLERS = (401, 402, 403, 404, 405, 407, 410, 415, 426)
# After this many failed calls stop bisecting: the server is at fault, not a
# query.
_FAILED = 16


class HttpRetriever(requests_lib.OneByBatch):
  """Asks a retrieval server; safe to use from any event loop and thread.

  Args:
    url: address of the server, with or without `/retrieve`.
    batch: the most queries in one call.
    corpus: name of the corpus that the server searches; a request must name
      this corpus or none.
    patience: deadlines and retries.
    token_variable: the environment variable with the server's bearer token;
      "" sends no token.
    largest: the most bytes of an answer.
    transport: replaces the network, for tests.
    clock: returns the seconds that the circuit breaker uses.

  Raises:
    ValueError: the url is invalid or the token is missing.

  `counters` has the counters of `calls.Caller`, the `queries`, and the `splits`
  of batches. A batch that was split does not count as one of the `failures`;
  its failed queries do.
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
      # The message does not quote the url, which may contain a password.
      raise ValueError(
        "The retriever's url is invalid; expected an address such as "
        "http://127.0.0.1:8000, with no user, query or fragment."
      )
    if batch < 1:
      raise ValueError(f"batch: found {batch}, expected at least 1.")
    self.url = url.rstrip("/").removesuffix("/retrieve").rstrip("/")
    self._batch, self._corpus = batch, corpus
    token = token_variable and calls.secret_in(
      token_variable, "the retriever's token"
    )
    self._caller = calls.Caller(
      patience,
      headers=calls.json_headers(token),
      secret=token,
      advice=_ADVICE,
      largest=largest,
      transport=transport,
      clock=clock,
    )
    self.counters: Counter[str] = self._caller.counters
    self._answered: str | None = None

  async def search_many(
    self, requests: Sequence[types.SearchRequest]
  ) -> list[Answer | Exception]:
    """Returns answers in the order of the requests, in one batch for each `k`.

    If the server answers a batch with an error that a single query may have
    caused, the batch is bisected, so that only this query fails. Before that, a
    query that was answered earlier is repeated: if it fails too, the server is
    at fault, and the whole batch fails.

    Returns:
      For each request its passages or a `RetrievalError`.

    Raises:
      ValueError: a request is invalid, see `requests.check`.
    """
    requests_lib.check(requests, self._corpus)
    if not requests:
      return []
    return await self._caller.wait(self._search(list(requests)))

  def identity(self) -> Any:
    """Asks the server for JSON values that identify its answers.

    Returns:
      The `identity` that `GET /health` reports, or the address if there is
      none.

    Raises:
      RetrievalError: the server cannot be reached.
    """
    return self._caller.run(self._identity())

  def close(self) -> None:
    """Closes all connections; running searches fail."""
    self._caller.close()

  async def _search(
    self, requests: list[types.SearchRequest]
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
    """Answers one batch; bisects it when a single query may be at fault."""
    answers: list[Answer | Exception] = []
    # (queries, whether this is the second try of a single query).
    parts, failed = [(queries, False)], 0
    failure: types.RetrievalError | None = None
    # Whether the server works; None: unknown, it has not answered yet.
    is_well: bool | None = None
    while parts:
      part, again = parts.pop()
      try:
        answers += await self._ask(part, k, until)
        is_well = True
        continue
      except types.RetrievalError as error:
        failure = error
      if not _may_be_of_a_query(failure):
        answers += [failure] * len(part)
        continue
      failed += 1
      if is_well is None:
        is_well = await self._answers_still(k, until)
      if is_well is False or (is_well is None and failed > _FAILED):
        break
      if len(part) > 1:
        self.counters["splits"] += 1
        half = len(part) // 2
        parts += [(part[half:], False), (part[:half], False)]
      elif not again and isinstance(failure, calls.FailedError):
        parts.append((part, True))
      else:
        self.counters["failures"] += 1
        answers.append(failure)
    left = len(queries) - len(answers)
    self.counters["failures"] += left > 0
    if failure is None:
      return answers
    if failed and not is_well and not isinstance(failure, calls.RefusedError):
      self._caller.fail(failure)
    return answers + [failure] * left

  async def _answers_still(self, k: int, until: float) -> bool | None:
    """Repeats a query that was answered earlier; None if there is none."""
    if self._answered is None:
      return None
    try:
      await self._ask([self._answered], k, until)
    except types.RetrievalError:
      return False
    return True

  async def _ask(
    self, queries: list[str], k: int, until: float
  ) -> list[Answer | Exception]:
    """Makes one call; the answer to a query with malformed hits is an error.

    Raises:
      RetrievalError: the call failed, or no query has a valid answer.
    """
    url = f"{self.url}/retrieve"
    asked = {"queries": queries, "topk": k, "return_scores": True}
    answers = await self._caller.ask(
      "POST",
      url,
      content=wire.body(asked),
      read=lambda data: _answers(
        data, len(queries), k, url, self._caller.redact
      ),
      until=until,
      counted=False,
    )
    for query, answer in zip(queries, answers, strict=True):
      if isinstance(answer, Exception):
        self.counters["failures"] += 1
      else:
        self._answered = query
    return answers

  async def _identity(self) -> Any:
    url = f"{self.url}/health"
    unnamed = {"kind": "http", "url": self.url}

    def named(data: bytes) -> Any:
      try:
        value = wire.parse(data, url, self._caller.redact)
      except types.RetrievalError:
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


def _may_be_of_a_query(error: types.RetrievalError) -> bool:
  """Returns whether a query, and not caller or server, may cause the error."""
  if isinstance(error, calls.RefusedError):
    return error.status not in _ABOUT_CALLERS
  return isinstance(error, errors.AnswerError)


def _answers(
  data: bytes, queries: int, k: int, url: str, redact: redaction.Redactor
) -> list[Answer | Exception]:
  """Parses the passages of each query; malformed hits become an error.

  Raises:
    AnswerError: the reply is malformed, or the hits of all queries are.
  """

  def refuse(found: Any, expected: str) -> errors.AnswerError:
    return errors.AnswerError(
      f"{url}: found {redact.quote(repr(found), 80)}, expected {expected}. Is "
      "it a server of Search-R1's protocol?"
    )

  def passage(item: Any) -> types.Passage:
    document = item.get("document") if isinstance(item, dict) else None
    fields = document if isinstance(document, dict) else {}
    contents = fields.get("contents")
    if not isinstance(contents, str) or not _is_unicode(contents):
      raise refuse(
        item, 'a hit such as {"document": {"contents": "..."}, "score": 1.0}'
      )
    score = item.get("score")
    if not _is_finite(score):
      raise refuse(score, "a finite score")
    # Search-R1's BM25 server returns no ids.
    identifier = fields.get("id")
    if identifier is None:
      identifier = hashlib.sha256(contents.encode()).hexdigest()[:16]
    elif isinstance(identifier, bool) or not isinstance(identifier, str | int):
      raise refuse(identifier, "an id that is text or a number")
    elif not _is_unicode(str(identifier)):
      raise refuse(identifier, "an id of Unicode characters")
    title, _, text = contents.partition("\n")
    return types.Passage(str(identifier), title, text, float(score))

  value = wire.parse(data, url, redact)
  result = value.get("result") if isinstance(value, dict) else None
  if not isinstance(result, list):
    raise refuse(value, 'an object with a list "result"')
  if len(result) != queries:
    raise refuse(f"{len(result)} answers", f"{queries}, one a query")

  def answer(hits: Any) -> Answer | Exception:
    try:
      if not isinstance(hits, list):
        raise refuse(hits, "a list of hits for each query")
      if len(hits) > k:
        raise refuse(f"{len(hits)} hits", f"at most {k}")
      return tuple(map(passage, hits))
    except errors.AnswerError as error:
      return error

  answers = [answer(hits) for hits in result]
  refused = [each for each in answers if isinstance(each, Exception)]
  if len(refused) == len(answers):
    raise refused[0]
  return answers


def _is_finite(score: Any) -> bool:
  if isinstance(score, bool) or not isinstance(score, int | float):
    return False
  try:
    return math.isfinite(score)
  except OverflowError:  # An integer too large for a float.
    return False


def _is_unicode(text: str) -> bool:
  """Returns whether a text can be encoded, that is, has no lone surrogate."""
  try:
    text.encode()
  except UnicodeEncodeError:
    return False
  return True
