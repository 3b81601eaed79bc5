"""Pages of a KV cache: the values that the attention kernels share.

A layer's cache is a pool of pages. A row of a call finds its tokens by a table
of page numbers, so rows of any length use one pool and can share pages. Page 0
is reserved: padding is written there.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from anysearch_jax.policy import architecture as architecture_lib


class Pages(NamedTuple):
  """Keys and values of one layer, `[K, P, S, H]` each: P pages of S tokens."""

  k: jax.Array
  v: jax.Array


Pools = tuple[Pages, ...]


def empty(
  a: architecture_lib.Architecture, pages: int, size: int, dtype: Any
) -> Pools:
  """Returns zeroed pages of every layer.

  The layers are separate arrays: a stack would be copied in every step.
  """
  shape = (a.kv_heads, pages, size, a.head_dim)
  return tuple(
    Pages(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))
    for _ in range(a.layers)
  )


def write(
  pages: Pages,
  k: jax.Array,
  v: jax.Array,
  table: jax.Array,
  positions: jax.Array,
  real: jax.Array,
  *,
  as_vectors: bool = False,
) -> Pages:
  """Writes tokens to their pages; arguments as in `paged_attention.Paged`.

  With `as_vectors` the pool is written as one list of `[H]` vectors. Otherwise
  the TPU compiler lays out the whole pool anew before and after the scatter, in
  every layer of every step.
  """
  heads, count, size, h = pages.k.shape
  number = jnp.take_along_axis(table, positions // size, axis=1, mode="clip")
  number, offset = jnp.where(real, number, 0), positions % size
  head = jnp.arange(heads)[:, None, None]
  at = (head * count + number) * size + offset

  def written(pool: jax.Array, new: jax.Array) -> jax.Array:
    new = new.transpose(2, 0, 1, 3).astype(pool.dtype)
    if not as_vectors:
      return pool.at[:, number, offset].set(new)
    vectors = pool.reshape(heads * count * size, h)
    return vectors.at[at].set(new).reshape(pool.shape)

  return Pages(written(pages.k, k), written(pages.v, v))
