"""Pages of a KV cache: the values that the attention kernels share.

A layer's cache is a pool of pages. A row of a call finds its tokens by a table
of page numbers, so rows of any length use one pool and can share pages. Page 0
is reserved: padding is written there.

Pages may store float8 numbers with a scale for each token and kv head. A scale
for a whole page would need its earlier tokens rewritten when one with larger
numbers arrives, and a row's bits would depend on how its tokens were chunked.
Scales are powers of two: multiplying by them is exact in every dtype, so that
keys and values that were read are written back as the same bits. Rounding the
scale to a power of two costs little, because a float format is about as exact
at every scale: it adds 3 % to the error of normal numbers.

Shapes: P pages of S tokens; a row's table has M pages. The others are in the
legend of `types`.
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
# Numbers up to this one round to 448, the largest of float8_e4m3fn; larger ones
# become NaN.
_LARGEST = 464
# The score of a masked key: finite, so that differences of masked scores are 0
# and not NaN, as the softmax of a row of -inf would be.
MASKED = -1e30


class Pages(NamedTuple):
  """Keys and values of one layer.

  Attributes:
    k: keys `[K, P, S, H]`.
    v: values `[K, P, S, H]`.
    k_scale: scales `[K, P, S]` of float8 keys, otherwise None.
    v_scale: scales `[K, P, S]` of float8 values, otherwise None.
  """

  k: jax.Array
  v: jax.Array
  k_scale: jax.Array | None = None
  v_scale: jax.Array | None = None


Pools = tuple[Pages, ...]


def storage_dtype(kv_dtype: str, dtype: Any, platform: str) -> Any:
  """Returns the dtype of pages.

  Args:
    kv_dtype: `engine.kv_dtype`.
    dtype: compute type.
    platform: of the devices: `cpu`, `gpu`, `cuda` or `tpu`.
  """
  if kv_dtype == "float8":
    return jnp.dtype(_FLOAT8)
  # To write a token into an array of bfloat16, XLA's CPU backend converts the
  # whole array to float32 and back.
  return jnp.dtype(jnp.float32 if platform == "cpu" else dtype)


def is_float8(dtype: Any) -> bool:
  """Returns whether pages of a dtype have scales."""
  return jnp.dtype(dtype) == _FLOAT8


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
  # max |x| = mantissa x 2^exponent with the mantissa in [.5, 1).
  mantissa, exponent = jnp.frexp(jnp.max(jnp.abs(x), axis=-1))
  exponent += (mantissa > _LARGEST / 512).astype(jnp.int32) - 9
  # 2^exponent is made of its bits, because powers are not exact on every
  # device. Devices may take numbers below 2^-126 for 0.
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
  # Without the barrier the compiler may leave out both conversions.
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

  The layers are separate arrays: a stack would be copied in every step.

  Args:
    a: the architecture.
    pages: numbers of pages: the first of layers without a window, the last of
      windowed layers; one number is for both.
    size: tokens of a page.
    dtype: type of keys and values, of `storage_dtype`.
  """

  def layer(i: int) -> Pages:
    count = pages[-1] if i in a.windowed else pages[0]
    shape = (a.kv_heads, count, size)
    k = jnp.zeros((*shape, a.head_dim), dtype)
    v = jnp.zeros((*shape, a.head_dim), dtype)
    if dtype != _FLOAT8:
      return Pages(k, v)
    return Pages(k, v, jnp.zeros(shape, _SCALE), jnp.zeros(shape, _SCALE))

  return tuple(map(layer, range(a.layers)))


def page_and_offset(
  pages: Pages, table: jax.Array, positions: jax.Array, real: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Returns each token's page, 0 for padding, and its offset in the page.

  Args:
    pages: the pages of one layer.
    table: int `[B, M]`, the pages of each row in order.
    positions: int `[B, T]` of the tokens in their rows.
    real: bool `[B, T]`, False for padding.

  Returns:
    Two arrays, int `[B, T]`.
  """
  size = pages.k.shape[2]
  number = jnp.take_along_axis(table, positions // size, axis=1, mode="clip")
  return jnp.where(real, number, 0), positions % size


def split_fused(
  heads: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Splits `[B, T, K, G + 2, H]`, each kv head's queries, key and value.

  Returns:
    Queries `[B, T, N, H]`, keys and values `[B, T, K, H]`.
  """
  k = heads[..., -2, :]
  v = heads[..., -1, :]
  q = heads[..., :-2, :]
  return q.reshape(*k.shape[:2], -1, k.shape[-1]), k, v


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
  """Writes tokens to their pages.

  Args:
    pages: the pages of one layer.
    k: keys `[B, T, K, H]` of the tokens.
    v: values, as `k`.
    table: int `[B, M]`, the pages of each row in order.
    positions: int `[B, T]` of the tokens in their rows.
    real: bool `[B, T]`; padding is written to page 0.
    as_vectors: whether to scatter into the pool as one list of `[H]` vectors.
      Otherwise the TPU compiler lays out the whole pool anew before and after
      the scatter, in every layer of every step.
  """
  heads, count, size, _ = pages.k.shape
  number, offset = page_and_offset(pages, table, positions, real)
  head = jnp.arange(heads)[:, None, None]
  index = (head * count + number) * size + offset

  def scatter(pool: jax.Array, values: jax.Array) -> jax.Array:
    values = jnp.moveaxis(values, 2, 0).astype(pool.dtype)
    if not as_vectors:
      return pool.at[:, number, offset].set(values)
    vectors = pool.reshape(heads * count * size, *pool.shape[3:])
    return vectors.at[index].set(values).reshape(pool.shape)

  new = Pages(k, v)
  if pages.k_scale is not None:
    k, k_scale = quantised(k)
    v, v_scale = quantised(v)
    new = Pages(k, v, k_scale, v_scale)
  return jax.tree.map(scatter, pages, new)


def combine_splits(out: jax.Array, sums: jax.Array) -> jax.Array:
  """Combines the results of separate parts of the keys (flash-decoding).

  Args:
    out: each part's attention output, `[B, K, splits, G, H]` for the G query
      heads of a kv head.
    sums: logarithms to the base 2 of the parts' softmax sums, `[B, K, splits,
      G]`.

  Returns:
    The attention output over all keys, `[B, K, G, H]`.
  """
  weight = jnp.exp2(sums - jnp.max(sums, axis=2, keepdims=True))
  # Dividing last lets XLA combine two parts in one kernel.
  out = jnp.sum(out * weight[..., None], axis=2)
  return out / jnp.sum(weight, axis=2)[..., None]
