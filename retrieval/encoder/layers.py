"""Parts of encoders' layers; tokens are the last axis, `[D, B * T]`."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np


def dot(x: jax.Array, w: jax.Array) -> jax.Array:
  """Multiplies at full precision; TPUs would round float32 to bfloat16."""
  return jnp.matmul(x, w, precision=jax.lax.Precision.HIGHEST)


def project(
  weights: Mapping[str, jax.Array], key: str, x: jax.Array
) -> jax.Array:
  """Multiplies by a weight and adds its bias, if it has one."""
  y = dot(weights[key], x)
  bias = weights.get(f"{key}_bias")
  return y if bias is None else y + bias[:, None]


def layer_norm(
  weights: Mapping[str, jax.Array], key: str, x: jax.Array, eps: float
) -> jax.Array:
  """Normalises over the first axis, in float32, with a bias if there is one."""
  x32 = x.astype(jnp.float32)
  x32 -= x32.mean(0)
  x32 *= jax.lax.rsqrt(jnp.square(x32).mean(0) + eps)
  x32 *= weights[key][:, None]
  bias = weights.get(f"{key}_bias")
  return (x32 if bias is None else x32 + bias[:, None]).astype(x.dtype)


def attend(
  q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array
) -> jax.Array:
  """Returns attention; q, k, v and the result are `[B, N, H, T]`.

  Scores are `[B, N, keys, queries]`, because XLA does not vectorise reductions
  over the last axis on CPUs. The division by the sum comes last, because it
  then costs H divisions for each query instead of T.

  Args:
    q: queries, already scaled.
    k: keys.
    v: values.
    mask: bool, broadcastable to the scores: the keys that a query attends to.
  """
  scores = dot(k.swapaxes(-1, -2), q).astype(jnp.float32)
  scores = jnp.where(mask, scores, jnp.finfo(jnp.float32).min)
  shares = jnp.exp(scores - scores.max(-2, keepdims=True))
  total = shares.sum(-2, keepdims=True)
  return (dot(v, shares.astype(v.dtype)) / total).astype(v.dtype)


def rotary(head_dim: int, theta: float, tokens: int) -> jax.Array:
  """Returns cos and sin of the rotary angles, float32 `[2, H / 2, T]`."""
  exponent = np.arange(0, head_dim, 2, dtype=np.float64) / head_dim
  frequency = (theta**-exponent).astype(np.float32)
  angles = frequency[:, None] * jnp.arange(tokens, dtype=jnp.float32)
  return jnp.stack([jnp.cos(angles), jnp.sin(angles)])


def rotary_attend(
  qkv: jax.Array, heads: int, turns: jax.Array, mask: jax.Array
) -> jax.Array:
  """Returns attention `[D, B * T]` with rotary positions.

  Args:
    qkv: queries, keys and values, `[3 * D, B * T]`.
    heads: number of heads.
    turns: the result of `rotary`.
    mask: see `attend`; `[B, 1, T, 1]` or `[B, 1, T, T]`.
  """
  b, _, t, _ = mask.shape
  # [3, B, N, H, T].
  split = qkv.reshape(3, heads, -1, b, t).transpose(0, 3, 1, 2, 4)
  q, k = _rotate(split[0], turns), _rotate(split[1], turns)
  out = attend(q * q.shape[-2] ** -0.5, k, split[2], mask)
  return out.transpose(1, 2, 0, 3).reshape(-1, b * t)


def _rotate(x: jax.Array, turns: jax.Array) -> jax.Array:
  """Turns the pairs (i, i + H / 2) of x `[..., H, T]`, in float32."""
  cos, sin = turns
  first, second = jnp.split(x.astype(jnp.float32), 2, axis=-2)
  turned = [first * cos - second * sin, second * cos + first * sin]
  return jnp.concatenate(turned, axis=-2).astype(x.dtype)


def gelu(x: jax.Array) -> jax.Array:
  """Exact GELU by erf; `jax.nn.gelu` uses erfc, three times slower on CPUs."""
  return 0.5 * x * (1 + jax.lax.erf(x * 0.5**0.5))
