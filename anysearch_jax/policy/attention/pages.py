"""Pages of a KV cache: the values that the attention kernels share.

A layer's cache is a pool of pages. A row of a call finds its tokens by a table
of page numbers, so rows of any length use one pool and can share pages. Page 0
is reserved: padding is written there.

Pages may store float8 numbers with a scale for each token and kv head. A scale
for a whole page would need its earlier tokens rewritten when one with larger
numbers arrives, and a row's bits would depend on how its tokens were chunked.
Scales are powers of two: multiplying by them is exact in every dtype, so that
keys and values that were read are written back as the same bits. Float formats
are about as exact at every scale: rounding it adds 3 % to the error of normal
numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from anysearch_jax.policy import architecture as architecture_lib

_FLOAT8 = jnp.float8_e4m3fn
# Scales are powers of two, which bfloat16 represents as float32 does.
_SCALE = jnp.bfloat16
# Numbers up to it round to 448, the largest of float8_e4m3fn; more become NaN.
_LARGEST = 464
# The score of a masked key: finite, so that differences of masked scores are 0
# and not NaN, as the softmax of a row of -inf would be.
MASKED = -1e30


class Pages(NamedTuple):
  """Keys and values of one layer, `[K, P, S, H]` each: P pages of S tokens.

  k_scale and v_scale: `[K, P, S]` if `k` and `v` are float8, otherwise None.
  """

  k: jax.Array
  v: jax.Array
  k_scale: jax.Array | None = None
  v_scale: jax.Array | None = None


Pools = tuple[Pages, ...]


def storage_dtype(kv_dtype: str, dtype: Any) -> Any:
  """Returns the dtype of pages for `engine.kv_dtype` and a compute dtype."""
  return jnp.dtype(_FLOAT8 if kv_dtype == "float8" else dtype)


def token_bytes(a: architecture_lib.Architecture, dtype: Any) -> int:
  """Returns the bytes that a token takes in the pages of all layers."""
  vector = a.head_dim * jnp.dtype(dtype).itemsize
  if dtype == _FLOAT8:
    vector += jnp.dtype(_SCALE).itemsize
  return 2 * a.layers * a.kv_heads * vector


def quantised(x: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Rounds vectors to float8 with a power of two as scale.

  A scale s is the smallest with max |x| <= 464 s. The largest number of x / s
  then rounds to one in [240, 448], for which the same scale is found again.

  Args:
    x: `[..., H]`, finite and below 2^127.

  Returns:
    float8_e4m3fn `[..., H]` and bfloat16 `[...]`, whose product is nearest to
    `x`: to 1/16 of a number, or to s / 1024 of a small one.
  """
  x = x.astype(jnp.float32)
  # largest = part x 2^exponent with part in [.5, 1).
  part, exponent = jnp.frexp(jnp.max(jnp.abs(x), axis=-1))
  exponent += (part > _LARGEST / 512).astype(jnp.int32) - 9
  # By its bits, because powers are not exact everywhere. Devices may take
  # numbers below 2^-126 for 0.
  bits = (jnp.maximum(exponent, -126) + 127) << 23
  scale = jax.lax.bitcast_convert_type(bits, jnp.float32)
  return (x / scale[..., None]).astype(_FLOAT8), scale.astype(_SCALE)


def dequantised(pages: Pages, dtype: Any) -> tuple[jax.Array, jax.Array]:
  """Returns keys and values as numbers of a dtype."""
  return (
    _product(pages.k, pages.k_scale, dtype),
    _product(pages.v, pages.v_scale, dtype),
  )


def round_to_float8(x: jax.Array) -> jax.Array:
  """Returns `x` as float8 pages give it back."""
  # Otherwise the compiler may leave out a conversion there and back.
  number, scale = jax.lax.optimization_barrier(quantised(x))
  return _product(number, scale, x.dtype)


def _product(x: jax.Array, scale: jax.Array | None, dtype: Any) -> jax.Array:
  x = x.astype(dtype)
  return x if scale is None else x * scale.astype(dtype)[..., None]


def empty(
  a: architecture_lib.Architecture,
  pages: Sequence[int],
  size: int,
  dtype: Any,
) -> Pools:
  """Returns zeroed pages of every layer, with scales if `dtype` is float8.

  Layers with windows have the last of the numbers of `pages`, others the first.
  The layers are separate arrays: a stack would be copied in every step.
  """

  def layer(i: int) -> Pages:
    shape = a.kv_heads, pages[-int(i in a.windowed)], size
    arrays = [jnp.zeros((*shape, a.head_dim), dtype) for _ in range(2)]
    if dtype == _FLOAT8:
      arrays += [jnp.zeros(shape, _SCALE) for _ in range(2)]
    return Pages(*arrays)

  return tuple(map(layer, range(a.layers)))


def page_and_offset(
  pages: Pages, table: jax.Array, positions: jax.Array, real: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Returns each token's page (0 for padding) and place in it, int `[B, T]`."""
  size = pages.k.shape[2]
  number = jnp.take_along_axis(table, positions // size, axis=1, mode="clip")
  return jnp.where(real, number, 0), positions % size


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
  heads, count, size, _ = pages.k.shape
  number, offset = page_and_offset(pages, table, positions, real)
  head = jnp.arange(heads)[:, None, None]
  at = (head * count + number) * size + offset

  def written(pool: jax.Array, new: jax.Array) -> jax.Array:
    new = jnp.moveaxis(new, 2, 0).astype(pool.dtype)
    if not as_vectors:
      return pool.at[:, number, offset].set(new)
    vectors = pool.reshape(heads * count * size, *pool.shape[3:])
    return vectors.at[at].set(new).reshape(pool.shape)

  new = Pages(k, v)
  if pages.k_scale is not None:
    (k, k_scale), (v, v_scale) = quantised(k), quantised(v)
    new = Pages(k, v, k_scale, v_scale)
  return jax.tree.map(written, pages, new)


def combine_splits(out: jax.Array, sums: jax.Array) -> jax.Array:
  """Joins the results of parts of the keys, `[B, K, splits, R, H]`.

  `sums`, `[B, K, splits, R]`, are the logarithms of the parts' sums of weights,
  to the base 2.
  """
  weight = jnp.exp2(sums - jnp.max(sums, axis=2, keepdims=True))
  # Divided last, two parts are joined by one kernel.
  out = jnp.sum(out * weight[..., None], axis=2)
  return out / jnp.sum(weight, axis=2)[..., None]
