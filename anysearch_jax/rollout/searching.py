"""The searches of many episodes as few calls to a retriever.

What the episodes ask in one round of the event loop leaves as one batch; a
query that is asked already is not asked again, and answers are kept.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import itertools
import time
import weakref
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from typing import Protocol

from anysearch_jax import config as config_lib
from anysearch_jax import types


class BatchRetriever(types.Retriever, Protocol):
  """A retriever that answers many queries in one call."""

  async def search_many(
    self, requests: Sequence[types.SearchRequest]
  ) -> Sequence[Sequence[types.Passage] | Exception]:
    """Answers in the order of the requests.

    A query that fails alone is answered by its exception; what is raised fails
    all of them.
    """
    ...


@dataclasses.dataclass
class _Query:
  """One query on its way, and the episodes that wait for it."""

  key: Hashable
  request: types.SearchRequest
  waiters: list[asyncio.Future] = dataclasses.field(default_factory=list)
  call: _Call | None = None


@dataclasses.dataclass
class _Call:
  """One call to the retriever, and the queries that it asks."""

  task: asyncio.Task
  queries: list[_Query]


class _Traffic:
  """What is on its way in one event loop.

  open: queries without an answer. waiting: those of them that no call has
  taken. calls: how many run; `starting` of them took nothing yet.
  """

  def __init__(self):
    self.open: dict[Hashable, _Query] = {}
    self.waiting: dict[Hashable, _Query] = {}
    self.calls = self.starting = 0


class Searcher:
  """`types.Retriever` over another one; see the module.

  Args:
    retriever: answers; by `search_many` (see `BatchRetriever`) where it has it.
      Where it has not, the queries of a batch are asked by concurrent `search`.
      One whose answer is for the asker alone (`types.Asker`) has an attribute
      `by_asker` that is true.
    config: sizes of batches and cache.
    identity: of the index behind the retriever. Assign another one to
      `identity` when the index changes: older answers are then not found.

  A failure is told to those who wait for that query and is not kept. Who stops
  waiting takes nothing from the others; when nobody waits for any query of a
  call any more, it is cancelled. Answers outlive the event loop, nothing else
  does.

  `counters` holds `searches` that were asked, of which `cache_hits` and
  `deduplicated` (another episode's answer was waited for) needed no query; the
  `batches` sent, their `batched_queries`, how many of these had `failures`, and
  the `call_seconds` of all batches together; the `cut_passages` that were
  longer than `config` allows.
  """

  def __init__(
    self,
    retriever: types.Retriever,
    config: config_lib.SearchConfig,
    *,
    identity: Hashable = "",
  ):
    validate(config)
    self._retriever = retriever
    self._many = getattr(retriever, "search_many", None)
    self._by_asker = getattr(retriever, "by_asker", False)
    # Without batches a query is a call: as many are under way at a time.
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
    self._traffic: weakref.WeakKeyDictionary[
      asyncio.AbstractEventLoop, _Traffic
    ] = weakref.WeakKeyDictionary()
    self.identity = identity
    self.counters: Counter[str] = Counter()

  def attach(self, engine: types.Engine, codec: types.TextCodec) -> None:
    """Gives the policy's engine to a retriever that asks it."""
    if hasattr(self._retriever, "attach"):
      self._retriever.attach(engine, codec)

  async def search(
    self, request: types.SearchRequest
  ) -> Sequence[types.Passage]:
    """Answers one query. Raises `types.RetrievalError` when it cannot."""
    key = (request.query, request.k, request.corpus, self.identity)
    if self._by_asker:
      key += (request.asker.address, request.asker.turn)
    self.counters["searches"] += 1
    # Taken out and put back, it is the most recently used.
    answer = self._cache.pop(key, None)
    if answer is not None:
      self._cache[key] = answer
      self.counters["cache_hits"] += 1
      return answer
    loop = asyncio.get_running_loop()
    traffic = self._traffic.get(loop)
    if traffic is None:
      traffic = self._traffic[loop] = _Traffic()
    query = traffic.open.get(key)
    if query is None:
      query = _Query(key, request)
      traffic.open[key] = traffic.waiting[key] = query
      self._start_calls(traffic)
    else:
      self.counters["deduplicated"] += 1
    # A future for each, because cancelling one must leave the others theirs.
    mine = loop.create_future()
    query.waiters.append(mine)
    try:
      return await mine
    except asyncio.CancelledError:
      _leave(query, mine, traffic)
      raise

  def _start_calls(self, traffic: _Traffic) -> None:
    """Has calls for all that waits, as far as there may be so many.

    A call takes its queries when it first runs: by then all that runs in this
    round of the loop has asked.
    """
    while (
      traffic.starting * self._size < len(traffic.waiting)
      and traffic.calls < self._most_calls
    ):
      # The loop holds it until it runs, then the queries that it took do.
      asyncio.get_running_loop().create_task(self._call(traffic))
      traffic.starting += 1
      traffic.calls += 1

  async def _call(self, traffic: _Traffic) -> None:
    """Takes queries that wait and answers them."""
    traffic.starting -= 1
    keys = list(itertools.islice(traffic.waiting, self._size))
    queries = [traffic.waiting.pop(key) for key in keys]
    call = _Call(asyncio.current_task(), queries)
    for query in queries:
      query.call = call
    try:
      if queries:
        _settle(queries, await self._answers(queries), traffic)
    except asyncio.CancelledError:
      # By the last of the waiters, or by the retriever itself.
      gone = types.RetrievalError("The retriever gave the search up.")
      _settle(queries, [gone] * len(queries), traffic)
      raise
    finally:
      traffic.calls -= 1
      self._start_calls(traffic)

  async def _answers(
    self, queries: Sequence[_Query]
  ) -> Sequence[tuple[types.Passage, ...] | Exception]:
    """What the retriever says, an answer or an exception for each query."""
    requests = [query.request for query in queries]
    self.counters["batches"] += 1
    self.counters["batched_queries"] += len(requests)
    started = time.perf_counter()
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
    # Bugs too: they are raised where the answer is waited for.
    except Exception as error:
      found = [error] * len(requests)
    self.counters["call_seconds"] += time.perf_counter() - started
    return [self._kept(*pair) for pair in zip(queries, found, strict=True)]

  def _kept(
    self, query: _Query, found: Sequence[types.Passage] | Exception
  ) -> tuple[types.Passage, ...] | Exception:
    """An answer for all who ask now and later; failures are not for later."""
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
    """The passages as far as an episode may see them.

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


def metrics(counters: Mapping[str, float]) -> dict[str, float]:
  """What is logged of `Searcher.counters`, of one process or summed over all.

  Returns:
    `search/...`: the counts; the share of searches that the cache answered
    (`hit_rate`); queries and seconds of a batch. Shares of nothing are 0.
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
        "cut_passages",
      )
    },
    "search/hit_rate": ratio(count["cache_hits"], "searches"),
    "search/queries_a_batch": ratio(count["batched_queries"], "batches"),
    "search/seconds_a_batch": ratio(count["call_seconds"], "batches"),
  }


