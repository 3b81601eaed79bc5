"""Rotary positions and grouped-query attention."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np

from anysearch_jax.policy import architecture as architecture_lib
from anysearch_jax.policy.attention import pages

ALL = np.iinfo(np.int32).max  # The window of a layer that sees every token.


def inverse_frequencies(a: architecture_lib.Architecture) -> np.ndarray:
  """Returns rotary frequencies `[H / 2]` in radians per token.

  With Llama-3.1's `rope_scaling`, frequencies whose wavelength exceeds the
  original length / low_freq_factor are divided by `factor`, wavelengths below
  it / high_freq_factor are kept, and those in between are interpolated. YaRN
  interpolates by the dimension instead (`architecture.YarnRope`). RoPE:
  https://arxiv.org/abs/2104.09864.
  """
  exponent = np.arange(0, a.head_dim, 2, dtype=np.float64) / a.head_dim
  frequency = a.rope_theta**-exponent
  s = a.rope_scaling
  if s is None:
    return frequency.astype(np.float32)
  if isinstance(s, architecture_lib.LinearRope):
    return (frequency / s.factor).astype(np.float32)
  original = s.original_max_position_embeddings / (2 * math.pi)
  if isinstance(s, architecture_lib.YarnRope):
    low, high = (
      a.head_dim * math.log(original / n) / (2 * math.log(a.rope_theta))
      for n in (s.beta_fast, s.beta_slow)
    )
    if s.truncate:
      low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, a.head_dim - 1)
    # transformers also makes an empty range a step.
    ramp = np.arange(a.head_dim // 2) - low
    kept = 1 - ramp / (high - low if high != low else 0.001)
  else:
    kept = (original * frequency - s.low_freq_factor) / (
      s.high_freq_factor - s.low_freq_factor
    )
  kept = np.clip(kept, 0.0, 1.0)
  scaled = (1 - kept) * frequency / s.factor + kept * frequency
  return scaled.astype(np.float32)


class Layer(NamedTuple):
  """What layers differ in: a number, or an array `[L]` for all layers.

  Each is None if no layer differs. rotated: whether it has rotary positions.
  window: how many tokens are seen, the own included.
  """

  rotated: Any = None
  window: Any = None


def layers(a: architecture_lib.Architecture) -> Layer:
  """Returns what the layers of `a` differ in, as arrays."""
  every = np.arange(a.layers)
  window = np.where(np.isin(every, a.windowed), a.window, ALL)
  return Layer(
    np.isin(every, a.unrotated, invert=True) if a.unrotated else None,
    window.astype(np.int32) if a.windowed else None,
  )


def rotary(
  a: architecture_lib.Architecture, positions: jax.Array
) -> tuple[jax.Array, ...]:
  """Returns cos and sin of the rotary angles, float32 `[B, T, 1, H]`.

  YaRN multiplies both by its `attention_factor`. `positions` are those of
  tokens, int `[B, T]`, from 0. Those of layers with windows follow, if others.
  """

  def of(a: architecture_lib.Architecture) -> tuple[jax.Array, ...]:
    angles = positions[..., None].astype(jnp.float32) * inverse_frequencies(a)
    angles = jnp.concatenate([angles, angles], axis=-1)[:, :, None, :]
    scale = getattr(a.rope_scaling, "attention_factor", 1.0)
    return scale * jnp.cos(angles), scale * jnp.sin(angles)

  if not a.windowed_theta:
    return of(a)
  theta = a.windowed_theta
  return of(a) + of(dataclasses.replace(a, rope_theta=theta, rope_scaling=None))


def of_layer(
  rotary: tuple[jax.Array, ...], layer: Layer
) -> tuple[jax.Array, ...]:
  """Returns cos and sin of a layer; those of angle 0 if it is not rotated."""
  cos, sin, *windowed = rotary
  if windowed:
    seen = layer.window < ALL
    cos, sin = (
      jnp.where(seen, own, x)
      for own, x in zip(windowed, (cos, sin), strict=True)
    )
  if layer.rotated is None:
    return cos, sin
  return jnp.where(layer.rotated, cos, 1.0), jnp.where(layer.rotated, sin, 0.0)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
  """Applies rotary positions to `x` `[B, T, heads, H]`, in float32.

  Pairs are (i, i + H / 2), as in Hugging Face, not neighbours as in the paper.
  """
  first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
  turned = jnp.concatenate([-second, first], axis=-1)
  return (x * cos + turned * sin).astype(x.dtype)


def attend(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  mask: jax.Array,
  sinks: jax.Array | None = None,
) -> jax.Array:
  """Computes softmax attention; each kv head serves N / K query heads.

  Args:
    q: `[B, T, N, H]`.
    k: `[B, K, S, H]`. v: as `k`.
    mask: bool `[B, T, S]`, True where a query attends to a key.
    sinks: `[N]`, of each head a score that takes a share and gives no value.

  Returns:
    `[B, T, N, H]`, dtype of `q`; scores and softmax are float32.
  """
  b, t, n, h = q.shape
  chex.assert_equal_shape([k, v])
  chex.assert_shape(mask, (b, t, k.shape[2]))
  kv_heads = k.shape[1]
  # Group the queries of each kv head, so that one matmul scores all of them.
  q = q.reshape(b, t, kv_heads, n // kv_heads, h).transpose(0, 2, 3, 1, 4)
  scores = jnp.einsum(
    "bkrth,bksh->bkrts", q, k, preferred_element_type=jnp.float32
  )
  scores = jnp.where(mask[:, None, None], scores * h**-0.5, pages.MASKED)
  p = jax.nn.softmax(scores, axis=-1)
  if sinks is not None:
    sinks = sinks.astype(jnp.float32).reshape(kv_heads, -1, 1, 1)
    total = jax.nn.logsumexp(scores, axis=-1, keepdims=True)
    p *= jax.nn.sigmoid(total - sinks)
  out = jnp.einsum("bkrts,bksh->bkrth", p.astype(v.dtype), v)
  return out.transpose(0, 3, 1, 2, 4).reshape(b, t, n, h)


def segment_mask(
  segment_ids: jax.Array, window: jax.Array | None = None
) -> jax.Array:
  """Returns the causal mask bool `[B, T, T]` inside segments; id 0 is padding.

  A padding query attends to padding up to itself, and no token to padding. A
  query sees the last `window` tokens, itself included; None: all.
  """
  t = segment_ids.shape[1]
  same = segment_ids[:, :, None] == segment_ids[:, None, :]
  mask = same & jnp.tril(jnp.ones((t, t), bool))
  if window is not None:
    mask &= jnp.arange(t)[:, None] - jnp.arange(t) < window
  return mask
