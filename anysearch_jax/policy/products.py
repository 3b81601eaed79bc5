"""Matrix products of bfloat16 on a CPU, at the speed of its matrix units.

XLA sends a product of bfloat16 matrices to the CPU's matrix instructions (AMX,
AVX-512 BF16) if its result is float32. A product whose result is bfloat16, and
one of a float32 gradient and a bfloat16 weight, are computed in float32. So
`project` asks for float32 results, forward and backward, and rounds them: the
numbers that a GPU's products give, which add in float32 too. Elsewhere it is
`jnp.tensordot`.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp


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
  if x.dtype != jnp.bfloat16 or jax.default_backend() != "cpu":
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
  y = _product(x.reshape(-1, size), matrix, out_axes_first)
  return y.reshape(*outer, *out)


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
