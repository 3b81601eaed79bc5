"""Combines the searches of many episodes into few calls to a retriever.

Queries that episodes ask in the same iteration of the event loop are sent as
one batch. A query that is already in flight is not sent again, and answers are
cached.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import itertools
import time
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence

from anysearch_jax import config as config_lib
from anysearch_jax import types
from anysearch_jax.host import counting, loop


@dataclasses.dataclass
class _Query:
  """One query in flight, and the episodes that wait for it."""

  key: Hashable
  request: types.SearchRequest
  waiters: list[asyncio.Future] = dataclasses.field(default_factory=list)
  call: _Call | None = None


@dataclasses.dataclass
class _Call:
  """One call to the retriever, and the queries in it."""

  task: asyncio.Task
  queries: list[_Query]


class BatchingRetriever:
  """A `types.Retriever` that batches and caches the searches of another one.

  Args:
    retriever: a `types.BatchRetriever` answers many queries in one call; any
      other is asked by concurrent calls. The answers of a
      `types.ContextualRetriever` are cached by its `context_key` too.
    config: sizes of batches, cache and passages.
    identity: of the index behind the retriever, a part of the cache's keys.
      Assign a new value to `identity` when the index changes.

  A failure is raised for every episode that waits for the query and is not
  cached. Cancelling one waiter does not affect the others; a call is cancelled
  when none of its queries has a waiter.

  Attributes:
    counters: `searches` (requested), `cache_hits` and `deduplicated` (searches
      that needed no query; the latter waited for another episode's answer),
      `batches` and `batched_queries` (sent), `failures` (of sent queries),
      `call_seconds` (summed over batches), `left_out` (queries that a pipeline
      answered without an optional stage), and `cut_passages` (longer than
      `config` allows). After `source/` are those of the retriever, such as the
      `cost` of a search engine.
  """

  def __init__(
    self,
    retriever: types.Retriever,
    config: config_lib.SearchConfig,
    *,
    identity: Hashable = "",
  ):
    self._retriever = retriever
    self._many = (
      retriever.search_many
      if isinstance(retriever, types.BatchRetriever)
      else None
    )
    self._context_key = (
      retriever.context_key
      if isinstance(retriever, types.ContextualRetriever)
      else None
    )
    # If the retriever cannot batch, send queries individually with the same
    # total concurrency.
    self._size, self._most_calls = (
      (config.batch, config.concurrency)
      if self._many
      else (1, config.batch * config.concurrency)
    )
    self._cache_size = config.cache
    self._passage_most = config.passage_characters
    self._answer_most = config.answer_characters
    self._cache: collections.OrderedDict[Hashable, tuple] = (
      collections.OrderedDict()
    )
    # Queries without an answer, and those of them that belong to no call yet.
    self._open: dict[Hashable, _Query] = {}
    self._waiting: dict[Hashable, _Query] = {}
    # Calls, and those of them that have not taken their queries yet.
    self._calls = self._starting = 0
    self.identity = identity
    self.counters: Counter[str] = Counter()
    # What the retriever had counted when it was last asked.
    self._counted: Counter[str] = Counter(counting.counters(retriever))

  def attach(self, engine: types.Engine, codec: types.TextCodec) -> None:
    """Passes the policy's engine to a retriever that generates with it."""
    attach(self._retriever, engine, codec)

  async def search(
    self, request: types.SearchRequest
  ) -> Sequence[types.Passage]:
    """Answers one query. Raises `types.RetrievalError` if it cannot."""
    if not loop.is_here():  # Searches of all event loops share their calls.
      return await loop.wait(self.search(request))
    key: Hashable = (request, self.identity)
    if self._context_key is not None:
      key = (key, self._context_key(request.known_context()))
    self.counters["searches"] += 1
    # LRU order: reinserting makes this the most recently used entry.
    answer = self._cache.pop(key, None)
    if answer is not None:
      self._cache[key] = answer
      self.counters["cache_hits"] += 1
      return answer
    query = self._open.get(key)
    if query is None:
      query = _Query(key, request)
      self._open[key] = self._waiting[key] = query
      self._start_calls()
    else:
      self.counters["deduplicated"] += 1
    # One future per waiter, because cancelling one must not cancel the others.
    mine = asyncio.get_running_loop().create_future()
    query.waiters.append(mine)
    try:
      return await mine
    except asyncio.CancelledError:
      self._leave(query, mine)
      raise

  def _start_calls(self) -> None:
    """Starts calls for waiting queries, up to the concurrency limit.

    A call takes its queries when it first runs. By then every episode that runs
    in this iteration of the event loop has added its query to the batch.
    """
    while (
      self._starting * self._size < len(self._waiting)
      and self._calls < self._most_calls
    ):
      # The event loop references the task until it runs, its queries then do:
      # a task without a strong reference may be garbage-collected, see
      # https://docs.python.org/3/library/asyncio-task.html#asyncio.create_task
      asyncio.get_running_loop().create_task(self._call())
      self._starting += 1
      self._calls += 1

  async def _call(self) -> None:
    """Takes up to one batch of waiting queries and answers them."""
    self._starting -= 1
    keys = list(itertools.islice(self._waiting, self._size))
    queries = [self._waiting.pop(key) for key in keys]
    task = asyncio.current_task()
    assert task is not None  # This is a coroutine.
    call = _Call(task, queries)
    for query in queries:
      query.call = call
    try:
      if queries:
        self._settle(queries, await self._answers(queries))
    except asyncio.CancelledError:
      # Cancelled by the last waiter (`_leave`) or by the retriever itself.
      gone = types.RetrievalError("The retriever gave the search up.")
      self._settle(queries, [gone] * len(queries))
      raise
    finally:
      self._calls -= 1
      self._start_calls()

  def _settle(
    self,
    queries: Sequence[_Query],
    answers: Sequence[tuple[types.Passage, ...] | Exception],
  ) -> None:
    """Gives all waiters of `queries` their answers or exceptions."""
    for query, answer in zip(queries, answers, strict=True):
      if self._open.get(query.key) is query:
        del self._open[query.key]
      for waiter in query.waiters:
        if waiter.done():
          continue
        if isinstance(answer, Exception):
          waiter.set_exception(answer)
        else:
          waiter.set_result(answer)
      query.waiters.clear()

  def _leave(self, query: _Query, mine: asyncio.Future) -> None:
    """Removes a waiter; cancels a call whose queries have none left."""
    if mine not in query.waiters:
      return  # The query was answered in the meantime.
    query.waiters.remove(mine)
    if query.waiters:
      return
    if query.call is None:
      del self._open[query.key], self._waiting[query.key]
    elif not any(other.waiters for other in query.call.queries):
      for other in query.call.queries:
        # From now on the same query starts a new call.
        self._open.pop(other.key, None)
      query.call.task.cancel()

  async def _answers(
    self, queries: Sequence[_Query]
  ) -> Sequence[tuple[types.Passage, ...] | Exception]:
    """Returns the retriever's answer or an exception for each query."""
    requests = [query.request for query in queries]
    self.counters["batches"] += 1
    self.counters["batched_queries"] += len(requests)
    started = time.perf_counter()
    found: Sequence[Sequence[types.Passage] | Exception]
    try:
      if self._many is None:
        found = [await self._retriever.search(requests[0])]
      else:
        found = await self._many(requests)
      if len(found) != len(requests):
        raise types.RetrievalError(
          f"Found {len(found)} answers to {len(requests)} queries, expected "
          "one for each."
        )
    # Bugs are caught too: `search` raises them in the episodes that wait.
    except Exception as error:
      found = [error] * len(requests)
    self._count_source()
    self.counters["call_seconds"] += (  # type: ignore[assignment]  # A float.
      time.perf_counter() - started
    )
    return [self._kept(*pair) for pair in zip(queries, found, strict=True)]

  def _count_source(self) -> None:
    """Adds what the retriever has counted since the last call."""
    now = Counter(counting.counters(self._retriever))
    for name, value in now.items():
      more = value - self._counted[name]
      self.counters[f"source/{name}"] += more
      if name.rpartition("/")[2] == "left_out":
        # Of a pipeline: queries that went on without an optional stage.
        self.counters["left_out"] += more
    self._counted = now

  def _kept(
    self, query: _Query, found: Sequence[types.Passage] | Exception
  ) -> tuple[types.Passage, ...] | Exception:
    """Caches and returns an answer; counts a failure and returns it."""
    if isinstance(found, Exception):
      self.counters["failures"] += 1
      return found
    answer = self._cache[query.key] = self._cut(found)
    while len(self._cache) > self._cache_size:
      self._cache.popitem(last=False)
    return answer

  def _cut(
    self, passages: Sequence[types.Passage]
  ) -> tuple[types.Passage, ...]:
    """Cuts passages to the sizes that `config` allows.

    Encoding ten million characters takes 20 seconds and 2 GB, and no context
    has room for them.
    """
    kept, left = [], self._answer_most
    for passage in passages:
      most = min(left, self._passage_most)
      size = len(passage.title) + len(passage.text)
      if size > most or len(passage.id) > self._passage_most:
        self.counters["cut_passages"] += 1
        title = passage.title[:most]
        text = passage.text[: most - len(title)]
        name = passage.id[: self._passage_most]
        passage = dataclasses.replace(passage, id=name, title=title, text=text)
      left -= min(size, most)
      kept.append(passage)
    return tuple(kept)


def attach(part: object, engine: types.Engine, codec: types.TextCodec) -> None:
  """Passes the policy's engine to a retriever, or a part of one, that uses it.

  Whatever plays episodes calls this before the first search.
  """
  if isinstance(part, types.EngineUser):
    part.attach(engine, codec)


def metrics(counters: Mapping[str, float]) -> dict[str, float]:
  """Returns the metrics of `BatchingRetriever.counters`.

  Args:
    counters: may be summed over hosts.

  Returns:
    `search/...`: the counts; `hit_rate`, the share of searches that the cache
    answered; queries and seconds per batch; after `source/`, what the retriever
    counted. A ratio with denominator 0 is 0.
  """
  count = Counter(counters)

  def ratio(part: float, whole: str) -> float:
    return part / max(count[whole], 1)

  return {
    **{
      f"search/{name}": float(count[name])
      for name in (
        "searches",
        "cache_hits",
        "deduplicated",
        "batches",
        "failures",
        "left_out",
        "cut_passages",
      )
    },
    **{
      f"search/{name}": float(value)
      for name, value in count.items()
      if name.startswith("source/")
    },
    "search/hit_rate": ratio(count["cache_hits"], "searches"),
    "search/queries_a_batch": ratio(count["batched_queries"], "batches"),
    "search/seconds_a_batch": ratio(count["call_seconds"], "batches"),
  }
