"""The experts that every cached token chose, on the host, page by page.

A token's record is at the same page and offset as its key and value in the KV
cache. So rows that share pages share the record too, and a page that is
allocated again loses it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from anysearch_jax import config as config_lib
from anysearch_jax.policy import architecture as architecture_lib
from anysearch_jax.policy import experts
from anysearch_jax.rollout.jax_engine import kv_memory


class CallRecord(NamedTuple):
  """The experts of the new tokens of a call.

  Attributes:
    table: int `[R, pools M]`, the pages of each row.
    starts: int `[R]`, position of each row's first new token.
    counts: int `[R]`, number of new tokens.
    expert_ids: `[R, T, L, K]`; only the first `counts[r]` of row r count. The
      call may still be computing them.
  """

  table: np.ndarray
  starts: np.ndarray
  counts: np.ndarray
  expert_ids: Any


class Choices:
  """Follows the calls on the pages of an engine, in their order.

  Args:
    a: the policy's architecture.
    config: its pages.
    shards: number of data shards.
  """

  def __init__(
    self,
    a: architecture_lib.Architecture,
    config: config_lib.EngineConfig,
    *,
    shards: int,
  ):
    self._shards = shards
    token = experts.record(a)
    pages = kv_memory.pool_sizes(config, a, shards=shards)[0]
    shape = (shards, pages, config.page, *token.shape)
    self._stored = np.zeros(shape, token.dtype)
    self._pending: list[CallRecord] = []

  def add(self, record: CallRecord) -> None:
    """Adds the record of a call, for `store`."""
    self._pending.append(record)

  def store(self) -> None:
    """Waits for the calls that were added, and stores their experts."""
    size = self._stored.shape[2]
    for record in self._pending:
      expert_ids = np.asarray(record.expert_ids)
      lanes = len(record.table)
      for lane in np.flatnonzero(record.counts):
        count = record.counts[lane]
        positions = record.starts[lane] + np.arange(count)
        shard = lane * self._shards // lanes
        pages = record.table[lane, positions // size]
        self._stored[shard, pages, positions % size] = expert_ids[lane, :count]
    self._pending.clear()

  def copy(self, sources: np.ndarray, targets: np.ndarray) -> None:
    """Copies pages, as `kv_store.copy` does."""
    self.store()
    shard = np.arange(self._shards)[:, None]
    content = self._stored[shard, sources.reshape(self._shards, -1)]
    self._stored[shard, targets.reshape(self._shards, -1)] = content

  def read(self, row: kv_memory.Row) -> np.ndarray:
    """Returns a copy of the experts of a row's cached tokens, `[T, L, K]`."""
    pages = self._stored[row.shard, row.pages[0]]
    return pages.reshape(-1, *pages.shape[2:])[: row.cached]
