"""Rotary positions (RoPE, https://arxiv.org/abs/2104.09864)."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

from anysearch_jax.policy import architecture as architecture_lib
from anysearch_jax.policy.attention import layer_options as layer_options_lib

# Cos and sin of the angles; those of windowed layers follow if they differ.
CosSin = tuple[jax.Array, ...]


def inverse_frequencies(a: architecture_lib.Architecture) -> np.ndarray:
  """Returns rotary frequencies `[H / 2]` in radians per token.

  `a.rope_scaling` stretches them to longer contexts; its classes say how.
  """
  exponent = np.arange(0, a.head_dim, 2, dtype=np.float64) / a.head_dim
  frequency = a.rope_theta**-exponent
  scaling = a.rope_scaling
  if scaling is None:
    return frequency.astype(np.float32)
  if isinstance(scaling, architecture_lib.LinearRope):
    return (frequency / scaling.factor).astype(np.float32)
  original = scaling.original_max_position_embeddings / (2 * math.pi)
  if isinstance(scaling, architecture_lib.YarnRope):
    # The dimensions whose frequencies make beta turns in the original length.
    low, high = (
      a.head_dim * math.log(original / beta) / (2 * math.log(a.rope_theta))
      for beta in (scaling.beta_fast, scaling.beta_slow)
    )
    if scaling.truncate:
      low = math.floor(low)
      high = math.ceil(high)
    low = max(low, 0)
    high = min(high, a.head_dim - 1)
    # transformers also makes an empty range a step.
    ramp = np.arange(a.head_dim // 2) - low
    kept_share = 1 - ramp / (high - low if high != low else 0.001)
  else:
    kept_share = (original * frequency - scaling.low_freq_factor) / (
      scaling.high_freq_factor - scaling.low_freq_factor
    )
  # The share of the unscaled frequency, 1 for short wavelengths.
  kept_share = np.clip(kept_share, 0.0, 1.0)
  scaled = (1 - kept_share) * frequency / scaling.factor
  return (scaled + kept_share * frequency).astype(np.float32)


def cos_and_sin(
  a: architecture_lib.Architecture, positions: jax.Array
) -> CosSin:
  """Returns cos and sin of the rotary angles, float32 `[B, T, 1, H]`.

  YaRN multiplies both by its `attention_factor`. If windowed layers have angles
  of their own, their cos and sin are the third and the fourth value.

  Args:
    a: the architecture.
    positions: int `[B, T]` of tokens, counted from 0.
  """

  def with_rope_of(a: architecture_lib.Architecture) -> CosSin:
    angles = positions[..., None].astype(jnp.float32) * inverse_frequencies(a)
    angles = jnp.concatenate([angles, angles], axis=-1)[:, :, None, :]
    scale = getattr(a.rope_scaling, "attention_factor", 1.0)
    return scale * jnp.cos(angles), scale * jnp.sin(angles)

  if not a.windowed_theta:
    return with_rope_of(a)
  windowed = dataclasses.replace(
    a, rope_theta=a.windowed_theta, rope_scaling=None
  )
  return with_rope_of(a) + with_rope_of(windowed)


def select_for_layer(
  cos_sin: CosSin, options: layer_options_lib.LayerOptions
) -> CosSin:
  """Returns cos and sin of a layer; those of angle 0 if it is not rotated."""
  cos, sin, *windowed = cos_sin
  if windowed:
    is_windowed = options.window < layer_options_lib.NO_WINDOW
    cos = jnp.where(is_windowed, windowed[0], cos)
    sin = jnp.where(is_windowed, windowed[1], sin)
  if options.rotated is None:
    return cos, sin
  cos = jnp.where(options.rotated, cos, 1.0)
  return cos, jnp.where(options.rotated, sin, 0.0)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
  """Applies rotary positions, in float32.

  Pairs are (i, i + H / 2), as in Hugging Face, not neighbours as in the paper.

  Args:
    x: queries or keys `[B, T, heads, H]`.
    cos: `[B, T, 1, H]`, of `select_for_layer`.
    sin: as `cos`.
  """
  first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
  rotated = jnp.concatenate([-second, first], axis=-1)
  return (x * cos + rotated * sin).astype(x.dtype)
