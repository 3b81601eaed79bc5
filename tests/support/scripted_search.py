"""Concurrent searches of a retriever that answers after scripted rounds.

Time is counted in iterations of the event loop, so nothing depends on a clock.
"""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
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


def searcher(inner, *, identity="", **settings):
  return searching.BatchingRetriever(
    inner, config_lib.SearchConfig(**settings), identity=identity
  )


async def all_of(ret, *requests):
  return await asyncio.gather(
    *map(ret.search, requests), return_exceptions=True
  )


def run(ret, *requests):
  """Runs searches concurrently in a new event loop."""
  return loop.run(all_of(ret, *requests))


def listed(answers):
  return [list(answer) for answer in answers]


# Searches, how long each query takes, and the sizes of batch and concurrency.
DRAWN = {
  "asked": st.lists(
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
  "latencies": st.fixed_dictionaries({q: st.integers(0, 8) for q in "abcdef"}),
  "sizes": st.tuples(st.integers(1, 5), st.integers(1, 3)),
}
