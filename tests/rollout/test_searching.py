"""Batched searches: sharing, caching, limits, failures, cancellation."""

from __future__ import annotations

import asyncio
from collections import Counter

import hypothesis
import pytest
import scripted
from hypothesis import strategies as st

from anysearch_jax import config as config_lib
from anysearch_jax import types
from anysearch_jax.host import loop
from anysearch_jax.rollout import searching


async def rounds(count):
  for _ in range(count):
    await asyncio.sleep(0)


def ask(query, k=3, corpus=""):
  return types.SearchRequest(query, k, corpus)


def truth(request):
  """Returns the passages that the inner retriever finds."""
  name = f"{request.corpus}/{request.query}"
  return [types.Passage(f"{name}/{i}", name, "text") for i in range(request.k)]


class Inner:
  """Answers by `truth` after scripted rounds.

  Attributes:
    calls: the requests of each call.
    most: the most concurrent calls.
    overlaps: equal requests that ran at the same time.
    cancelled: number of cancelled calls.
  """

  def __init__(self, latency=lambda request: 1, failing=lambda request: False):
    self._latency = latency
    self._failing = failing
    self._running: Counter = Counter()
    self.calls, self.cancelled = [], []
    self.running = self.most = self.overlaps = 0

  async def _found(self, requests):
    self.calls.append(list(requests))
    self.overlaps += sum(self._running[each] > 0 for each in requests)
    self._running.update(requests)
    self.running += 1
    self.most = max(self.most, self.running)
    try:
      await rounds(max(map(self._latency, requests)))
    except asyncio.CancelledError:
      self.cancelled.append(list(requests))
      raise
    finally:
      self._running.subtract(requests)
      self.running -= 1
    return [
      types.RetrievalError(f"No {each.query}.")
      if self._failing(each)
      else truth(each)
      for each in requests
    ]

  @property
  def asked(self):
    return [request for call in self.calls for request in call]


class One(Inner):
  async def search(self, request):
    (found,) = await self._found([request])
    if isinstance(found, Exception):
      raise found
    return found


class Many(One):
  async def search_many(self, requests):
    return await self._found(requests)


KINDS = pytest.mark.parametrize("kind", [One, Many])


def searcher(inner, **settings):
  return searching.BatchingRetriever(inner, config_lib.SearchConfig(**settings))


def test_what_cannot_search_is_refused():
  with pytest.raises(ValueError, match="found a dict, expected an object with"):
    searcher({})


async def all_of(ret, *requests):
  return await asyncio.gather(
    *map(ret.search, requests), return_exceptions=True
  )


def run(ret, *requests):
  """Runs searches concurrently."""
  return loop.run(all_of(ret, *requests))


def test_one_event_loop_iteration_is_one_batch_in_order():
  inner = Many()
  requests = [ask(q) for q in "dbcab"]
  found = run(searcher(inner), *requests)
  assert [*map(list, found)] == [*map(truth, requests)]
  assert inner.calls == [[ask(q) for q in "dbca"]]


def test_batches_and_calls_are_bounded():
  inner = Many(lambda request: 5)
  run(searcher(inner, batch=2, concurrency=2), *map(ask, "abcdefg"))
  assert [len(call) for call in inner.calls] == [2, 2, 2, 1]
  assert inner.most == 2
  inner = One(lambda request: 5)
  run(searcher(inner, batch=2, concurrency=2), *map(ask, "abcdefg"))
  assert inner.most == 4


def test_queries_that_wait_for_a_call_form_one_batch():
  """A slow retriever gets fewer and larger calls, not more of them."""
  inner = Many(lambda request: 20)
  ret = searcher(inner, concurrency=1)

  async def one(i):
    await rounds(i)
    return await ret.search(ask(str(i)))

  async def play():
    await asyncio.gather(*map(one, range(10)))

  loop.run(play())
  assert [len(call) for call in inner.calls] == [1, 9]


def test_answers_used_least_recently_are_not_kept():
  inner = Many()
  ret = searcher(inner, cache=2)
  for query in "abaca":
    run(ret, ask(query))
  assert [r.query for r in inner.asked] == list("abc")
  run(ret, ask("b"))
  assert [r.query for r in inner.asked] == list("abcb")


