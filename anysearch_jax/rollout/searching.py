"""Combines the searches of many episodes into few calls to a retriever.

Queries that episodes ask in the same iteration of the event loop are sent as
one batch. A query that is already in flight is not sent again, and answers are
cached. Where a policy has several tools, `Toolbox` passes each call on to the
retriever of its tool.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import functools
import itertools
import re
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Hashable, Mapping, Sequence
from typing import Any

from anysearch_jax import config as config_lib
from anysearch_jax import types
from anysearch_jax.config import settings
from anysearch_jax.environment import protocol, tools
from anysearch_jax.host import counting, json_files, loop, turns

_COUNTS = (
  "searches",
  "cache_hits",
  "deduplicated",
  "batches",
  "failures",
  "left_out",
  "cut_passages",
)
# Passages among which a page is looked for.
_DEPTH = 20
_NUMBER = re.compile(r"\d+")
_DIGITS = 40  # Of the longest number in an id that is ordered by its value.

_DEFAULTS = config_lib.SearchConfig()

Answer = Sequence[types.Passage] | Exception


@dataclasses.dataclass(eq=False)
class _Query:
  """One query without an answer.

  answer: what its waiters wait for. waiters: number of searches that do.
  call, batch: the call that it is in, and that call's queries.
  turn: whether it still waits to be sent.
  """

  key: Hashable
  request: types.SearchRequest
  answer: asyncio.Future[tuple[types.Passage, ...]]
  waiters: int = 0
  call: asyncio.Task | None = None
  batch: Sequence[_Query] = ()
  turn: turns.Limit = dataclasses.field(
    default_factory=lambda: turns.Limit(waits=1)
  )


class BatchingRetriever:
  """A `types.Retriever` that batches and caches the searches of another one.

  Args:
    retriever: a `types.BatchRetriever` answers many queries in one call; any
      other is asked by concurrent calls. The answers of a
      `types.ContextualRetriever` are cached by its `context_key` too.
    config: sizes of batches, cache and passages.

  The deadline of a search (`turns.Limit`) stands still until its query is sent.
  A failure is raised for every episode that waits for the query and is not
  cached. Cancelling one waiter does not affect the others; a call is cancelled
  when none of its queries has a waiter.

  Attributes:
    counters: `searches` (requested), `cache_hits` and `deduplicated` (searches
      that needed no query; the latter waited for another episode's answer),
      `batches` and `batched_queries` (sent), `failures` (of sent queries;
      `failed_late` and so on by `RetrievalError.why`), `call_seconds` (summed
      over batches), `left_out` (queries that a pipeline answered without an
      optional stage), and `cut_passages` (longer than `config` allows). After
      `source/` are those of the retriever, such as the `cost` of a search
      engine.
  """

  def __init__(
    self, retriever: types.Retriever, config: config_lib.SearchConfig
  ):
    if not isinstance(retriever, types.Retriever):
      raise ValueError(
        f"retriever: found a {type(retriever).__name__}, expected an object "
        "with async def search(self, request)."
      )
    self._retriever = retriever
    self._config = config
    self.attach = functools.partial(attach, retriever)
    self._context_key = (
      retriever.context_key
      if isinstance(retriever, types.ContextualRetriever)
      else None
    )
    # If the retriever cannot batch, send queries individually with the same
    # total concurrency.
    self._size = 1
    self._most_calls = config.batch * config.concurrency
    self._ask: Callable[..., Coroutine[Any, Any, Sequence[Answer]]] = (
      self._alone
    )
    if isinstance(retriever, types.BatchRetriever):
      self._size = config.batch
      self._most_calls = config.concurrency
      self._ask = retriever.search_many
    self._cache: collections.OrderedDict[Hashable, tuple] = (
      collections.OrderedDict()
    )
    # Queries without an answer, and those of them that belong to no call yet.
    self._open: dict[Hashable, _Query] = {}
    self._waiting: dict[Hashable, _Query] = {}
    self._calls = 0
    self._is_starting = False
    self.counters: Counter[str] = Counter()
    self._said = 0, time.monotonic()  # Queries that `waits` knew, and when.
    # What the retriever had counted when it was last asked.
    self._counted: Counter[str] = Counter(counting.counters(retriever))

  async def search(
    self, request: types.SearchRequest
  ) -> Sequence[types.Passage]:
    """Answers one query. Raises `types.RetrievalError` if it cannot."""
    if (
      not loop.is_loop_thread()
    ):  # Searches of all event loops share their calls.
      return await loop.wait(self.search(request))
    key: Hashable = request
    if self._context_key is not None:
      key = request, self._context_key(request.known_context())
    self.counters["searches"] += 1
    # LRU order: reinserting makes this the most recently used entry.
    answer = self._cache.pop(key, None)
    if answer is not None:
      self._cache[key] = answer
      self.counters["cache_hits"] += 1
      return answer
    query = self._open.get(key)
    if query is None:
      future = asyncio.get_running_loop().create_future()
      query = _Query(key, request, future)
      self._open[key] = self._waiting[key] = query
      if not self._is_starting:
        # Later, when every episode that runs in this iteration of the event
        # loop has added its query to the batch.
        self._is_starting = True
        asyncio.get_running_loop().call_soon(self._start)
    else:
      self.counters["deduplicated"] += 1
    query.waiters += 1
    try:
      with query.turn.shared():
        # Cancelling one waiter must not cancel the others.
        return await asyncio.shield(query.answer)
    finally:
      query.waiters -= 1
      if not query.waiters and not query.answer.done():
        self._abandon(query)

  def waits(self) -> str:
    """Returns what a progress line says of queries that wait to be sent."""
    queued = sum(query.turn.waits > 0 for query in list(self._open.values()))
    sent = self.counters["batched_queries"]
    now = time.monotonic()
    (before, then) = self._said
    self._said = (sent, now)
    rate = (sent - before) / max(now - then, 1e-9)
    if not queued:
      return ""
    return f"waits for search: {queued} queries queued, {rate:.1f}/s"

  def _start(self) -> None:
    """Calls the retriever for waiting queries, up to the concurrency limit."""
    self._is_starting = False
    while self._waiting and self._calls < self._most_calls:
      keys = list(itertools.islice(self._waiting, self._size))
      batch = [self._waiting.pop(key) for key in keys]
      call = asyncio.get_running_loop().create_task(
        self._ask([query.request for query in batch]),
        context=turns.of_work(tuple(query.turn for query in batch)),
      )
      # A task without a strong reference may be garbage-collected, see
      # https://docs.python.org/3/library/asyncio-task.html#asyncio.create_task
      for query in batch:
        query.call = call
        query.batch = batch
        query.turn.wait(-1)
      self._calls += 1
      call.add_done_callback(
        functools.partial(self._finish, batch, time.perf_counter())
      )

  async def _alone(self, requests: Sequence[types.SearchRequest]) -> Any:
    return [await self._retriever.search(requests[0])]

  def _finish(
    self, batch: Sequence[_Query], started: float, call: asyncio.Task
  ) -> None:
    """Settles the queries of a call that has ended, and starts others."""
    gone = types.RetrievalError("The retriever gave the search up.")
    found: Sequence[Answer]
    try:
      found = call.result()
      if len(found) != len(batch):
        raise types.RetrievalError(
          f"Found {len(found)} answers to {len(batch)} queries, expected one "
          "for each."
        )
    # Bugs are caught too: `search` raises them in the episodes that wait.
    except Exception as error:
      found = [error] * len(batch)
    # Cancelled by the last waiter, by the retriever, or as the process ends.
    except BaseException:
      found = [gone] * len(batch)
    for query, answer in zip(batch, found, strict=True):
      self._settle(query, answer, failed=answer is not gone)
    self._count(len(batch), time.perf_counter() - started)
    self._calls -= 1
    self._start()

  def _settle(self, query: _Query, answer: Answer, *, failed: bool) -> None:
    """Caches an answer, and gives it or the exception to all waiters."""
    if self._open.get(query.key) is query:
      del self._open[query.key]
    if isinstance(answer, Exception):
      self.counters["failures"] += failed
      why = getattr(answer, "why", "other")
      self.counters[f"failed_{why}"] += failed
      if query.waiters:
        query.answer.set_exception(answer)
      return
    kept = self._cache[query.key] = self._cut(answer)
    while len(self._cache) > self._config.cache:
      self._cache.popitem(last=False)
    query.answer.set_result(kept)

  def _abandon(self, query: _Query) -> None:
    """Cancels the call of a query without waiters if no other query has any."""
    if query.call is None:
      del self._open[query.key], self._waiting[query.key]
    elif not any(other.waiters for other in query.batch):
      for other in query.batch:
        # From now on the same query starts a new call.
        self._open.pop(other.key, None)
      query.call.cancel()

  def _count(self, queries: int, seconds: float) -> None:
    """Counts a call, and what the retriever has counted since the last one."""
    now = Counter(counting.counters(self._retriever))
    for name, value in now.items():
      more = value - self._counted[name]
      self.counters[f"source/{name}"] += more
      if name.rpartition("/")[2] == "left_out":
        # Of a pipeline: queries that went on without an optional stage.
        self.counters["left_out"] += more
    self._counted = now
    self.counters["batches"] += 1
    self.counters["batched_queries"] += queries
    self.counters["call_seconds"] += seconds  # type: ignore[assignment]  # A float.

  def _cut(
    self, passages: Sequence[types.Passage]
  ) -> tuple[types.Passage, ...]:
    """Cuts passages to the sizes that `config` allows.

    Encoding ten million characters takes 20 seconds and 2 GB, and no context
    has room for them.
    """
    kept = []
    left = self._config.answer_characters
    longest = self._config.passage_characters
    for passage in passages:
      most = min(left, longest)
      size = len(passage.title) + len(passage.text)
      if size > most or len(passage.id) > longest:
        self.counters["cut_passages"] += 1
        title = passage.title[:most]
        text = passage.text[: most - len(title)]
        passage = dataclasses.replace(
          passage, id=passage.id[:longest], title=title, text=text
        )
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
  """Returns the metrics of `BatchingRetriever.counters`, which may be summed.

  Returns:
    `search/...`: the counts, of failures also by their reasons (`failed_...`);
    `hit_rate`, the share of searches that the cache answered; queries and
    seconds per batch; after `source/`, what the retriever counted. A ratio with
    denominator 0 is 0.
  """
  count = Counter(counters)
  source = (name for name in count if name.startswith(("source/", "failed_")))
  batches = max(count["batches"], 1)
  return {
    **{f"search/{name}": float(count[name]) for name in (*_COUNTS, *source)},
    "search/hit_rate": count["cache_hits"] / max(count["searches"], 1),
    "search/queries_a_batch": count["batched_queries"] / batches,
    "search/seconds_a_batch": count["call_seconds"] / batches,
  }


class Toolbox:
  """Passes each request to its tool's retriever.

  The requests of a tool whose retriever is a `types.BatchRetriever` are batched
  by themselves, in the batches of `config`, so that no tool waits for another.
  Raises ValueError if an answer depends on the episode that asks, because such
  answers cannot be told apart here.
  """

  def __init__(
    self,
    tools: Mapping[str, types.Retriever],
    config: config_lib.SearchConfig = _DEFAULTS,
  ):
    for name, retriever in tools.items():
      if isinstance(retriever, types.ContextualRetriever):
        raise ValueError(
          f"Found a {type(retriever).__name__} for the tool {name!r} beside "
          "others; expected a retriever whose answers depend on the request "
          "alone. Leave retrieval.simulated and retrieval.refined empty."
        )
    self._tools = dict(tools)
    uncached = dataclasses.replace(config, cache=0)
    self._asked = {
      name: BatchingRetriever(retriever, uncached)
      if isinstance(retriever, types.BatchRetriever)
      else retriever
      for name, retriever in tools.items()
    }

  @property
  def counters(self) -> Counter[str]:
    """The counters of each tool's retriever, after its name."""
    return counting.of_parts(self._tools)

  def identity(self, corpora: Sequence[str] = ("",)) -> dict[str, Any]:
    """Returns the identities of the tools' retrievers, with a hash of all."""
    found = {
      name: retriever.identity(corpora)
      for name, retriever in self._tools.items()
      if hasattr(retriever, "identity")
    }
    return {"kind": "tools", "tools": found, "sha256": json_files.sha256(found)}

  async def search(
    self, request: types.SearchRequest
  ) -> Sequence[types.Passage]:
    """Answers one request; raises ValueError if its tool is unknown."""
    settings.require("tool", request.tool, self._asked)
    return await self._asked[request.tool].search(request)


class PageRetriever:
  """Opens a page: all passages whose title, or whose id, is the argument.

  A retriever that is a `tools.PageSource` opens it. With any other, the page's
  passages are those among the first 20 that a search for its title finds. They
  are in the order of their ids, which is the reading order of numbered ones.
  Case, quotes and white space around a title do not matter.
  """

  def __init__(self, retriever: types.Retriever):
    self._retriever = retriever

  def identity(self, corpora: Sequence[str] = ("",)) -> dict[str, Any]:
    """Returns where pages are from; the passages are those of `search`."""
    exact = isinstance(self._retriever, tools.PageSource)
    return {"kind": "pages", "depth": None if exact else _DEPTH}

  async def search(
    self, request: types.SearchRequest
  ) -> Sequence[types.Passage]:
    """Returns at most `request.k` passages of the page, none without it."""
    if isinstance(self._retriever, tools.PageSource):
      found = self._retriever.page(request.query, request.corpus)
    else:
      asked = dataclasses.replace(
        request, k=max(_DEPTH, request.k), tool=protocol.SEARCH
      )
      found = await self._retriever.search(asked)
    name = tools.page_name(request.query)
    page = [p for p in found if name in map(tools.page_name, (p.title, p.id))]
    return sorted(page, key=lambda p: _natural(p.id))[: request.k]


def _natural(passage_id: str) -> str:
  """Returns a key that orders numbers in texts by value."""
  return _NUMBER.sub(
    lambda number: number[0].lstrip("0").zfill(_DIGITS), passage_id
  )
