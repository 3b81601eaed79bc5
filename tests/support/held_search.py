"""A search with answers derived from the query, which tests can block."""

from __future__ import annotations

import threading

from anysearch_jax import types


class HeldSearch:
  """Finds min(k, `count`) passages for any query.

  Attributes:
    calls: queries and k of each search, in order.
    free: an event; while it is cleared, searches wait.
    wrong: by query, what a search with it raises or returns instead.
  """

  identity = {"kind": "held", "sha256": "0" * 64}
  health_fields: dict[str, object] = {}

  def __init__(self, count: int = 7):
    self._count = count
    self._began = threading.Semaphore(0)
    self.calls: list[tuple[list[str], int]] = []
    self.free = threading.Event()
    self.free.set()
    self.wrong: dict[str, object] = {}

  def __len__(self) -> int:
    return self._count

  def found(self, query: str, k: int) -> list[types.Passage]:
    """Returns the passages for one query."""
    return [
      types.Passage(f"{i}", f'"Title {i}"', f"about {query}", 1 / (1 + i))
      for i in range(min(k, self._count))
    ]

  def search(self, queries, k):
    self.calls.append((list(queries), k))
    self._began.release()
    assert self.free.wait(60)
    for query in set(queries) & set(self.wrong):
      if isinstance(self.wrong[query], BaseException):
        raise self.wrong[query]
      return self.wrong[query]
    return [self.found(query, k) for query in queries]

  def wait_for_call(self) -> None:
    """Waits until one more search has begun."""
    assert self._began.acquire(timeout=60)
