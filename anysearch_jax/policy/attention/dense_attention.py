"""Grouped-query attention with all scores in memory, and its causal mask."""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp

from anysearch_jax.policy import cpu_bfloat16
from anysearch_jax.policy.attention import pages


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
    k: `[B, K, S, H]`, of S keys.
    v: as `k`.
    mask: bool `[B, T, S]`, True where a query attends to a key.
    sinks: `[N]`, for each head the score of a key without a value, which takes
      its share of the softmax (https://arxiv.org/abs/2309.17453).

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
  probs = cpu_bfloat16.softmax(scores, q.dtype)
  if sinks is not None:
    # exp(l) / (exp(l) + exp(sink)) for the log-sum-exp l of the keys.
    sinks = sinks.astype(jnp.float32).reshape(kv_heads, -1, 1, 1)
    log_sum = jax.nn.logsumexp(scores, axis=-1, keepdims=True)
    probs *= jax.nn.sigmoid(log_sum - sinks)
  out = jnp.einsum("bkrts,bksh->bkrth", probs.astype(v.dtype), v)
  return out.transpose(0, 3, 1, 2, 4).reshape(b, t, n, h)


def segment_mask(
  segment_ids: jax.Array, window: jax.Array | None = None
) -> jax.Array:
  """Returns the causal mask bool `[B, T, T]` inside segments.

  Padding attends to padding up to itself, so that no softmax is empty; no token
  attends to padding.

  Args:
    segment_ids: int `[B, T]`; 0 is padding.
    window: number of tokens that a query sees, itself included; None: all.
  """
  t = segment_ids.shape[1]
  same = segment_ids[:, :, None] == segment_ids[:, None, :]
  mask = same & jnp.tril(jnp.ones((t, t), bool))
  if window is not None:
    mask &= jnp.arange(t)[:, None] - jnp.arange(t) < window
  return mask
