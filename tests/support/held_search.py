"""A search whose answers follow from the query, and that waits where told."""

from __future__ import annotations

import threading

from retrieval import passages


class HeldSearch:
  """Finds `count` passages about any query, as far as k of them are wanted.

  Attributes:
    calls: queries and k of each search, in order.
    free: cleared, searches wait until it is set.
    wrong: by query, what a search with it raises or returns instead.
  """

  identity = {"kind": "held", "sha256": "0" * 64}

  def __init__(self, count: int = 7):
    self._count = count
    self._began = threading.Semaphore(0)
    self.calls: list[tuple[list[str], int]] = []
    self.free = threading.Event()
    self.free.set()
    self.wrong: dict[str, object] = {}

  def __len__(self) -> int:
    return self._count

  def found(self, query: str, k: int) -> list[passages.Passage]:
    """What a search says about one query."""
    return [
      passages.Passage(f"{i}", f'"Title {i}"', f"about {query}", 1 / (1 + i))
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
    """Returns when one more search has begun."""
    assert self._began.acquire(timeout=60)
