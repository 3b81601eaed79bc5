"""An index in this process as a retriever of episodes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from retrieval import passages
from retrieval.index import search

if TYPE_CHECKING:
  from retrieval import lexical  # It loads JAX.

Answer = tuple[passages.Passage, ...]


class LocalRetriever:
  """Asks a search on another thread; from any event loop.

  Args:
    searching: what is asked.
    corpus: the name of what it searches; requests name it or none.
  """

  def __init__(self, searching: search.PassageSearch, *, corpus: str = ""):
    self._searching, self._corpus = searching, corpus

  async def search(self, request: lexical.Request) -> Answer:
    """At most `k` passages, best first; see `search_many`."""
    (answer,) = await self.search_many([request])
    return answer

  async def search_many(
    self, requests: Sequence[lexical.Request]
  ) -> list[Answer]:
    """Answers in the order of the requests, one search for each `k`.

    Raises:
      ValueError: a request for another corpus.
    """
    for request in requests:
      if request.corpus not in ("", self._corpus):
        raise ValueError(
          f"Found a search of corpus {request.corpus!r}, this index is of "
          f"{self._corpus!r}; expected questions of its own corpus."
        )
    found: list[Answer] = [()] * len(requests)
    for k in sorted({request.k for request in requests}):
      places = [i for i, request in enumerate(requests) if request.k == k]
      queries = [requests[i].query for i in places]
      answers = await asyncio.to_thread(self._searching.search, queries, k)
      for i, answer in zip(places, answers, strict=True):
        found[i] = answer
    return found

  def identity(self) -> dict:
    """JSON values: what answers come from."""
    return self._searching.identity
