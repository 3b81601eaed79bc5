"""Exact search by inner product over stored vectors, in float32.

On a CPU, float32 vectors are searched by FAISS's routines (`row_scan`), mapped
from their files. Everything else is JAX: vectors are scored in blocks, and only
the best k rows are kept after each, so the `[Q, N]` scores are never in memory.
Accelerators hold the vectors, sharded by rows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from anysearch_jax.host import platforms
from retrieval.index import search as search_lib
from retrieval.index import vectors as vectors_lib

# Queries of a call are padded to one of these sizes, so each compiles once;
# larger batches are divided into calls of the last size.
_QUERIES = (1, 8, 32, 128, 512)
_AXIS = "rows"


class Flat:
  """A `search.VectorIndex` over the shards of a folder.

  Args:
    shards: the shards.
    part: the first shard that is searched, and the one after the last; None:
      all shards.
    devices: devices that hold the vectors; None: the vectors stay in their
      files, and the CPU scores them.
    block: number of rows that are scored at a time.

  Raises:
    vectors.DamagedError: a file is missing or not as it was written.
  """

  def __init__(
    self,
    shards: vectors_lib.Shards,
    part: tuple[int, int] | None = None,
    *,
    devices: Sequence[jax.Device] | None = None,
    block: int = 32768,
  ):
    self.count, self.dim = shards.count, shards.dim
    # FAISS has no index of these answers for vectors that are stored rounded.
    is_exact = shards.dtype == "float32"
    self.type = "IndexFlatIP" if is_exact else f"Flat ({shards.dtype})"
    numbers = range(*(part or (0, len(shards))))
    for shard in numbers:
      shards.check(shard, read=False)
    pieces = [(shards.span(shard)[0], shards.rows(shard)) for shard in numbers]
    self._scan = None
    if devices is None and is_exact:
      # FAISS is not needed where accelerators hold the vectors.
      from retrieval.index import row_scan

      self._scan = row_scan.RowScan(
        ((first, rows.values) for first, rows in pieces), self.dim
      )
      return
    self._rows = sum(len(rows.values) for _, rows in pieces)
    self._search: Callable[..., tuple[jax.Array, jax.Array]]
    self._search = (
      _Mapped(pieces, block)
      if devices is None
      else _Held(pieces, devices, block)
    )

  def search(self, vectors: np.ndarray, k: int) -> list[search_lib.Hits]:
    """See `search.VectorIndex`."""
    vectors = search_lib.checked(vectors, self.dim)
    if self._scan:
      return self._scan.search(vectors, k).hits()
    k, out = min(k, self._rows), []
    for start in range(0, len(vectors), _QUERIES[-1]):
      some = vectors[start : start + _QUERIES[-1]]
      width = next(n for n in _QUERIES if n >= len(some))
      padded = np.zeros((width, self.dim), np.float32)
      padded[: len(some)] = some
      scores, rows = jax.device_get(self._search(padded, k))
      for s, r in zip(scores[: len(some)], rows[: len(some)], strict=True):
        kept = np.isfinite(s)
        out.append(search_lib.Hits(r[kept].astype(np.int64), s[kept]))
    return out


# The number of a shard's first row, and its rows.
_Pieces = Sequence[tuple[int, vectors_lib.Rows]]


class _Mapped:
  """Vectors in files: one call for each block, in the order of rows."""

  def __init__(self, pieces: _Pieces, block: int):
    self._device = platforms.cpu()
    self._blocks = [
      (
        first + start,
        rows.values[start : start + block],
        None if rows.scales is None else rows.scales[start : start + block],
      )
      for first, rows in pieces
      for start in range(0, len(rows.values), block)
    ]

  def __call__(self, queries: np.ndarray, k: int):
    with jax.default_device(self._device):
      best = _nothing(len(queries), k)
      for first, values, scales in self._blocks:
        best = _better(best, queries, values, scales, first, k=k)
    return best


class _Held:
  """Vectors on devices, sharded by rows and padded to whole blocks."""

  def __init__(
    self, pieces: _Pieces, devices: Sequence[jax.Device], block: int
  ):
    self._first = pieces[0][0]
    count = sum(len(rows.values) for _, rows in pieces)
    parts = len(devices)
    each = -(-count // parts)
    block = min(block, each)
    each = -(-each // block) * block
    mesh = jax.sharding.Mesh(np.asarray(devices), (_AXIS,))
    cut = jax.sharding.NamedSharding(mesh, jax.P(_AXIS))
    total = parts * each

    def placed(array: int) -> jax.Array:
      like = pieces[0][1].arrays()[array]

      def piece(index: Any) -> np.ndarray:
        """Returns a device's rows, from the shards that have them."""
        start, stop, _ = index[0].indices(total)
        made = np.zeros((stop - start, *like.shape[1:]), like.dtype)
        for at, rows in pieces:
          at -= self._first
          low, high = max(start, at), min(stop, at + len(rows.values))
          if low < high:
            found = rows.arrays()[array][low - at : high - at]
            made[low - start : high - start] = found
        return made

      shape = (total, *like.shape[1:])
      return jax.make_array_from_callback(shape, cut, piece)

    is_scaled = pieces[0][1].scales is not None
    self._arrays = placed(0), placed(1) if is_scaled else None
    self._run = functools.partial(
      held, mesh=mesh, count=count, each=each, block=block
    )

  def __call__(self, queries: np.ndarray, k: int):
    scores, rows = self._run(queries, *self._arrays, k=k)
    return scores, rows + self._first


