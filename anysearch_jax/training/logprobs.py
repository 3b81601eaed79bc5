"""Token log-probabilities without a `[B, T, V]` array."""

from __future__ import annotations

from typing import Any

import chex
import jax
import jax.numpy as jnp

from anysearch_jax.policy import architecture as architecture_lib
from anysearch_jax.policy import transformer


def token_logprobs(
  params: transformer.Params,
  a: architecture_lib.Architecture,
  tokens: jax.Array,
  targets: jax.Array,
  positions: jax.Array,
  segment_ids: jax.Array,
  *,
  temperature: float = 1.0,
  chunk: int = 64,
  dtype: Any = jnp.float32,
  remat: bool = False,
) -> tuple[jax.Array, jax.Array]:
  """Log-probability of each target and entropy of each prediction.

  Both are of `log_softmax(logits / temperature)`, as the engine samples.
  The vocabulary is reached for `chunk` positions of each row at a time, and
  again in the backward pass.

  Args:
    params: the policy's.
    a: its sizes.
    tokens: int `[B, T]`.
    targets: int `[B, T]`, the token after each.
    positions: int `[B, T]`.
    segment_ids: int `[B, T]`, 0 is padding.
    temperature: > 0.
    chunk: positions at a time; lowered to the largest divisor of T below it.
    dtype: compute type of the decoder; log-probs are float32.
    remat: recompute layers in the backward pass.

  Returns:
    logp and entropy (nats), float32 `[B, T]` each.
  """
  chex.assert_equal_shape([tokens, targets, positions, segment_ids])
  b, t = tokens.shape
  hidden = transformer.forward(
    params, a, tokens, positions, segment_ids, dtype=dtype, remat=remat
  )
  chunk = next(c for c in range(min(chunk, t), 0, -1) if t % c == 0)

  @jax.checkpoint
  def of_chunk(hidden, targets):
    logits = transformer.logits(params, hidden) / temperature
    normalizer = jax.nn.logsumexp(logits, axis=-1)
    # A masked sum, not a gather: exact, and it shards over the vocabulary.
    is_target = (
      jax.lax.broadcasted_iota(jnp.int32, logits.shape, 2)
      == (targets[..., None])
    )
    logp = jnp.sum(jnp.where(is_target, logits, 0.0), -1) - normalizer
    p = jnp.exp(logits - normalizer[..., None])
    entropy = normalizer - jnp.sum(p * logits, -1)
    return logp, jax.lax.stop_gradient(entropy)

  if chunk == t:
    return of_chunk(hidden, targets)
  parts = jax.lax.map(
    lambda part: of_chunk(*part),
    (
      hidden.reshape(b, t // chunk, chunk, -1).swapaxes(0, 1),
      targets.reshape(b, t // chunk, chunk).swapaxes(0, 1),
    ),
  )
  logp, entropy = (part.swapaxes(0, 1).reshape(b, t) for part in parts)
  return logp, entropy
