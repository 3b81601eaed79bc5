"""A retriever over an index in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from anysearch_jax import types
from retrieval import requests as requests_lib
from retrieval.index import search

Answer = tuple[types.Passage, ...]


class LocalRetriever(requests_lib.OneByBatch):
  """Searches an index on another thread; usable from any event loop.

  Args:
    searching: the search over the index.
    corpus: name of its corpus; a request must name this corpus or none.
  """

  def __init__(self, searching: search.SearchIndex, *, corpus: str = ""):
    self._searching, self._corpus = searching, corpus

  async def search_many(
    self, requests: Sequence[types.SearchRequest]
  ) -> list[Answer]:
    """Returns answers in the order of the requests, by one search for each `k`.

    Raises:
      ValueError: a request is invalid, see `requests.check`.
    """
    requests_lib.check(requests, self._corpus)
    found: list[Answer] = [()] * len(requests)
    for k in sorted({request.k for request in requests}):
      slots = [i for i, request in enumerate(requests) if request.k == k]
      queries = [requests[i].query for i in slots]
      answers = await asyncio.to_thread(self._searching.search, queries, k)
      for i, answer in zip(slots, answers, strict=True):
        found[i] = answer
    return found

  def identity(self) -> dict:
    """Returns JSON values that identify the answers."""
    return self._searching.identity
