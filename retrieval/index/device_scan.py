"""Exact search by inner product, with JAX.

Devices hold the vectors, sharded by rows, and score them in blocks. Only the
best k rows are kept after each block, so the `[Q, N]` scores are never in
memory.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from anysearch_jax.retrieval.index import search as search_lib
from anysearch_jax.retrieval.index import vectors as vectors_lib

# The number of queries of a call is padded to one of these sizes, so that each
# size compiles once; larger batches are divided into calls of the last size.
_CALL_SIZES = (1, 8, 32, 128, 512)
# A search finds at least this many rows, so that all smaller k share a program.
_LEAST_K = 16
_AXIS = "rows"


class DeviceScan:
  """A `search.Index` over vectors on devices, compiled when it is opened.

  Args:
    shards: the shards.
    pieces: the number of the first row of each shard, and its rows.
    devices: devices that hold the vectors, padded to whole blocks.
    block: number of rows that are scored at a time.
  """

  def __init__(
    self,
    shards: vectors_lib.Shards,
    pieces: Sequence[tuple[int, np.ndarray]],
    *,
    devices: Sequence[jax.Device],
    block: int,
  ):
    self.count = shards.count
    self.dim = shards.dim
    # FAISS has no index of these answers for vectors that are stored rounded.
    is_exact = shards.dtype == "float32"
    self.type = "IndexFlatIP" if is_exact else f"Flat ({shards.dtype})"
    rows_per_device = -(-self.count // len(devices))
    block = min(block, rows_per_device)
    rows_per_device = -(-rows_per_device // block) * block
    mesh = jax.sharding.Mesh(np.asarray(devices), (_AXIS,))
    shape = (rows_per_device * len(devices), self.dim)

    def device_rows(index: Any) -> np.ndarray:
      """Returns the rows of a device, zero after the last vector."""
      start, stop, _ = index[0].indices(shape[0])
      values = np.zeros((stop - start, self.dim), pieces[0][1].dtype)
      for first, rows in pieces:
        low = max(start, first)
        high = min(stop, first + len(rows))
        if low < high:
          values[low - start : high - start] = rows[low - first : high - first]
      return values

    by_rows = jax.sharding.NamedSharding(mesh, jax.P(_AXIS))
    self._search = functools.partial(
      search_devices,
      values=jax.make_array_from_callback(shape, by_rows, device_rows),
      mesh=mesh,
      count=self.count,
      rows_per_device=rows_per_device,
      block=block,
    )
    # Compile now: the deadline of a first search leaves no time for it.
    for size in _CALL_SIZES:
      self.search(np.zeros((size, self.dim), np.float32), 1)

  def search(self, vectors: np.ndarray, k: int) -> list[search_lib.Hits]:
    """See `search.Index`."""
    vectors = search_lib.as_queries(vectors, self.dim)
    padded_k = min(max(k, _LEAST_K), self.count)
    hits = []
    for start in range(0, len(vectors), _CALL_SIZES[-1]):
      queries = vectors[start : start + _CALL_SIZES[-1]]
      size = next(n for n in _CALL_SIZES if n >= len(queries))
      padded = np.zeros((size, self.dim), np.float32)
      padded[: len(queries)] = queries
      best = jax.device_get(self._search(padded, k=padded_k))
      all_scores, all_rows = (x[: len(queries), :k] for x in best)
      for scores, rows in zip(
        all_scores, all_rows.astype(np.int64), strict=True
      ):
        is_hit = np.isfinite(scores)
        hits.append(search_lib.Hits(rows[is_hit], scores[is_hit]))
    return hits


def _scores(queries: jax.Array, values: jax.Array) -> jax.Array:
  """Returns the inner products `[Q, B]` in float32.

  For bfloat16 values, each float32 query is split into three bfloat16 parts,
  and the three products are added. That is as exact as float32, but the values
  are read as bfloat16 and never converted; the product is limited by memory
  bandwidth, not by arithmetic. See https://arxiv.org/abs/1904.06376
  """
  dot = functools.partial(
    jax.lax.dot_general,
    dimension_numbers=(((1,), (1,)), ((), ())),
    preferred_element_type=jnp.float32,
  )
  if values.dtype != jnp.bfloat16:
    return dot(
      queries, values.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST
    )
  bfloat16_parts = []
  remainder = queries
  for _ in range(3):
    # XLA may remove a pair of dtype conversions that only rounds;
    # `reduce_precision` is never removed.
    bfloat16_part = jax.lax.reduce_precision(
      remainder, exponent_bits=8, mantissa_bits=7
    )
    bfloat16_parts.append(bfloat16_part.astype(jnp.bfloat16))
    remainder = remainder - bfloat16_part
  return jnp.sum(
    dot(jnp.concatenate(bfloat16_parts), values).reshape(3, len(queries), -1), 0
  )


@functools.partial(
  jax.jit, static_argnames=("k", "mesh", "count", "rows_per_device", "block")
)
def search_devices(
  queries, values, *, k: int, mesh, count: int, rows_per_device: int, block: int
):
  """Returns scores and rows `[Q, k]` of the best k over all devices.

  Each device loops over its blocks and keeps its best k; only these are
  gathered. Equal scores keep the order of rows.

  Args:
    queries: float32 `[Q, dim]`.
    values: `[devices * rows_per_device, dim]`, sharded by rows.
    k: number of rows for each query, at most `count`.
    mesh: mesh of the devices.
    count: number of rows of `values` before the padding.
    rows_per_device: rows of a device, a multiple of `block`.
    block: rows that are scored at a time.
  """

  def search_device(queries, values):
    first_row = jax.lax.axis_index(_AXIS) * rows_per_device

    def search_block(i, best):
      best_scores, best_rows = best
      block_start = i * block
      rows = block_start + jnp.arange(block)
      block_values = jax.lax.dynamic_slice_in_dim(values, block_start, block)
      scores = _scores(queries, block_values)
      scores = jnp.where(first_row + rows < count, scores, -jnp.inf)
      top_scores, top_rows = jax.lax.top_k(scores, min(k, block))
      top_rows = first_row + block_start + top_rows
      # The rows of earlier blocks come first, and `top_k` prefers the first of
      # equal scores.
      scores = jnp.concatenate([best_scores, top_scores], 1)
      return _best(scores, jnp.concatenate([best_rows, top_rows], 1), k)

    no_rows = (
      jnp.full((len(queries), k), -jnp.inf, jnp.float32),
      jnp.full((len(queries), k), -1, jnp.int32),
    )
    blocks = rows_per_device // block
    best = jax.lax.fori_loop(0, blocks, search_block, no_rows)
    # Gathered in the order of devices, so equal scores keep the order of rows.
    scores, rows = (
      jax.lax.all_gather(x, _AXIS, axis=1, tiled=True) for x in best
    )
    return _best(scores, rows, k)

  return jax.shard_map(
    search_device,
    mesh=mesh,
    in_specs=(jax.P(), jax.P(_AXIS)),
    out_specs=(jax.P(), jax.P()),
    check_vma=False,
  )(queries, values)


def _best(
  scores: jax.Array, rows: jax.Array, k: int
) -> tuple[jax.Array, jax.Array]:
  """Returns the k best scores of each query, and their rows."""
  best_scores, positions = jax.lax.top_k(scores, k)
  return best_scores, jnp.take_along_axis(rows, positions, 1)
