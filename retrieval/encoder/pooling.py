"""Pooling: from the hidden states of a text's tokens to one unit vector."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def pool(hidden: jax.Array, lengths: jax.Array, pooling: str) -> jax.Array:
  """Returns the unit vectors of texts.

  Args:
    hidden: `[B, T, D]`, the result of `forward`.
    lengths: int `[B]`; 0 marks a row of padding.
    pooling: `mean` over a text's tokens, `cls`, its first token, or
      `lasttoken`, its last one.

  Returns:
    float32 `[B, D]`.
  """
  hidden = hidden.astype(jnp.float32)
  if pooling == "cls":
    x = hidden[:, 0]
  elif pooling == "lasttoken":
    last = jnp.maximum(lengths - 1, 0)[:, None, None]
    x = jnp.take_along_axis(hidden, last, axis=1)[:, 0]
  else:
    visible = jnp.arange(hidden.shape[1]) < lengths[:, None]
    x = jnp.where(visible[..., None], hidden, 0).sum(1)
    x /= jnp.maximum(lengths, 1)[:, None]
  norm = jnp.sqrt(jnp.square(x).sum(-1, keepdims=True))
  return x / jnp.maximum(norm, 1e-12)
