"""Batched searches: failures and cancellation."""

from __future__ import annotations

import asyncio

import hypothesis
import pytest
from hypothesis import strategies as st
from scripted_search import (
  DRAWN,
  KINDS,
  Many,
  ask,
  listed,
  rounds,
  run,
  searcher,
  truth,
)

from anysearch_jax import types
from anysearch_jax.host import loop


@KINDS
@hypothesis.settings(max_examples=80, deadline=None)
@hypothesis.given(
  **DRAWN,
  failing=st.sets(st.sampled_from("abc")),
  impatient=st.sets(st.integers(0, 29)),
  cache=st.integers(0, 3),
)
def test_cancelled_and_failed_searches_do_not_affect_others(
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
  if not impatient:
    assert inner.overlaps == 0 and not inner.cancelled


@KINDS
def test_failure_affects_only_its_query_and_is_not_cached(kind):
  broken = {"b"}
  inner = kind(failing=lambda request: request.query in broken)
  ret = searcher(inner)
  a, *failed, c = run(ret, *map(ask, "abbc"))
  assert [list(a), list(c)] == [truth(ask("a")), truth(ask("c"))]
  for error in failed:
    assert isinstance(error, types.RetrievalError)
    assert str(error) == "No b."
  assert ret.counters["failures"] == 1
  broken.clear()
  assert listed(run(ret, ask("b"))) == [truth(ask("b"))]


@pytest.mark.parametrize(
  "error", [types.RetrievalError("Down."), ValueError("A bug.")]
)
def test_a_call_that_fails_fails_all_of_its_queries(error):
  class Down(Many):
    async def search_many(self, requests):
      await super().search_many(requests)
      raise error

  inner = Down()
  ret = searcher(inner, batch=2)
  assert run(ret, *map(ask, "abc")) == [error] * 3
  assert ret.counters["failures"] == 3
  # The failure is not cached.
  run(ret, ask("a"))
  assert len(inner.asked) == 4


def test_a_wrong_number_of_answers_is_a_failure():
  class Short(Many):
    async def search_many(self, requests):
      return (await super().search_many(requests))[1:]

  errors = run(searcher(Short()), *map(ask, "ab"))
  assert {type(error) for error in errors} == {types.RetrievalError}
  assert "Found 1 answers to 2 queries" in str(errors[0])


@KINDS
def test_retriever_that_cancels_itself_leaves_no_waiter(kind):
  def cancels(request):
    raise asyncio.CancelledError

  (error,) = run(searcher(kind(cancels)), ask("a"))
  assert isinstance(error, types.RetrievalError)
  assert "gave the search up" in str(error)


@KINDS
def test_deadline_of_one_waiter_does_not_affect_others(kind):
  inner = kind(lambda request: 30)
  ret = searcher(inner)

  async def play():
    first = asyncio.create_task(ret.search(ask("a")))
    second = asyncio.create_task(ret.search(ask("a")))
    await rounds(5)
    first.cancel()
    return list(await second), first.cancelled()

  assert loop.run(play()) == (truth(ask("a")), True)
  assert len(inner.asked) == 1 and not inner.cancelled


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


def test_query_without_waiters_is_not_sent():
  inner = Many(lambda request: 20)
  ret = searcher(inner, concurrency=1, batch=1)

  async def play():
    tasks = [asyncio.create_task(ret.search(ask(q))) for q in "abc"]
    await rounds(5)
    tasks[1].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)

  loop.run(play())
  assert [r.query for r in inner.asked] == ["a", "c"]
