"""Several retrieval servers as one: shards of a corpus, and their replicas.

    http://a:8000,http://b:8000|http://c:8000

names two shards, of which the second has two replicas. A query goes to every
shard, and the answers are merged by score, so it finds what one server of the
whole corpus finds. It never has a part of an answer: a shard without a working
replica fails the query.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import httpx2

from anysearch_jax import types
from anysearch_jax.host.http import calls
from retrieval import requests as requests_lib
from retrieval.clients import client

Answer = tuple[types.Passage, ...]

# Queries that one replica gets at a time.
_BATCH = 256


def addresses(text: str) -> list[list[str]]:
  """Returns the replicas of each shard: commas divide shards, `|` replicas."""
  return [
    [url.strip() for url in shard.split("|")] for shard in text.split(",")
  ]


class ShardedRetriever(requests_lib.OneByBatch):
  """Asks all shards; safe to use from any event loop and thread.

  Args:
    shards: the addresses of each shard's replicas.
    corpus: name of the corpus; a request must name this corpus or none.
    patience: deadlines and retries of a query; replicas share the deadline.
    token_variable: the environment variable with the servers' bearer token.
    transport: replaces the network, for tests.
    clock: returns seconds.

  Raises:
    ValueError: an address is invalid or the token is missing.
  """

  def __init__(
    self,
    shards: Sequence[Sequence[str]],
    *,
    corpus: str = "",
    patience: calls.Patience = calls.DEFAULT,
    token_variable: str = "",
    transport: httpx2.AsyncBaseTransport | None = None,
    clock: Callable[[], float] = time.monotonic,
  ):
    self._corpus = corpus
    self._shards: list[_Replicas] = []
    try:
      for urls in shards:
        each = dataclasses.replace(
          patience, deadline=patience.deadline / len(urls)
        )
        replicas = _Replicas(patience.cooldown, clock)
        self._shards.append(replicas)
        for url in urls:
          replicas.add(
            client.HttpRetriever(
              url,
              batch=_BATCH,
              corpus=corpus,
              patience=each,
              token_variable=token_variable,
              transport=transport,
              clock=clock,
            )
          )
    except ValueError:
      self.close()
      raise

  @property
  def counters(self) -> Counter[str]:
    """The sums of all servers' counters; see `client.HttpRetriever`."""
    return sum((s.counters for s in self._shards), Counter())

  async def search_many(
    self, requests: Sequence[types.SearchRequest]
  ) -> list[Answer | Exception]:
    """Returns answers in the order of the requests.

    Equal scores keep the order of shards, so servers of `--shard=0/N` to
    `--shard=N-1/N` in this order answer as one server of the whole index.

    Returns:
      For each request its passages, or the `RetrievalError` of a shard.

    Raises:
      ValueError: a request is invalid, see `requests.check`.
    """
    requests_lib.check(requests, self._corpus)
    found = await asyncio.gather(
      *(s.search_many(requests) for s in self._shards)
    )
    return [
      _merged(answers, request.k)
      for request, answers in zip(
        requests, zip(*found, strict=True), strict=True
      )
    ]

  def identity(self) -> Any:
    """Returns JSON values that identify the merged answers.

    They are those of the whole index if the servers have all of its parts in
    their order.

    Raises:
      RetrievalError: a server cannot be reached, replicas have different
        indexes, or the parts are not those of one index.
    """
    found = [shard.identity() for shard in self._shards]
    parts = [
      one.get("part") if isinstance(one, dict) else None for one in found
    ]
    if not any(parts):
      return found[0] if len(found) == 1 else {"kind": "shards", "of": found}
    whole = [{k: v for k, v in one.items() if k != "part"} for one in found]
    expected = [[i, len(found)] for i in range(len(found))]
    if parts != expected or any(each != whole[0] for each in whole):
      raise types.RetrievalError(
        f"Found servers of the parts {parts} of "
        f"{len({str(each) for each in whole})} indexes, expected {expected} of "
        "one index, in this order."
      )
    return whole[0]

  def close(self) -> None:
    """Closes all connections; running searches fail."""
    for shard in self._shards:
      shard.close()


class _Replicas:
  """Servers of the same passages; each query goes to one of them.

  The least busy server is asked first. What it cannot answer goes to the
  others; a server that failed is asked last for a while.
  """

  def __init__(self, cooldown: float, clock: Callable[[], float]):
    self._servers: list[client.HttpRetriever] = []
    self._open: Counter[int] = Counter()
    self._failed: dict[int, float] = {}
    self._cooldown, self._clock = cooldown, clock

  def add(self, server: client.HttpRetriever) -> None:
    self._servers.append(server)

  @property
  def counters(self) -> Counter[str]:
    return sum((server.counters for server in self._servers), Counter())

  async def search_many(
    self, asked: Sequence[types.SearchRequest]
  ) -> list[Answer | Exception]:
    starts = range(0, len(asked), _BATCH)
    found = await asyncio.gather(
      *(self._batch(asked[start : start + _BATCH]) for start in starts)
    )
    return [answer for batch in found for answer in batch]

  async def _batch(
    self, asked: Sequence[types.SearchRequest]
  ) -> list[Answer | Exception]:
    answers: dict[int, Answer | Exception] = {}
    left, waiting = list(range(len(asked))), set(range(len(self._servers)))
    while left and waiting:
      server = min(waiting, key=self._order)
      waiting.remove(server)
      self._open[server] += len(left)
      try:
        some = await self._servers[server].search_many([asked[i] for i in left])
      finally:
        self._open[server] -= len(left)
      answers |= zip(left, some, strict=True)
      left = [i for i in left if isinstance(answers[i], Exception)]
      if left:
        self._failed[server] = self._clock()
    return [answers[i] for i in range(len(asked))]

  def _order(self, server: int) -> tuple[bool, int, int]:
    failed = self._failed.get(server, float("-inf"))
    recent = self._clock() - failed < self._cooldown
    return recent, self._open[server], server

  def identity(self) -> Any:
    found = [server.identity() for server in self._servers]
    if any(each != found[0] for each in found):
      urls = ", ".join(server.url for server in self._servers)
      raise types.RetrievalError(
        f"{urls}: found replicas of different indexes; expected equal ones. "
        "Their GET /health shows the identities."
      )
    return found[0]

  def close(self) -> None:
    for server in self._servers:
      server.close()


def _merged(
  answers: Sequence[Answer | Exception], k: int
) -> Answer | Exception:
  """Merges the shards' answers by score; ties keep the order of shards."""
  for answer in answers:
    if isinstance(answer, Exception):
      return answer
  passages = [p for answer in answers for p in answer]  # type: ignore[union-attr]
  return tuple(sorted(passages, key=lambda p: -p.score)[:k])
