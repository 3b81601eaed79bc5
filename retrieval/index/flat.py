"""Exact search by inner product over stored vectors, in float32.

On a CPU, float32 vectors are searched by FAISS's routines (`row_scan`), mapped
from their files. Everything else is JAX: devices hold the vectors, sharded by
rows, and score them in blocks. Only the best k rows are kept after each block,
so the `[Q, N]` scores are never in memory.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from anysearch_jax.host import platforms
from anysearch_jax.retrieval.index import search as search_lib
from anysearch_jax.retrieval.index import vectors as vectors_lib

# Queries of a call are padded to one of these sizes, so each compiles once;
# larger batches are divided into calls of the last size.
_QUERIES = (1, 8, 32, 128, 512)
# At least this many rows are found, so that all smaller k share a program.
_FOUND = 16
_AXIS = "rows"


def open_flat(
  shards: vectors_lib.Shards,
  *,
  devices: Sequence[jax.Device] | None = None,
  block: int = 32768,
) -> search_lib.Index:
  """Opens exact search over the shards of a folder, and compiles it.

  Args:
    shards: the shards.
    devices: devices that hold the vectors; None: a CPU scores them, float32
      ones where they are in their files.
    block: number of rows that are scored at a time.

  Raises:
    vectors.DamagedError: a file is missing or not as it was written.
  """
  pieces = [
    (shards.span(shard)[0], shards.rows(shard)) for shard in range(len(shards))
  ]
  if devices is None and shards.dtype == "float32":
    # FAISS is not needed where accelerators hold the vectors.
    from anysearch_jax.retrieval.index import row_scan

    return row_scan.RowScan(pieces, shards.dim)
  made = _Held(shards, pieces, devices or [platforms.cpu()], block)
  # The deadline of a first search has no time for that.
  for width in _QUERIES:
    made.search(np.zeros((width, shards.dim), np.float32), 1)
  return made


class _Held:
  """Vectors on devices, sharded by rows and padded to whole blocks."""

  def __init__(
    self,
    shards: vectors_lib.Shards,
    pieces: Sequence[tuple[int, np.ndarray]],
    devices: Sequence[jax.Device],
    block: int,
  ):
    self.count, self.dim = shards.count, shards.dim
    # FAISS has no index of these answers for vectors that are stored rounded.
    is_exact = shards.dtype == "float32"
    self.type = "IndexFlatIP" if is_exact else f"Flat ({shards.dtype})"
    each = -(-self.count // len(devices))
    block = min(block, each)
    each = -(-each // block) * block
    mesh = jax.sharding.Mesh(np.asarray(devices), (_AXIS,))
    shape = (each * len(devices), self.dim)

    def piece(index: Any) -> np.ndarray:
      """Returns a device's rows, from the shards that have them."""
      start, stop, _ = index[0].indices(shape[0])
      made = np.zeros((stop - start, self.dim), pieces[0][1].dtype)
      for at, rows in pieces:
        low, high = max(start, at), min(stop, at + len(rows))
        if low < high:
          made[low - start : high - start] = rows[low - at : high - at]
      return made

    cut = jax.sharding.NamedSharding(mesh, jax.P(_AXIS))
    self._search = functools.partial(
      held,
      values=jax.make_array_from_callback(shape, cut, piece),
      mesh=mesh,
      count=self.count,
      each=each,
      block=block,
    )

  def search(self, vectors: np.ndarray, k: int) -> list[search_lib.Hits]:
    """See `search.Index`."""
    vectors = search_lib.checked(vectors, self.dim)
    most, out = min(max(k, _FOUND), self.count), []
    for start in range(0, len(vectors), _QUERIES[-1]):
      some = vectors[start : start + _QUERIES[-1]]
      width = next(n for n in _QUERIES if n >= len(some))
      padded = np.zeros((width, self.dim), np.float32)
      padded[: len(some)] = some
      found = jax.device_get(self._search(padded, k=most))
      scores, rows = (x[: len(some), :k] for x in found)
      rows = rows.astype(np.int64)
      for s, r in zip(scores, rows, strict=True):
        kept = np.isfinite(s)
        out.append(search_lib.Hits(r[kept], s[kept]))
    return out


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
  parts, rest = [], queries
  for _ in range(3):
    # XLA may remove a pair of dtype conversions that only rounds;
    # `reduce_precision` is never removed.
    part = jax.lax.reduce_precision(rest, exponent_bits=8, mantissa_bits=7)
    parts.append(part.astype(jnp.bfloat16))
    rest = rest - part
  return jnp.sum(
    dot(jnp.concatenate(parts), values).reshape(3, len(queries), -1), 0
  )


@functools.partial(
  jax.jit, static_argnames=("k", "mesh", "count", "each", "block")
)
def held(queries, values, *, k: int, mesh, count: int, each: int, block: int):
  """Returns scores and rows of the best k over all devices.

  Each device loops over its blocks and keeps its best k; only these are
  gathered. Equal scores keep the order of rows.

  Args:
    queries: float32 `[Q, dim]`.
    values: `[devices * each, dim]`, sharded by rows.
    k: rows that a query finds, at most `count`.
    mesh: of the devices.
    count: rows of `values` that are no padding.
    each: rows of a device, a multiple of `block`.
    block: rows that are scored at a time.
  """

  def here(queries, values):
    begin = jax.lax.axis_index(_AXIS) * each

    def step(i, best):
      rows = i * block + jnp.arange(block)
      some = jax.lax.dynamic_slice_in_dim(values, i * block, block)
      scores = _scores(queries, some)
      scores = jnp.where(begin + rows < count, scores, -jnp.inf)
      top, at = jax.lax.top_k(scores, min(k, block))
      found = jnp.concatenate([best[1], begin + i * block + at], 1)
      return _best(jnp.concatenate([best[0], top], 1), found, k)

    nothing = (
      jnp.full((len(queries), k), -jnp.inf, jnp.float32),
      jnp.full((len(queries), k), -1, jnp.int32),
    )
    best = jax.lax.fori_loop(0, each // block, step, nothing)
    # Gathered in the order of devices, so equal scores keep the order of rows.
    scores, rows = (
      jax.lax.all_gather(x, _AXIS, axis=1, tiled=True) for x in best
    )
    return _best(scores, rows, k)

  return jax.shard_map(
    here,
    mesh=mesh,
    in_specs=(jax.P(), jax.P(_AXIS)),
    out_specs=(jax.P(), jax.P()),
    check_vma=False,
  )(queries, values)


def _best(
  scores: jax.Array, rows: jax.Array, k: int
) -> tuple[jax.Array, jax.Array]:
  scores, at = jax.lax.top_k(scores, k)
  return scores, jnp.take_along_axis(rows, at, 1)