def test_long_passages_and_answers_are_cut_and_counted():
  sizes = (2, 8), (3, 8), (20, 5), (1, 4), (1, 4)
  ids = "0", "1" * 99, "2", "3", "4"
  found = [
    types.Passage(id_, "t" * title, "x" * text)
    for id_, (title, text) in zip(ids, sizes, strict=True)
  ]
  ret = searcher(
    scripted.Retriever({"a": found}),
    passage_characters=10,
    answer_characters=32,
  )
  for _ in range(2):  # The cache answers the second search.
    (answer,) = run(ret, ask("a", 5))
    sizes = [(len(p.title), len(p.text)) for p in answer]
    assert sizes == [(2, 8), (3, 7), (10, 0), (1, 1), (0, 0)]
    assert answer[0] is found[0]
    assert [p.id for p in answer] == ["0", "1" * 10, *"234"]
  assert searching.metrics(ret.counters)["search/cut_passages"] == 4


def test_metrics_are_counts_and_shares():
  inner = Many()
  ret = searcher(inner)
  run(ret, *map(ask, "aab"))
  run(ret, *map(ask, "ab"))
  found = searching.metrics(ret.counters)
  assert found.pop("search/seconds_a_batch") > 0
  assert found == {
    "search/searches": 5,
    "search/cache_hits": 2,
    "search/deduplicated": 1,
    "search/batches": 1,
    "search/failures": 0,
    "search/left_out": 0,
    "search/cut_passages": 0,
    "search/hit_rate": 0.4,
    "search/queries_a_batch": 2,
  }
  assert set(searching.metrics({}).values()) == {0}


@KINDS
@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(
  asked=st.lists(
    st.tuples(
      st.builds(
        types.SearchRequest,
        st.sampled_from("abcdef"),
        st.integers(1, 2),
        st.sampled_from(["", "corpus"]),
      ),
      st.integers(0, 6),  # The round in which it starts.
      st.integers(0, 12),  # Rounds until it is cancelled, if it is.
    ),
    min_size=1,
    max_size=30,
  ),
  # How long each query takes.
  latencies=st.fixed_dictionaries({q: st.integers(0, 8) for q in "abcdef"}),
  sizes=st.tuples(st.integers(1, 5), st.integers(1, 3)),
  failing=st.sets(st.sampled_from("abc")),
  impatient=st.sets(st.integers(0, 29)),
  cache=st.sampled_from((0, 1, 2, 99)),
)
def test_each_search_gets_its_own_answer_whatever_others_do(
  kind, asked, latencies, sizes, failing, impatient, cache
):
  inner = kind(
    lambda request: latencies[request.query],
    lambda request: request.query in failing,
  )
  ret = searcher(inner, batch=sizes[0], concurrency=sizes[1], cache=cache)

  async def one(i, request, start, patience):
    await rounds(start)
    task = asyncio.create_task(ret.search(request))
    if i in impatient:
      await rounds(patience)
      task.cancel()
    try:
      return list(await task)
    except types.RetrievalError as error:
      return str(error)
    except asyncio.CancelledError:
      return "gave up"

  async def play():
    async with asyncio.timeout(30):
      return await asyncio.gather(
        *(one(i, *each) for i, each in enumerate(asked))
      )

  answers = loop.run(play())
  for i, (answer, (request, *_)) in enumerate(zip(answers, asked, strict=True)):
    if answer == "gave up":
      assert i in impatient
    elif request.query in failing:
      assert answer == f"No {request.query}."
    else:
      assert answer == truth(request)
  assert inner.running == 0
  if impatient:
    return
  assert inner.overlaps == 0 and not inner.cancelled
  most = sizes[1] if kind is Many else sizes[0] * sizes[1]
  assert inner.most <= most
  assert max(map(len, inner.calls)) <= (sizes[0] if kind is Many else 1)
  count = ret.counters
  assert count["searches"] == len(asked)
  assert count["batches"] == len(inner.calls)
  assert count["batched_queries"] == len(inner.asked)
  assert count["cache_hits"] + count["deduplicated"] == (
    len(asked) - len(inner.asked)
  )
  if not failing and cache == 99:
    # Each distinct query was sent once.
    assert Counter(inner.asked) == Counter({request for request, *_ in asked})


