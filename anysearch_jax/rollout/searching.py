"""Combines the searches of many episodes into few calls to a retriever.

Queries that episodes ask in the same iteration of the event loop are sent as
one batch. A query that is already in flight is not sent again, and answers are
cached. `tool_retrievers` passes calls of several tools on to their retrievers.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import functools
import itertools
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Hashable, Mapping, Sequence
from typing import Any

from anysearch_jax import config as config_lib
from anysearch_jax import types
from anysearch_jax.host import counting, loop, turns

# The counters that become metrics as they are.
_COUNTED = (
  "searches",
  "cache_hits",
  "deduplicated",
  "batches",
  "failures",
  "left_out",
  "cut_passages",
)
Answer = Sequence[types.Passage] | Exception


@dataclasses.dataclass(eq=False)
class _Query:
  """One query without an answer.

  Attributes:
    key: the key of its answer in the cache.
    request: the first request for it.
    answer: set once the retriever answers.
    waiters: number of searches that wait for the answer.
    call: the call that it was sent in; None until then.
    batch: the queries of that call.
    turn: the limit that stands still until the query is sent.
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

  A search goes through three states: its answer is cached, or its query is open
  (another search asked it first), or it opens a query. Open queries wait until
  the event loop has run every episode that is ready; then calls take them in
  batches, at most `config.concurrency` calls at a time. So batches fill up by
  themselves under load, and a lone query is sent without delay.

  The deadline of a search (`turns.Limit`) stands still until its query is sent.
  A failure is raised in every episode that waits for the query; it is not
  cached. Cancelling one waiter does not affect the others; a call is cancelled
  when none of its queries has a waiter.

  Attributes:
    counters: `searches` (requested), `cache_hits` and `deduplicated` (searches
      that needed no query; the latter waited for another episode's answer),
      `batches` and `batched_queries` (sent), `failures` (of sent queries;
      `failed_late` and so on by `RetrievalError.why`), `call_seconds` (summed
      over batches), `left_out` (queries that a pipeline answered without an
      optional stage), and `cut_passages` (longer than `config` allows). Names
      that begin with `source/` are the retriever's own counters, such as the
      `cost` of a search engine.
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
    self._batch_size = 1
    self._max_calls = config.batch * config.concurrency
    self._search_many: Callable[..., Coroutine[Any, Any, Sequence[Answer]]] = (
      self._search_one
    )
    if isinstance(retriever, types.BatchRetriever):
      self._batch_size = config.batch
      self._max_calls = config.concurrency
      self._search_many = retriever.search_many
    # Least recently used first.
    self._cache: collections.OrderedDict[Hashable, tuple] = (
      collections.OrderedDict()
    )
    # Queries without an answer, and those of them that belong to no call yet.
    self._open: dict[Hashable, _Query] = {}
    self._unsent: dict[Hashable, _Query] = {}
    self._calls = 0
    self._is_starting = False
    self.counters: Counter[str] = Counter()
    # Number of sent queries and the time at the last `waits`.
    self._reported_queries = 0
    self._reported_time = time.monotonic()
    # The retriever's counters after the last call.
    self._source_counters: Counter[str] = Counter(counting.counters(retriever))

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
      self._open[key] = query
      self._unsent[key] = query
      if not self._is_starting:
        # Start later, when every episode that runs in this iteration of the
        # event loop has added its query to the batch.
        self._is_starting = True
        asyncio.get_running_loop().call_soon(self._start_calls)
    else:
      self.counters["deduplicated"] += 1
    query.waiters += 1
    try:
      with query.turn.shared():
        return await loop.shared(query.answer)
    finally:
      query.waiters -= 1
      if not query.waiters and not query.answer.done():
        self._abandon(query)

  def waits(self) -> str:
    """Returns the part of a progress line about queries that are not sent."""
    queued = sum(query.turn.waits > 0 for query in list(self._open.values()))
    sent = self.counters["batched_queries"]
    now = time.monotonic()
    seconds = max(now - self._reported_time, 1e-9)
    rate = (sent - self._reported_queries) / seconds
    self._reported_queries = sent
    self._reported_time = now
    if not queued:
      return ""
    return f"waits for search: {queued} queries queued, {rate:.1f}/s"

  def _start_calls(self) -> None:
    """Calls the retriever for unsent queries, up to the concurrency limit."""
    self._is_starting = False
    while self._unsent and self._calls < self._max_calls:
      keys = list(itertools.islice(self._unsent, self._batch_size))
      batch = [self._unsent.pop(key) for key in keys]
      call = asyncio.get_running_loop().create_task(
        self._search_many([query.request for query in batch]),
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
        functools.partial(self._finish_call, batch, time.perf_counter())
      )

  async def _search_one(self, requests: Sequence[types.SearchRequest]) -> Any:
    return [await self._retriever.search(requests[0])]

  def _finish_call(
    self, batch: Sequence[_Query], started: float, call: asyncio.Task
  ) -> None:
    """Settles the queries of a call that has ended, and starts other calls."""
    cancelled = types.RetrievalError("The retriever gave the search up.")
    answers: Sequence[Answer]
    try:
      answers = call.result()
      if len(answers) != len(batch):
        raise types.RetrievalError(
          f"Found {len(answers)} answers to {len(batch)} queries, expected one "
          "for each."
        )
    # Bugs are caught too: `search` raises them in the episodes that wait.
    except Exception as error:
      answers = [error] * len(batch)
    # Cancelled by the last waiter, by the retriever, or as the process ends.
    except BaseException:
      answers = [cancelled] * len(batch)
    for query, answer in zip(batch, answers, strict=True):
      self._settle(query, answer, counts=answer is not cancelled)
    self._count_call(len(batch), time.perf_counter() - started)
    self._calls -= 1
    self._start_calls()

  def _settle(self, query: _Query, answer: Answer, *, counts: bool) -> None:
    """Caches an answer, and passes it or the exception to all waiters.

    Args:
      query: the query that is answered.
      answer: its passages, or why there are none.
      counts: whether an exception counts as a failure.
    """
    if self._open.get(query.key) is query:
      del self._open[query.key]
    if isinstance(answer, Exception):
      failures = 1 if counts else 0
      why = getattr(answer, "why", "other")
      self.counters["failures"] += failures
      self.counters[f"failed_{why}"] += failures
      if query.waiters:
        query.answer.set_exception(answer)
      return
    passages = types.distinct_passages(self._truncated(answer))
    self._cache[query.key] = passages
    while len(self._cache) > self._config.cache:
      self._cache.popitem(last=False)
    query.answer.set_result(passages)

  def _abandon(self, query: _Query) -> None:
    """Cancels the call of a query without waiters if no other query has any."""
    if query.call is None:
      del self._open[query.key]
      del self._unsent[query.key]
    elif not any(sibling.waiters for sibling in query.batch):
      for sibling in query.batch:
        # From now on the same query starts a new call.
        self._open.pop(sibling.key, None)
      query.call.cancel()

  def _count_call(self, queries: int, seconds: float) -> None:
    """Counts a call, and adds the increase of the retriever's counters."""
    source_counters = Counter(counting.counters(self._retriever))
    for name, value in source_counters.items():
      increase = value - self._source_counters[name]
      self.counters[f"source/{name}"] += increase
      if name.rpartition("/")[2] == "left_out":
        # Of a pipeline: queries that went on without an optional stage.
        self.counters["left_out"] += increase
    self._source_counters = source_counters
    self.counters["batches"] += 1
    self.counters["batched_queries"] += queries
    self.counters["call_seconds"] += seconds  # type: ignore[assignment]  # A float.

  def _truncated(
    self, passages: Sequence[types.Passage]
  ) -> tuple[types.Passage, ...]:
    """Cuts passages to the sizes that `config` allows.

    Encoding ten million characters takes 20 seconds and 2 GB, and no context
    has room for them.
    """
    truncated = []
    remaining = self._config.answer_characters
    longest = self._config.passage_characters
    for passage in passages:
      limit = min(remaining, longest)
      size = len(passage.title) + len(passage.text)
      if size > limit or len(passage.id) > longest:
        self.counters["cut_passages"] += 1
        title = passage.title[:limit]
        text = passage.text[: limit - len(title)]
        passage = dataclasses.replace(
          passage, id=passage.id[:longest], title=title, text=text
        )
      remaining -= min(size, limit)
      truncated.append(passage)
    return tuple(truncated)


def attach(part: object, engine: types.Engine, codec: types.TextCodec) -> None:
  """Passes the policy's engine to a retriever that uses it.

  The code that plays episodes calls this before the first search.

  Args:
    part: a retriever, or a part of one; ignored unless it is a
      `types.EngineUser`.
    engine: samples the policy.
    codec: the text side of the policy's tokenizer.
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
  counts = Counter(counters)
  names = list(_COUNTED)
  names += [n for n in counts if n.startswith(("source/", "failed_"))]
  batches = max(counts["batches"], 1)
  values = {f"search/{name}": float(counts[name]) for name in names}
  values["search/hit_rate"] = counts["cache_hits"] / max(counts["searches"], 1)
  values["search/queries_a_batch"] = counts["batched_queries"] / batches
  values["search/seconds_a_batch"] = counts["call_seconds"] / batches
  return values
