"""Queries of concurrent requests, searched together.

A search starts as soon as the one before it has ended, with all that came in
meanwhile: nobody waits for company, and the more is asked the larger, and by
the query the cheaper, searches become.
"""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import dataclasses
import logging
import math
import time
from collections.abc import Callable, Sequence

from anysearch_jax.host.http import errors
from retrieval import passages

Answer = Sequence[passages.Passage]
Search = Callable[[Sequence[str], int], Sequence[Answer]]
_log = logging.getLogger(__name__)


class SearchError(errors.RetrievalError):
  """What searches raised an error, or answered what is no answer."""


class FullError(errors.RetrievalError):
  """Too many queries wait; try again after `seconds`."""

  def __init__(self, message: str, seconds: float):
    super().__init__(message)
    self.seconds = seconds


class ClosedError(errors.RetrievalError):
  """The batcher takes and answers nothing more."""


class _Request:
  """Queries on their way: the first `taken` went into searches."""

  def __init__(self, queries: Sequence[str], k: int, future: asyncio.Future):
    self.queries, self.k, self.future = queries, k, future
    self.taken = 0
    self.answers: list[Answer] = []


@dataclasses.dataclass
class _Part:
  """What a search answers of a request."""

  request: _Request
  queries: Sequence[str]


class Batcher:
  """Searches for requests of one event loop, one search at a time on a thread.

  Args:
    search: at most k passages for each query, as `PassageSearch.search`.
    batch: the most different queries in a search.
    queue: the most queries that may wait.
    on_search: called on the thread with a search's queries and seconds.

  Requests are served in their order; equal queries of a search are asked once,
  for the most passages that anybody wants. Where a search fails, its requests
  are searched one by one, so that only those fail that have to.
  """

  def __init__(
    self,
    search: Search,
    *,
    batch: int,
    queue: int,
    on_search: Callable[[int, float], None] = lambda queries, seconds: None,
  ):
    self._ask, self._batch, self._queue = search, batch, queue
    self._on_search = on_search
    self._thread = concurrent.futures.ThreadPoolExecutor(1, "search")
    # Those with queries that wait, and those without an answer.
    self._line: collections.OrderedDict[_Request, None] = (
      collections.OrderedDict()
    )
    self._open: set[_Request] = set()
    self._starting = self._closed = False
    self._seconds = 0.0  # Of the last search.
    self._begun: float | None = None  # When the one that runs did.
    self.waiting = 0

  @property
  def busy(self) -> bool:
    """Whether a search runs."""
    return self._begun is not None

  @property
  def seconds(self) -> float:
    """How long the search that runs has taken; 0 while none does."""
    return 0.0 if self._begun is None else time.monotonic() - self._begun

  def submit(self, queries: Sequence[str], k: int) -> asyncio.Future:
    """The passages of each query, later, or a `SearchError` for one of them.

    Who cancels the future gives the queries' places back.

    Raises:
      FullError: no place for so many queries.
      ClosedError: the batcher is closed.
    """
    if self._closed:
      raise ClosedError("The service is stopping; ask another one.")
    if self.waiting + len(queries) > self._queue:
      searches = math.ceil(self.waiting / self._batch)
      raise FullError(
        f"{self.waiting} queries wait already, of {self._queue} that may, and "
        f"the request has {len(queries)}; ask later, or fewer at once.",
        searches * self._seconds,
      )
    loop = asyncio.get_running_loop()
    request = _Request(queries, k, loop.create_future())
    if not queries:
      request.future.set_result([])
      return request.future
    self.waiting += len(queries)
    self._line[request] = None
    self._open.add(request)
    request.future.add_done_callback(lambda _: self._leave(request))
    if not self.busy and not self._starting:
      # Not at once: what comes in the same round of the loop goes along.
      self._starting = True
      loop.call_soon(self._start)
    return request.future

  def close(self) -> None:
    """Takes nothing more, and ends what is open with `ClosedError`."""
    self._closed = True
    for request in list(self._open):
      if not request.future.done():
        request.future.set_exception(
          ClosedError("The service stopped before it had the answer.")
        )
    self._thread.shutdown(wait=False)

  def _leave(self, request: _Request) -> None:
    self._open.discard(request)
    if request in self._line:
      del self._line[request]
      self.waiting -= len(request.queries) - request.taken

  def _start(self) -> None:
    self._starting = False
    if self.busy or self._closed or not (parts := self._take()):
      return
    self._begun = time.monotonic()
    work = asyncio.get_running_loop().run_in_executor(
      self._thread, self._answer, parts
    )
    work.add_done_callback(lambda done: self._finish(parts, done))

  def _take(self) -> list[_Part]:
    """The first in line, as far as their queries go into one search."""
    parts: list[_Part] = []
    different: set[str] = set()
    while self._line:
      request = next(iter(self._line))
      if request.future.done():
        self._leave(request)
        continue
      start = request.taken
      for query in request.queries[start:]:
        if query not in different and len(different) == self._batch:
          break
        different.add(query)
        request.taken += 1
      self.waiting -= request.taken - start
      if request.taken > start:
        parts.append(_Part(request, request.queries[start : request.taken]))
      if request.taken < len(request.queries):
        break
      del self._line[request]
    return parts

  def _finish(self, parts: Sequence[_Part], done: asyncio.Future) -> None:
    self._begun = None
    # The thread works on while answers are handed out.
    self._start()
    for part, outcome in zip(parts, done.result(), strict=True):
      request = part.request
      if request.future.done():
        continue
      if isinstance(outcome, SearchError):
        request.future.set_exception(outcome)
        continue
      request.answers += outcome
      if len(request.answers) == len(request.queries):
        request.future.set_result(request.answers)

  # On the thread.

  def _answer(self, parts: Sequence[_Part]) -> list[list[Answer] | SearchError]:
    """The answers of each part, or why it has none."""
    try:
      return self._search(parts)
    except BaseException as error:  # Whatever it is, the next search may do.
      if len(parts) == 1:
        _log.exception("A search failed.")
      failed = SearchError(
        f"The search failed ({type(error).__name__}); the server's log says "
        "more."
      )
    if len(parts) == 1:
      return [failed]
    return [
      # Nobody waits for those that are done.
      failed if part.request.future.done() else self._answer([part])[0]
      for part in parts
    ]

  def _search(self, parts: Sequence[_Part]) -> list[list[Answer]]:
    queries = list(dict.fromkeys(q for part in parts for q in part.queries))
    start = time.monotonic()
    found = self._ask(queries, max(part.request.k for part in parts))
    self._seconds = time.monotonic() - start
    self._on_search(len(queries), self._seconds)
    if len(found) != len(queries):
      raise ValueError(f"Found {len(found)} answers to {len(queries)} queries.")
    if not all(math.isfinite(p.score) for some in found for p in some):
      raise ValueError("Found a score that is no finite number.")
    answers = dict(zip(queries, found, strict=True))
    return [
      [answers[query][: part.request.k] for query in part.queries]
      for part in parts
    ]
