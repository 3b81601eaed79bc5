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

from anysearch_jax.host.http import calls, errors, redaction, wire
from retrieval import passages

if TYPE_CHECKING:
  from retrieval import lexical  # It loads JAX.

Answer = tuple[passages.Passage, ...]

_ADVICE = "Is a retriever running there (launch.serve_retriever)?"
# Statuses that say something about the caller or the address, not a query.
_ABOUT_CALLERS = (401, 402, 403, 404, 405, 407, 410, 415, 426)
# After this many calls without an answer the server is at fault, not a query.
_FAILED = 16


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

  `counters` are `calls.Caller`'s, the `queries`, and the `splits` of batches; a
  batch that was split is not one of the `failures`, its failed queries are.
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
    self._answered: str | None = None

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
      answers a batch with an error that one of its queries may have caused, the
      halves are asked, and so on, so that this query fails alone. Before that a
      query that was answered earlier is asked again: when it fails too, the
      server is at fault, and the whole batch fails.

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
    """Answers of one call, or of its parts where a query may be at fault."""
    answers: list[Answer | Exception] = []
    # Queries, and whether they were asked alone before.
    parts, failed = [(queries, False)], 0
    failure: errors.RetrievalError | None = None
    # None: the server has not answered anything yet.
    is_well: bool | None = None
    while parts:
      part, again = parts.pop()
      try:
        answers += await self._ask(part, k, until)
        is_well = True
        continue
      except errors.RetrievalError as error:
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
    if failed and not is_well and not isinstance(failure, calls.RefusedError):
      self._caller.fail(failure)
    left = len(queries) - len(answers)
    self.counters["failures"] += left > 0
    return answers + [failure] * left

  async def _answers_still(self, k: int, until: float) -> bool | None:
    """Whether a query that had an answer has one now; None without one."""
    if self._answered is None:
      return None
    try:
      await self._ask([self._answered], k, until)
    except errors.RetrievalError:
      return False
    return True

  async def _ask(
    self, queries: list[str], k: int, until: float
  ) -> list[Answer | Exception]:
    """Answers of one call, with an exception for a query whose hits are none.

    Raises:
      RetrievalError: no query has an answer.
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


def _may_be_of_a_query(error: errors.RetrievalError) -> bool:
  """Whether another query could have met another answer than this one."""
  if isinstance(error, calls.RefusedError):
    return error.status not in _ABOUT_CALLERS
  return isinstance(error, errors.AnswerError)


def _answers(
  data: bytes, queries: int, k: int, url: str, redact: redaction.Redactor
) -> list[Answer | Exception]:
  """The passages of each query, or what is wrong with its hits.

  Raises:
    AnswerError: no query has what was asked for.
  """

  def refuse(found: Any, expected: str) -> errors.AnswerError:
    return errors.AnswerError(
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
  if all(isinstance(each, Exception) for each in answers):
    raise answers[0]
  return answers


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
