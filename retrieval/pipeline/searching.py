"""A pipeline as a service asks it: from a thread, with texts."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

from anysearch_jax import types
from retrieval.pipeline import pipeline


class PipelineSearch:
  """A `service.Search` that asks a pipeline on an event loop of its own.

  Args:
    retriever: the pipeline.
  """

  def __init__(self, retriever: pipeline.PipelineRetriever):
    self._retriever = retriever
    self.identity = retriever.identity()
    self._loop = asyncio.new_event_loop()
    threading.Thread(target=self._loop.run_forever, daemon=True).start()

  def __len__(self) -> int:
    """Returns the passages of the largest corpus whose size is known."""
    found = (stage.get("retrieve") for stage in self.identity["stages"])
    corpora = (each.get("corpus") for each in found if isinstance(each, dict))
    sizes = [c.get("passages") for c in corpora if isinstance(c, dict)]
    return max((size for size in sizes if isinstance(size, int)), default=0)

  @property
  def described(self) -> dict[str, Any]:
    """Further fields of the health check."""
    return {"backend": "pipeline", "corpus_size": len(self)}

  def search(
    self, queries: Sequence[str], k: int
  ) -> list[Sequence[types.Passage]]:
    """Returns at most `k` passages for each query, best first.

    Raises:
      RetrievalError: a query failed; the others may not have.
    """
    asked = [types.SearchRequest(query, k) for query in queries]
    # Each stage has a deadline, so this ends.
    answers = asyncio.run_coroutine_threadsafe(
      self._retriever.search_many(asked), self._loop
    ).result()
    found: list[Sequence[types.Passage]] = []
    for answer in answers:
      if isinstance(answer, Exception):
        raise answer
      found.append(answer)
    return found