def _settle(
  queries: Sequence[_Query],
  answers: Sequence[tuple[types.Passage, ...] | Exception],
  traffic: _Traffic,
) -> None:
  """Wakes who waits."""
  for query, answer in zip(queries, answers, strict=True):
    if traffic.open.get(query.key) is query:
      del traffic.open[query.key]
    for waiter in query.waiters:
      if waiter.done():
        continue
      if isinstance(answer, Exception):
        waiter.set_exception(answer)
      else:
        waiter.set_result(answer)
    query.waiters.clear()


def _leave(query: _Query, mine: asyncio.Future, traffic: _Traffic) -> None:
  """Stops waiting; what nobody waits for any more is given up."""
  if mine not in query.waiters:
    return  # It was answered just now.
  query.waiters.remove(mine)
  if query.waiters:
    return
  if query.call is None:
    del traffic.open[query.key], traffic.waiting[query.key]
  elif not any(other.waiters for other in query.call.queries):
    for other in query.call.queries:
      # From now on the same query is asked anew.
      traffic.open.pop(other.key, None)
    query.call.task.cancel()


def validate(config: config_lib.SearchConfig) -> None:
  """Raises ValueError with a sentence for sizes that cannot work."""
  for name, least in (
    *(("cache", 0), ("batch", 1), ("concurrency", 1)),
    *(("passage_characters", 1), ("answer_characters", 1)),
  ):
    found = getattr(config, name)
    if found < least:
      raise ValueError(
        f"search.{name}: found {found}, expected at least {least}."
      )