def _nothing(queries: int, k: int) -> tuple[jax.Array, jax.Array]:
  """Returns the initial best rows: scores of -inf and rows of -1."""
  return (
    jnp.full((queries, k), -jnp.inf, jnp.float32),
    jnp.full((queries, k), -1, jnp.int32),
  )


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
      queries,
      values.astype(jnp.float32),
      precision=jax.lax.Precision.HIGHEST,
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


def _merge(
  best: tuple[jax.Array, jax.Array],
  queries: jax.Array,
  values: jax.Array,
  scales: jax.Array | None,
  first: jax.Array,
  count: jax.Array | int,
  *,
  k: int,
) -> tuple[jax.Array, jax.Array]:
  """Merges a block into the best rows; equal scores keep the order of rows."""
  scores = _scores(queries, values)
  if scales is not None:
    scores = scores * scales
  real = first + jnp.arange(values.shape[0]) < count
  scores = jnp.where(real, scores, -jnp.inf)
  top, at = jax.lax.top_k(scores, min(k, values.shape[0]))
  scores, among = jax.lax.top_k(jnp.concatenate([best[0], top], 1), k)
  rows = jnp.concatenate([best[1], first + at], 1)
  return scores, jnp.take_along_axis(rows, among, 1)


@functools.partial(jax.jit, static_argnames=("k",))
def _better(best, queries, values, scales, first, *, k: int):
  end = first + values.shape[0]
  return _merge(best, queries, values, scales, first, end, k=k)


@functools.partial(
  jax.jit, static_argnames=("k", "mesh", "count", "each", "block")
)
def held(
  queries, values, scales, *, k: int, mesh, count: int, each: int, block: int
):
  """Returns scores and rows of the best k over all devices.

  Each device loops over its blocks and keeps its best k; only these are
  gathered.
  """

  def here(queries, values, scales):
    begin = jax.lax.axis_index(_AXIS) * each

    def step(i, best):
      cut = functools.partial(
        jax.lax.dynamic_slice_in_dim, start_index=i * block, slice_size=block
      )
      return _merge(
        best,
        queries,
        cut(values),
        None if scales is None else cut(scales),
        begin + i * block,
        count,
        k=k,
      )

    best = jax.lax.fori_loop(0, each // block, step, _nothing(len(queries), k))
    # Gathered in the order of devices, so equal scores keep the order of rows.
    scores, rows = (
      jax.lax.all_gather(x, _AXIS, axis=1, tiled=True) for x in best
    )
    scores, at = jax.lax.top_k(scores, k)
    return scores, jnp.take_along_axis(rows, at, 1)

  by_rows = jax.P(_AXIS)
  return jax.shard_map(
    here,
    mesh=mesh,
    in_specs=(jax.P(), by_rows, None if scales is None else by_rows),
    out_specs=(jax.P(), jax.P()),
    check_vma=False,
  )(queries, values, scales)
