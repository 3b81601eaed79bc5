"""Batching of requests: common searches, and failures of single requests.

Tests block a search if it matters what arrives meanwhile; no test depends on a
clock.
"""

from __future__ import annotations

import asyncio
import contextlib
import math

import held_search
import hypothesis
import pytest
from hypothesis import strategies as st

from anysearch_jax import types
from anysearch_jax.retrieval.service import batching, dialects


@contextlib.asynccontextmanager
async def opened(*, batch=8, queue=64):
  """Yields a batcher and its search."""
  search = held_search.HeldSearch()
  batcher = batching.Batcher(search.search, batch=batch, queue=queue)
  try:
    yield batcher, search
  finally:
    search.free.set()
    batcher.close()


async def hold(batcher, search):
  """Blocks the thread with a search for "first"; returns its future."""
  search.free.clear()
  future = batcher.submit(["first"], 1)
  await asyncio.to_thread(search.wait_for_call)
  return future


async def test_queries_that_arrive_during_a_search_are_the_next_search():
  async with opened() as (batcher, search):
    first = await hold(batcher, search)
    futures = [batcher.submit([query], 1) for query in "bcd"]
    await asyncio.sleep(0.02)
    assert len(search.calls) == 1 and batcher.waiting == 3
    search.free.set()
    assert await first == [search.found("first", 1)]
    assert await asyncio.gather(*futures) == [
      [search.found(query, 1)] for query in "bcd"
    ]
  assert search.calls == [(["first"], 1), (["b", "c", "d"], 1)]


async def test_equal_queries_are_searched_once_with_the_largest_k():
  async with opened() as (batcher, search):
    wants = [(["a", "a"], 2), (["a"], 5), (["b"], 1)]
    futures = [batcher.submit(queries, k) for queries, k in wants]
    for (queries, k), future in zip(wants, futures, strict=True):
      assert await future == [search.found(query, k) for query in queries]
  assert search.calls == [(["a", "b"], 5)]


@hypothesis.settings(max_examples=30, deadline=None)
@hypothesis.given(
  st.lists(
    st.tuples(
      st.lists(st.sampled_from("abcdefg"), max_size=9), st.integers(1, 9)
    ),
    max_size=12,
  ),
  st.integers(1, 5),
  st.data(),
)
def test_batching_changes_no_answer(requests, batch, data):
  async def scenario():
    async with opened(batch=batch, queue=200) as (batcher, search):
      futures = []
      for queries, k in requests:
        futures.append(batcher.submit(queries, k))
        if data.draw(st.booleans()):
          await asyncio.sleep(0)
      for (queries, k), future in zip(requests, futures, strict=True):
        assert await future == [search.found(query, k) for query in queries]
      assert batcher.waiting == 0
      return search

  search = asyncio.run(asyncio.wait_for(scenario(), 60))
  for queries, _ in search.calls:
    assert 1 <= len(queries) <= batch and len(set(queries)) == len(queries)


@pytest.mark.parametrize(
  "wrong",
  [
    RuntimeError("index"),
    MemoryError(),
    StopIteration(),
    SystemExit(3),
    [],
    None,
    [[types.Passage("0", "t", "x", math.nan)]] * 3,
  ],
  ids=repr,
)
async def test_a_failing_query_fails_its_request_and_no_other(wrong):
  async with opened() as (batcher, search):
    search.wrong["poison"] = wrong
    futures = [batcher.submit([query], 1) for query in ("a", "poison", "b")]
    found = await asyncio.gather(*futures, return_exceptions=True)
    assert found[0] == [search.found("a", 1)]
    assert found[2] == [search.found("b", 1)]
    assert isinstance(found[1], dialects.RequestError)
    name = type(wrong).__name__
    if isinstance(wrong, BaseException):
      assert str(found[1]) == (f"The search failed ({name}).")
    assert await batcher.submit(["c"], 1) == [search.found("c", 1)]


async def test_a_large_request_that_fails_ends_with_its_first_failing_search():
  async with opened(batch=2) as (batcher, search):
    search.wrong["b"] = ValueError()
    with pytest.raises(dialects.RequestError):
      await batcher.submit(["a", "b", "c", "d", "e", "f"], 1)
    await batcher.submit(["z"], 1)
  calls = [queries for queries, _ in search.calls]
  assert calls[0] == ["a", "b"] and calls[-1] == ["z"]
  assert ["e", "f"] not in calls
