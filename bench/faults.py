"""A retriever that fails and an engine that is lost, for long trainings."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from anysearch_jax import types
from retrieval import requests as requests_lib

DEADLINE = 2.0  # Seconds of a search.
_ERRORS = 0.1  # Share of the searches that fail.
_HANGS = 0.1  # Share of those that hang until their deadline.
_ENGINE_LIFE = 120.0  # Seconds, on average.


class FaultyRetriever(requests_lib.OneByBatch):
  """A retriever of whose answers a tenth fail or hang."""

  def __init__(self, retriever: types.Retriever, drawn: random.Random):
    self._retriever, self._drawn = retriever, drawn

  async def search_many(
    self, requests: Sequence[types.SearchRequest]
  ) -> list[Sequence[types.Passage] | types.RetrievalError]:
    answers: list[Sequence[types.Passage] | types.RetrievalError] = [
      await self._retriever.search(request) for request in requests
    ]
    for i, _ in enumerate(requests):
      if self._drawn.random() < _ERRORS:
        if self._drawn.random() < _HANGS:
          await asyncio.sleep(2 * DEADLINE)
        answers[i] = types.RetrievalError("HTTP 500, as the bench wants it.")
    return answers


class MortalEngine:
  """An engine that is lost now and then with all running turns.

  Args:
    make: makes an engine from weights and their version.
    params: the first weights.
    drawn: generator of the times at which it is lost.
  """

  def __init__(self, make: Any, params: Any, drawn: random.Random):
    self._make, self._params, self._version = make, params, 0
    self._drawn = drawn
    self._engine = make(params, 0)
    self.counters: Counter[str] = self._engine.counters
    self._flying: dict[asyncio.Task, None] = {}
    self._owners: dict[types.Address, list[Any]] = {}
    self.lost = 0
    self._schedule()

  @property
  def max_async_level(self) -> int:
    return self._engine.max_async_level

  def scores(self, token_ids: Sequence[int]) -> dict[str, list[float]]:
    return self._engine.scores(token_ids)

  def close(self) -> None:
    self._engine.close()

  def set_params(self, params: Any, version: int) -> None:
    self._params, self._version = params, version
    self._engine.set_params(params, version)

  async def generate(self, request: types.GenerateRequest) -> types.Generation:
    if time.monotonic() > self._end and self._flying:
      self._lose()
    owners = self._owners.setdefault(request.address, [])
    if self._engine not in owners:
      owners.append(self._engine)
    task = asyncio.ensure_future(self._engine.generate(request))
    self._flying[task] = None
    try:
      return await task
    except asyncio.CancelledError:
      current = asyncio.current_task()
      if current is not None and current.cancelling():
        raise
      raise types.EngineError("The engine was lost.") from None
    finally:
      task.cancel()
      self._flying.pop(task, None)

  def release(self, address: types.Address) -> None:
    for engine in self._owners.pop(address, [self._engine]):
      engine.release(address)

  def _lose(self) -> None:
    """Cancels all running turns and replaces the engine by a new one."""
    for task in self._flying:
      task.cancel()
    self._engine = self._make(self._params, self._version)
    self._engine.counters = self.counters
    self.lost += 1
    self._schedule()
    print(f"engine lost {self.lost}", flush=True)

  def _schedule(self) -> None:
    life = self._drawn.expovariate(1 / _ENGINE_LIFE)
    self._end = time.monotonic() + life
