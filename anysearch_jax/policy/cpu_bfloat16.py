"""bfloat16 on a CPU: what XLA computes slowly, asked for in a way that is fast.

* A product of bfloat16 matrices goes to the CPU's matrix instructions (AMX,
  AVX-512 BF16) if its result is float32. A product whose result is bfloat16,
  and one of a float32 gradient and a bfloat16 weight, are computed in float32.
  So `project` asks for float32 results, forward and backward, and rounds them:
  the numbers that a GPU's products give, which add in float32 too. A single row
  gets a second one of zeros: XLA computes the product of a vector and a matrix
  of bfloat16 without vector instructions, ten times as slowly.
* The sum of an elementwise product, which softmax's derivative has, takes eight
  times as long as a matrix product with ones (`softmax`).
* Indexing converts the whole array to float32 first, unless its bits are
  indexed (`rows`).

For other devices and types these functions are JAX's own.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp


def is_used(dtype: Any) -> bool:
  """Returns whether arrays of this type are computed as this module says.

  A planned program is for the devices of its mesh, which this machine may lack.
  """
  device = jax.sharding.get_abstract_mesh().abstract_device
  platform = jax.default_backend() if device is None else device.platform
  return dtype == jnp.bfloat16 and platform == "cpu"


def project(
  x: jax.Array, weight: jax.Array, axes: int, *, out_axes_first: bool = False
) -> jax.Array:
  """Contracts the last axes of `x` with axes of a weight.

  Args:
    x: `[..., *in]`.
    weight: `[*in, *out]`, or `[*out, *in]`; of the dtype of `x`.
    axes: number of axes of `in`.
    out_axes_first: whether `weight` begins with `out`.

  Returns:
    `[..., *out]`, of the dtype of `x`.
  """
  if not is_used(x.dtype):
    contracted: Any = axes
    if out_axes_first:
      last_axes = tuple(range(-axes, 0))
      contracted = (last_axes, last_axes)
    return jnp.tensordot(x, weight, contracted)
  outer = x.shape[: x.ndim - axes]
  size = math.prod(x.shape[x.ndim - axes :])
  if out_axes_first:
    out = weight.shape[: weight.ndim - axes]
    matrix = weight.reshape(-1, size)
  else:
    out = weight.shape[axes:]
    matrix = weight.reshape(size, -1)
  rows = x.reshape(-1, size)
  count = len(rows)
  if count == 1:
    rows = jnp.pad(rows, ((0, 1), (0, 0)))
  y = _product(rows, matrix, out_axes_first)
  return y[:count].reshape(*outer, *out)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _product(x: jax.Array, matrix: jax.Array, is_transposed: bool) -> jax.Array:
  """Returns `x @ matrix`, or `x @ matrix.T`, of two matrices."""
  return _dot(x, matrix, (1, 1 if is_transposed else 0))


def _dot(x: jax.Array, y: jax.Array, axes: tuple[int, int]) -> jax.Array:
  x_axis, y_axis = axes
  return jax.lax.dot_general(
    x,
    y,
    (((x_axis,), (y_axis,)), ((), ())),
    preferred_element_type=jnp.float32,
  ).astype(x.dtype)


def _forward(x, matrix, is_transposed):
  return _product(x, matrix, is_transposed), (x, matrix)


def _backward(is_transposed, saved, gradient):
  x, matrix = saved
  x_gradient = _dot(gradient, matrix, (1, 0 if is_transposed else 1))
  pair = (gradient, x) if is_transposed else (x, gradient)
  return x_gradient, _dot(*pair, (0, 0))


_product.defvjp(_forward, _backward)


def softmax(scores: jax.Array, dtype: Any) -> jax.Array:
  """Returns the softmax over the last axis.

  Args:
    scores: float32 `[..., S]`.
    dtype: of the queries that were scored.
  """
  if is_used(dtype):
    return _softmax(scores)
  return jax.nn.softmax(scores, axis=-1)


@jax.custom_vjp
def _softmax(scores: jax.Array) -> jax.Array:
  return jax.nn.softmax(scores, axis=-1)


def _softmax_forward(scores):
  probs = _softmax(scores)
  return probs, probs


def _softmax_backward(probs, gradient):
  weighted = probs * gradient
  total = weighted @ jnp.ones((probs.shape[-1], 1), probs.dtype)
  return (weighted - probs * total,)


_softmax.defvjp(_softmax_forward, _softmax_backward)


def rows(table: jax.Array, ids: jax.Array) -> jax.Array:
  """Returns rows of a table.

  Args:
    table: `[V, D]`.
    ids: int `[...]`, the rows.

  Returns:
    `[..., D]`.
  """
  return _rows(table, ids) if is_used(table.dtype) else table[ids]


@jax.custom_vjp
def _rows(table: jax.Array, ids: jax.Array) -> jax.Array:
  bits = jax.lax.bitcast_convert_type(table, jnp.uint16)
  return jax.lax.bitcast_convert_type(bits[ids], table.dtype)


def _rows_forward(table, ids):
  return _rows(table, ids), (table.shape, ids)


def _rows_backward(saved, gradient):
  shape, ids = saved
  table_gradient = jnp.zeros(shape, jnp.float32)
  table_gradient = table_gradient.at[ids].add(gradient.astype(jnp.float32))
  return table_gradient.astype(gradient.dtype), None


_rows.defvjp(_rows_forward, _rows_backward)