class Down(Many):
  async def search_many(self, requests):
    await super().search_many(requests)
    raise ValueError("A bug.")


class Short(Many):
  async def search_many(self, requests):
    return (await super().search_many(requests))[1:]


@pytest.mark.parametrize(
  ("inner", "lost", "said"),
  [
    (One(failing=lambda request: request.query == "b"), "b", "No b."),
    (Many(failing=lambda request: request.query == "b"), "b", "No b."),
    (Down(), "abc", "A bug."),  # Of all queries of the call.
    (Short(), "abc", "Found 2 answers to 3 queries"),
  ],
)
def test_failure_is_raised_in_its_waiters_and_not_cached(inner, lost, said):
  ret = searcher(inner)
  for again in (1, 2):
    for query, found in zip("abbc", run(ret, *map(ask, "abbc")), strict=True):
      if query in lost:
        assert isinstance(found, Exception) and said in str(found)
      else:
        assert list(found) == truth(ask(query))
    assert ret.counters["failures"] == again * len(lost)


@pytest.mark.parametrize("inner", [Down(), Short()])
def test_a_failure_is_an_exception_of_each_waiter(inner):
  errors = run(searcher(inner), *map(ask, "abbc"))
  assert all(isinstance(error, Exception) for error in errors)
  assert len(set(map(id, errors))) == 4
  assert len(set(map(str, errors))) == 1
  assert len({type(error) for error in errors}) == 1


@KINDS
def test_retriever_that_cancels_itself_leaves_no_waiter(kind):
  def cancels(request):
    raise asyncio.CancelledError

  (error,) = run(searcher(kind(cancels)), ask("a"))
  assert isinstance(error, types.RetrievalError)
  assert "gave the search up" in str(error)


@KINDS
def test_last_cancelled_waiter_cancels_the_search(kind):
  inner = kind(lambda request: 1000)
  ret = searcher(inner)

  async def play():
    tasks = [asyncio.create_task(ret.search(ask("a"))) for _ in range(3)]
    await rounds(5)
    for task in tasks[:2]:
      task.cancel()
    await rounds(5)
    assert not inner.cancelled
    tasks[2].cancel()
    await rounds(5)
    assert inner.cancelled == [[ask("a")]]
    # The same query then starts a new search.
    again = asyncio.create_task(ret.search(ask("a")))
    await rounds(5)
    again.cancel()

  loop.run(play())
  assert len(inner.asked) == 2


def test_batch_without_waiters_is_cancelled():
  inner = Many(lambda request: 50)
  ret = searcher(inner)

  async def play():
    tasks = {q: asyncio.create_task(ret.search(ask(q))) for q in "ab"}
    await rounds(5)
    tasks["a"].cancel()
    await rounds(5)
    # The batch continues for "b", so a new search for "a" can join it.
    joined = asyncio.create_task(ret.search(ask("a")))
    await rounds(5)
    tasks["b"].cancel()
    assert list(await joined) == truth(ask("a"))

  loop.run(play())
  assert inner.calls == [[ask("a"), ask("b")]]
  assert not inner.cancelled


def test_search_during_a_cancellation_starts_a_new_call():
  class Slow(Many):
    """Takes a while to be cancelled."""

    async def search_many(self, requests):
      try:
        return await super().search_many(requests)
      except asyncio.CancelledError:
        await rounds(10)
        raise

  inner = Slow(lambda request: 20)
  ret = searcher(inner)

  async def play():
    first = asyncio.create_task(ret.search(ask("a")))
    await rounds(5)
    first.cancel()
    await rounds(1)  # The waiter was cancelled; its call still runs.
    second = asyncio.create_task(ret.search(ask("a")))
    await rounds(15)  # The first call is over, the second still runs.
    third = asyncio.create_task(ret.search(ask("a")))
    return [list(await second), list(await third)]

  assert loop.run(play()) == [truth(ask("a"))] * 2
  assert len(inner.calls) == 2
  assert ret.counters["deduplicated"] == 1
