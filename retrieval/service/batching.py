"""Batches the queries of concurrent requests into common searches.

A search starts as soon as the previous one has ended, with all queries that
arrived meanwhile. So no query waits for a batch to fill, and under load the
batches grow and each query becomes cheaper.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import functools
import itertools
import logging
import math
import time
from collections.abc import Callable, Sequence

from anysearch_jax import types
from anysearch_jax.retrieval.service import dialects

Answer = Sequence[types.Passage]
Search = Callable[[Sequence[str], int], Sequence[Answer]]
_log = logging.getLogger(__name__)


@dataclasses.dataclass(eq=False)
class _Query:
  """A query without an answer; queries of one request have equal `request`s."""

  text: str
  k: int
  request: int
  answer: asyncio.Future[Answer]


@dataclasses.dataclass(eq=False)
class Batcher:
  """Runs the searches of one event loop, one at a time, on a thread.

  Requests are served in order. Equal queries of a search are searched once,
  with the largest k of all. If a search fails, its requests are searched one by
  one, so that only the requests at fault fail.

  Attributes:
    search: returns at most k passages for each query, as
      `SearchIndex.search`.
    batch: the most distinct queries in a search.
    queue: the most queries that may wait.
    on_search: called on the thread with a search's queries and seconds.
  """

  search: Search
  _: dataclasses.KW_ONLY
  batch: int
  queue: int
  on_search: Callable[[int, float], None] = lambda queries, seconds: None

  def __post_init__(self):
    self._thread = concurrent.futures.ThreadPoolExecutor(1, "search")
    # Queries that wait, in order; and all queries without an answer.
    self._line: dict[_Query, None] = {}
    self._open: set[_Query] = set()
    self._numbers = itertools.count()
    self._closed = False
    self._seconds = 0.0  # Duration of the last search.
    self._begun: float | None = None  # Start of the running search.

  @property
  def waiting(self) -> int:
    """The number of queries that wait."""
    return len(self._line)

  @property
  def busy(self) -> bool:
    """Whether a search runs."""
    return self._begun is not None

  @property
  def seconds(self) -> float:
    """Seconds since the running search began; 0 if no search runs."""
    return 0.0 if self._begun is None else time.monotonic() - self._begun

  def submit(self, queries: Sequence[str], k: int) -> asyncio.Future:
    """Queues a request; the future gets its passages.

    It fails with status 500 if its search does, and with 503 if this is closed.
    Cancelling it removes the waiting queries from the queue.

    Raises:
      RequestError: the queue has no space for the queries (429), or this is
        closed (503).
    """
    if self._closed:
      raise dialects.RequestError(
        "The service is stopping; send the request to another server.",
        503,
        Retry_After="1",
      )
    if self.waiting + len(queries) > self.queue:
      seconds = math.ceil(self.waiting / self.batch) * self._seconds
      raise dialects.RequestError(
        f"The queue holds {self.waiting} of at most {self.queue} queries, and "
        f"the request has {len(queries)} more; try again later, or send fewer.",
        429,
        Retry_After=str(max(1, math.ceil(seconds))),
      )
    loop = asyncio.get_running_loop()
    request = next(self._numbers)
    queries_of_request = [
      _Query(q, k, request, loop.create_future()) for q in queries
    ]
    for query in queries_of_request:
      query.answer.add_done_callback(functools.partial(self._leave, query))
    self._line |= dict.fromkeys(queries_of_request)
    self._open |= {*queries_of_request}
    if queries_of_request and not self.busy:
      # Deferred, so that requests of the same event-loop iteration join it.
      loop.call_soon(self._start)
    answers = asyncio.gather(*(query.answer for query in queries_of_request))

    def end_request(answers: asyncio.Future) -> None:
      """Ends all of a request that failed or was cancelled."""
      for query in queries_of_request:
        query.answer.cancel()
      if not answers.cancelled():
        answers.exception()  # Nobody may wait for it any more.

    answers.add_done_callback(end_request)
    return answers

  def close(self) -> None:
    """Accepts no more requests and ends open ones with status 503."""
    self._closed = True
    stopped = "The service stopped before it had the answer."
    for query in list(self._open):
      if not query.answer.done():
        error = dialects.RequestError(stopped, 503, Retry_After="1")
        query.answer.set_exception(error)
    self._thread.shutdown(wait=False)

  def _leave(self, query: _Query, answer: asyncio.Future) -> None:
    self._open.discard(query)
    self._line.pop(query, None)

  def _start(self) -> None:
    if self.busy or self._closed or not self._line:
      return
    batch: list[_Query] = []
    different: set[str] = set()
    for query in self._line:
      if query.text not in different and len(different) == self.batch:
        break
      different.add(query.text)
      batch.append(query)
    for query in batch:
      del self._line[query]
    self._begun = time.monotonic()
    work = asyncio.get_running_loop().run_in_executor(
      self._thread, self._answers, batch
    )
    work.add_done_callback(lambda done: self._finish(batch, done))

  def _finish(self, batch: Sequence[_Query], done: asyncio.Future) -> None:
    self._begun = None
    answers = list(zip(batch, done.result(), strict=True))
    # A request that failed needs none of its other answers.
    failed = {
      q.request for q, answer in answers if isinstance(answer, Exception)
    }
    for query in [q for q in self._line if q.request in failed]:
      del self._line[query]
    # Start the next search first, so the thread works while answers go out.
    self._start()
    for query, answer in answers:
      if query.answer.done():
        continue
      if isinstance(answer, Exception):
        query.answer.set_exception(answer)
      else:
        query.answer.set_result(answer)

  # The methods below run on the search thread.

  def _answers(
    self, batch: Sequence[_Query]
  ) -> Sequence[Answer | dialects.RequestError]:
    """Returns an answer for each query, or the error of its request."""
    requests = [
      list(request_queries)
      for _, request_queries in itertools.groupby(batch, lambda q: q.request)
    ]
    try:
      return self._search(batch)
    except BaseException as error:  # The next search may still succeed.
      failed = dialects.RequestError(
        f"The search failed ({type(error).__name__}).", 500
      )
      if len(requests) == 1:
        _log.exception("A search failed.")
        failed.__cause__ = error
        return [failed] * len(batch)
    # Skip requests that were cancelled or have already failed.
    answers: list[Answer | dialects.RequestError] = []
    for request_queries in requests:
      is_over = all(query.answer.done() for query in request_queries)
      answers += (
        [failed] * len(request_queries)
        if is_over
        else self._answers(request_queries)
      )
    return answers

  def _search(self, batch: Sequence[_Query]) -> list[Answer]:
    queries = list(dict.fromkeys(query.text for query in batch))
    start = time.monotonic()
    answers_in_order = self.search(queries, max(query.k for query in batch))
    self._seconds = time.monotonic() - start
    self.on_search(len(queries), self._seconds)
    if len(answers_in_order) != len(queries):
      raise ValueError(
        f"Found {len(answers_in_order)} answers to {len(queries)} queries."
      )
    if not all(
      math.isfinite(p.score) for answer in answers_in_order for p in answer
    ):
      raise ValueError("Found a score that is no finite number.")
    answers = dict(zip(queries, answers_in_order, strict=True))
    return [answers[query.text][: query.k] for query in batch]
