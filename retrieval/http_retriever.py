"""A retriever over HTTP, for servers with Search-R1's protocol.

    POST /retrieve  {"queries": [...], "topk": 3, "return_scores": true}
    {"result": [[{"document": {"id": ..., "contents": ...}, "score": ...}]]}

Requests always ask for scores, because Search-R1's server fails without. The
answer to a query is accepted only if all of it has the expected form.

Several servers may be one retriever, as shards of a corpus and their replicas:
`http://a:8000,http://b:8000|http://c:8000` names two shards, of which the
second has two replicas. A query goes to every shard, and the answers are merged
by score, so it finds what one server of the whole corpus finds. It never has a
part of an answer: a shard without a working replica fails the query.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import httpx2

from anysearch_jax import types
from anysearch_jax.host import http_calls, loop, redaction
from retrieval import requests as requests_lib

Answer = tuple[types.Passage, ...]

# Queries that one replica gets at a time.
_BATCH = 256
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

  `counters` has the counters of `http_calls.Caller`, the `queries`, and the
  `splits` of batches. A batch that was split does not count as one of the
  `failures`; its failed queries do.
  """

  def __init__(
    self,
    url: str,
    *,
    batch: int = 256,
    corpus: str = "",
    patience: http_calls.Patience = http_calls.DEFAULT,
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
    token = token_variable and http_calls.secret_in(
      token_variable, "the retriever's token"
    )
    self._caller = http_calls.Caller(
      patience,
      headers=http_calls.json_headers(token),
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

  def identity(self) -> Any:
    """Asks the server for JSON values that identify its answers.

    Returns:
      The `identity` that `GET /health` reports, or the address if there is
      none.

    Raises:
      RetrievalError: the server cannot be reached.
    """
    return loop.run(self._identity())

  def close(self) -> None:
    """Closes all connections; running searches fail."""
    self._caller.close()

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
      elif not again and isinstance(failure, http_calls.FailedError):
        parts.append((part, True))
      else:
        self.counters["failures"] += 1
        answers.append(failure)
    left = len(queries) - len(answers)
    self.counters["failures"] += left > 0
    if failure is None:
      return answers
    if (
      failed
      and not is_well
      and not isinstance(failure, http_calls.RefusedError)
    ):
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
      content=http_calls.body(asked),
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
        value = http_calls.parse(data, url, self._caller.redact)
      except types.RetrievalError:
        return unnamed
      named = isinstance(value, dict) and value.get("identity")
      return named or unnamed

    try:
      return await self._caller.ask("GET", url, read=named)
    except http_calls.RefusedError as error:
      if error.status in (404, 405):
        return unnamed
      raise


def _may_be_of_a_query(error: types.RetrievalError) -> bool:
  """Returns whether a query, and not caller or server, may cause the error."""
  if isinstance(error, http_calls.RefusedError):
    return error.status not in _ABOUT_CALLERS
  return isinstance(error, http_calls.AnswerError)


def _answers(
  data: bytes, queries: int, k: int, url: str, redact: redaction.Redactor
) -> list[Answer | Exception]:
  """Parses the passages of each query; malformed hits become an error.

  Raises:
    AnswerError: the reply is malformed, or the hits of all queries are.
  """

  def refuse(found: Any, expected: str) -> http_calls.AnswerError:
    return http_calls.AnswerError(
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

  value = http_calls.parse(data, url, redact)
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
    except http_calls.AnswerError as error:
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


def addresses(text: str) -> list[list[str]]:
  """Returns the replicas of each shard: commas divide shards, `|` replicas."""
  return [
    [url.strip() for url in shard.split("|")] for shard in text.split(",")
  ]


class ShardedRetriever(requests_lib.OneByBatch):
  """Asks all shards; safe to use from any event loop and thread.

  Args:
    shards: the addresses of each shard's replicas.
    corpus: name of the corpus; a request must name this corpus or none.
    patience: deadlines and retries of a query; replicas share the deadline.
    token_variable: the environment variable with the servers' bearer token.
    transport: replaces the network, for tests.
    clock: returns seconds.

  Raises:
    ValueError: an address is invalid or the token is missing.
  """

  def __init__(
    self,
    shards: Sequence[Sequence[str]],
    *,
    corpus: str = "",
    patience: http_calls.Patience = http_calls.DEFAULT,
    token_variable: str = "",
    transport: httpx2.AsyncBaseTransport | None = None,
    clock: Callable[[], float] = time.monotonic,
  ):
    self._corpus = corpus
    self._shards: list[_Replicas] = []
    try:
      for urls in shards:
        each = dataclasses.replace(
          patience, deadline=patience.deadline / len(urls)
        )
        replicas = _Replicas(patience.cooldown, clock)
        self._shards.append(replicas)
        for url in urls:
          replicas.add(
            HttpRetriever(
              url,
              batch=_BATCH,
              corpus=corpus,
              patience=each,
              token_variable=token_variable,
              transport=transport,
              clock=clock,
            )
          )
    except ValueError:
      self.close()
      raise

  @property
  def counters(self) -> Counter[str]:
    """The sums of all servers' counters; see `HttpRetriever`."""
    return sum((s.counters for s in self._shards), Counter())

  async def search_many(
    self, requests: Sequence[types.SearchRequest]
  ) -> list[Answer | Exception]:
    """Returns answers in the order of the requests.

    Equal scores keep the order of shards, so servers of `--shard=0/N` to
    `--shard=N-1/N` in this order answer as one server of the whole index.

    Returns:
      For each request its passages, or the `RetrievalError` of a shard.

    Raises:
      ValueError: a request is invalid, see `requests.check`.
    """
    requests_lib.check(requests, self._corpus)
    found = await asyncio.gather(
      *(s.search_many(requests) for s in self._shards)
    )
    return [
      _merged(answers, request.k)
      for request, answers in zip(
        requests, zip(*found, strict=True), strict=True
      )
    ]

  def identity(self) -> Any:
    """Returns JSON values that identify the merged answers.

    They are those of the whole index if the servers have all of its parts in
    their order.

    Raises:
      RetrievalError: a server cannot be reached, replicas have different
        indexes, or the parts are not those of one index.
    """
    found = [shard.identity() for shard in self._shards]
    parts = [
      one.get("part") if isinstance(one, dict) else None for one in found
    ]
    if not any(parts):
      return found[0] if len(found) == 1 else {"kind": "shards", "of": found}
    whole = [{k: v for k, v in one.items() if k != "part"} for one in found]
    expected = [[i, len(found)] for i in range(len(found))]
    if parts != expected or any(each != whole[0] for each in whole):
      raise types.RetrievalError(
        f"Found servers of the parts {parts} of "
        f"{len({str(each) for each in whole})} indexes, expected {expected} of "
        "one index, in this order."
      )
    return whole[0]

  def close(self) -> None:
    """Closes all connections; running searches fail."""
    for shard in self._shards:
      shard.close()


class _Replicas:
  """Servers of the same passages; each query goes to one of them.

  The least busy server is asked first. What it cannot answer goes to the
  others; a server that failed is asked last for a while.
  """

  def __init__(self, cooldown: float, clock: Callable[[], float]):
    self._servers: list[HttpRetriever] = []
    self._open: Counter[int] = Counter()
    self._failed: dict[int, float] = {}
    self._cooldown, self._clock = cooldown, clock

  def add(self, server: HttpRetriever) -> None:
    self._servers.append(server)

  @property
  def counters(self) -> Counter[str]:
    return sum((server.counters for server in self._servers), Counter())

  async def search_many(
    self, asked: Sequence[types.SearchRequest]
  ) -> list[Answer | Exception]:
    starts = range(0, len(asked), _BATCH)
    found = await asyncio.gather(
      *(self._batch(asked[start : start + _BATCH]) for start in starts)
    )
    return [answer for batch in found for answer in batch]

  async def _batch(
    self, asked: Sequence[types.SearchRequest]
  ) -> list[Answer | Exception]:
    answers: dict[int, Answer | Exception] = {}
    left, waiting = list(range(len(asked))), set(range(len(self._servers)))
    while left and waiting:
      server = min(waiting, key=self._order)
      waiting.remove(server)
      self._open[server] += len(left)
      try:
        some = await self._servers[server].search_many([asked[i] for i in left])
      finally:
        self._open[server] -= len(left)
      answers |= zip(left, some, strict=True)
      left = [i for i in left if isinstance(answers[i], Exception)]
      if left:
        self._failed[server] = self._clock()
    return [answers[i] for i in range(len(asked))]

  def _order(self, server: int) -> tuple[bool, int, int]:
    failed = self._failed.get(server, float("-inf"))
    recent = self._clock() - failed < self._cooldown
    return recent, self._open[server], server

  def identity(self) -> Any:
    found = [server.identity() for server in self._servers]
    if any(each != found[0] for each in found):
      urls = ", ".join(server.url for server in self._servers)
      raise types.RetrievalError(
        f"{urls}: found replicas of different indexes; expected equal ones. "
        "Their GET /health shows the identities."
      )
    return found[0]

  def close(self) -> None:
    for server in self._servers:
      server.close()


def _merged(
  answers: Sequence[Answer | Exception], k: int
) -> Answer | Exception:
  """Merges the shards' answers by score; ties keep the order of shards."""
  for answer in answers:
    if isinstance(answer, Exception):
      return answer
  passages = [p for answer in answers for p in answer]  # type: ignore[union-attr]
  return tuple(sorted(passages, key=lambda p: -p.score)[:k])
