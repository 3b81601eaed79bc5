"""Batches the queries of concurrent requests into common searches.

A search starts as soon as the previous one has ended, with all queries that
arrived meanwhile. So no query waits for a batch to fill, and under load the
batches grow and each query becomes cheaper.
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

from anysearch_jax import types

Answer = Sequence[types.Passage]
Search = Callable[[Sequence[str], int], Sequence[Answer]]
_log = logging.getLogger(__name__)


class SearchError(types.RetrievalError):
  """The search raised an error or returned an invalid answer."""


class FullError(types.RetrievalError):
  """The queue is full; try again after `seconds`."""

  def __init__(self, message: str, seconds: float):
    super().__init__(message)
    self.seconds = seconds


class ClosedError(types.RetrievalError):
  """The batcher is closed and answers nothing more."""


class _Request:
  """A request; its first `taken` queries are already in searches."""

  def __init__(self, queries: Sequence[str], k: int, future: asyncio.Future):
    self.queries, self.k, self.future = queries, k, future
    self.taken = 0
    self.answers: list[Answer] = []


@dataclasses.dataclass
class _Part:
  """The queries of a request that one search answers."""

  request: _Request
  queries: Sequence[str]


class Batcher:
  """Runs the searches of one event loop, one at a time, on a thread.

  Requests are served in order. Equal queries of a search are searched once,
  with the largest k of all. If a search fails, its requests are searched one by
  one, so that only the requests at fault fail.

  Args:
    search: returns at most k passages for each query, as
      `SearchIndex.search`.
    batch: the most distinct queries in a search.
    queue: the most queries that may wait.
    on_search: called on the thread with a search's queries and seconds.
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
    # `_line`: requests with waiting queries. `_open`: requests not answered.
    self._line: collections.OrderedDict[_Request, None] = (
      collections.OrderedDict()
    )
    self._open: set[_Request] = set()
    self._starting = self._closed = False
    self._seconds = 0.0  # Duration of the last search.
    self._begun: float | None = None  # Start of the running search.
    self.waiting = 0

  @property
  def busy(self) -> bool:
    """Whether a search runs."""
    return self._begun is not None

  @property
  def seconds(self) -> float:
    """Seconds since the running search began; 0 if no search runs."""
    return 0.0 if self._begun is None else time.monotonic() - self._begun

  def submit(self, queries: Sequence[str], k: int) -> asyncio.Future:
    """Queues a request; the future gets its passages or a `SearchError`.

    Cancelling the future removes the waiting queries from the queue.

    Raises:
      FullError: the queue has no space for the queries.
      ClosedError: the batcher is closed.
    """
    if self._closed:
      raise ClosedError(
        "The service is stopping; send the request to another server."
      )
    if self.waiting + len(queries) > self._queue:
      searches = math.ceil(self.waiting / self._batch)
      raise FullError(
        f"The queue holds {self.waiting} of at most {self._queue} queries, and "
        f"the request has {len(queries)} more; try again later, or send fewer.",
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
      # Deferred, so that requests of the same event-loop iteration join it.
      self._starting = True
      loop.call_soon(self._start)
    return request.future

  def close(self) -> None:
    """Accepts no more requests and ends open ones with `ClosedError`."""
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
    """Removes from the queue the queries that fit into the next search."""
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
    # Start the next search first, so the thread works while answers go out.
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

  # The methods below run on the search thread.

  def _answer(
    self, parts: Sequence[_Part]
  ) -> Sequence[list[Answer] | SearchError]:
    """Returns the answers of each part, or its error."""
    try:
      return self._search(parts)
    except BaseException as error:  # The next search may still succeed.
      if len(parts) == 1:
        _log.exception("A search failed.")
      failed = SearchError(
        f"The search failed ({type(error).__name__}); the server's log says "
        "more."
      )
    if len(parts) == 1:
      return [failed]
    return [
      # Skip requests that were cancelled or have already failed.
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
