"""What training asks of an engine, besides generating turns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from anysearch_jax import types


class TrainableEngine(types.Engine, Protocol):
  """An engine whose weights can be replaced between rollouts.

  It begins with the initial policy of the training, as version 0.

  Attributes:
    counters: counts of events since they were last cleared.
  """

  counters: Counter[str]

  @property
  def max_async_level(self) -> int:
    """The largest `pipeline.async_level` that the engine supports."""
    ...

  def set_params(self, params: Any, version: int) -> None:
    """Samples with these weights, a tree of arrays, from now on."""
    ...

  def close(self) -> None:
    """Frees what the engine holds outside of this object; it is used no more.

    The run that ends calls this, also after an error.
    """
    ...


@runtime_checkable
class ScoringEngine(TrainableEngine, Protocol):
  """A trainable engine that scores texts, so that its weights can be verified.

  `health.Fingerprint` verifies these engines only.
  """

  def scores(self, token_ids: Sequence[int]) -> dict[str, list[float]]:
    """Returns log-probabilities of all tokens but the first, at temperature 1.

    There is a list for each of the engine's parts (servers, devices), by name.
    """
    ...


@runtime_checkable
class CachingEngine(TrainableEngine, Protocol):
  """A trainable engine in this process, which can lend its cache's memory.

  `learner.Phases` frees the cache of these engines only.
  """

  def free_cache(self) -> int:
    """Frees the KV cache until a turn needs it; returns its bytes on a device.

    Raises:
      RuntimeError: an episode still holds a cache.
    """
    ...
