"""The experts that every cached token chose, on the host, page by page.

A token has the same place here as its key and value in the KV cache. So rows
that share pages share the record too, and a page that is allocated again loses
it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from anysearch_jax import config as config_lib
from anysearch_jax.policy import architecture as architecture_lib
from anysearch_jax.policy import experts
from anysearch_jax.rollout.jax_engine import kv_memory


class Choices:
  """Follows the calls on the pages of an engine, in their order."""

  def __init__(
    self,
    a: architecture_lib.Architecture,
    config: config_lib.EngineConfig,
    *,
    shards: int,
  ):
    self._shards, token = shards, experts.record(a)
    pages = shards, kv_memory.pages(config, a, shards=shards)[0], config.page
    self._stored = np.zeros((*pages, *token.shape), token.dtype)
    # Arrays of calls that may still run on the devices.
    self._added: list[tuple[np.ndarray, np.ndarray, np.ndarray, Any]] = []

  def add(
    self, table: np.ndarray, starts: np.ndarray, counts: np.ndarray, chosen: Any
  ) -> None:
    """Adds what a call returns, for `store`.

    Row r, whose pages are `table[r]`, has `counts[r]` new tokens from position
    `starts[r]` on, and their experts in `chosen[r]`, `[T, L, K]`.
    """
    self._added.append((table, starts, counts, chosen))

  def store(self) -> None:
    """Waits for the calls that were added, and stores what they returned."""
    size = self._stored.shape[2]
    for table, starts, counts, chosen in self._added:
      chosen = np.asarray(chosen)
      for lane in np.flatnonzero(counts):
        at = starts[lane] + np.arange(counts[lane])
        shard = lane * self._shards // len(table)
        here = shard, table[lane, at // size], at % size
        self._stored[here] = chosen[lane, : counts[lane]]
    self._added.clear()

  def copy(self, sources: np.ndarray, targets: np.ndarray) -> None:
    """Copies pages, as `kv_store.copy` does."""
    self.store()
    sources, targets = (x.reshape(self._shards, -1) for x in (sources, targets))
    shard = np.arange(self._shards)[:, None]
    self._stored[shard, targets] = self._stored[shard, sources]

  def read(self, row: kv_memory.Row) -> np.ndarray:
    """Returns a copy of the experts of a row's cached tokens, `[T, L, K]`."""
    pages = self._stored[row.shard, row.pages[0]]
    return pages.reshape(-1, *pages.shape[2:])[: row.cached]
