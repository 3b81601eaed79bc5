"""A reranker of a pipeline in this process; `served` has one over HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent import futures
from typing import Any, Protocol

import numpy as np

# Pairs that a model scores in one go: what is left to do of a search that was
# given up, because a thread cannot be ended.
_PAIRS = 512


class PairScorer(Protocol):
  """Such as `cross_encoder.CrossEncoder`."""

  def scores(self, pairs: Sequence[tuple[str, str]]) -> np.ndarray:
    """Returns the float32 score of each (query, passage)."""
    ...

  def identity(self) -> dict[str, Any]:
    """Returns JSON values that identify the scores."""
    ...


class LocalReranker:
  """Scores with a model in this process, on a thread of its own.

  Pairs of all queries of a call are scored together.

  Args:
    model: scores pairs.
  """

  def __init__(self, model: PairScorer):
    self._model = model
    self._thread = futures.ThreadPoolExecutor(1, "rerank")

  def identity(self) -> dict[str, Any]:
    """Returns JSON values that identify the scores."""
    return self._model.identity()

  async def scores(
    self, asked: Sequence[tuple[str, Sequence[str]]]
  ) -> list[list[float]]:
    """See `stages.Reranker`."""
    # By length, so that the pairs of a part share the shapes of calls.
    pairs = [(query, text) for query, texts in asked for text in texts]
    order = sorted(range(len(pairs)), key=lambda i: len(pairs[i][1]))
    found = np.zeros(len(pairs), np.float32)
    loop = asyncio.get_running_loop()
    for start in range(0, len(order), _PAIRS):
      part = order[start : start + _PAIRS]
      found[part] = await loop.run_in_executor(
        self._thread, self._model.scores, [pairs[i] for i in part]
      )
    ends = np.cumsum([len(texts) for _, texts in asked])
    return [some.tolist() for some in np.split(found, ends[:-1])]
