"""Draws one token from logits, with a key that follows from its address."""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp

from anysearch_jax import config as config_lib


def validate_training(config: config_lib.SamplingConfig) -> None:
  """Raises ValueError for settings that training cannot use.

  With temperature 0, top-p or top-k the recorded log-probabilities are not
  those of the distribution that was sampled.
  """
  if config.temperature <= 0 or config.top_p < 1 or config.top_k:
    raise ValueError(
      f"sampling: found temperature {config.temperature}, top_p "
      f"{config.top_p}, top_k {config.top_k}; training needs temperature > 0, "
      "top_p 1 and top_k 0 (the others are for evaluation)."
    )


def address_key(seed: jax.Array, address: jax.Array) -> jax.Array:
  """Returns the key of an address: `fold_in` of each of its numbers in order.

  Args:
    seed: a PRNG key.
    address: uint32 `[n]`.
  """
  key, _ = jax.lax.scan(
    lambda key, part: (jax.random.fold_in(key, part), None), seed, address
  )
  return key


def sample(
  logits: jax.Array, key: jax.Array, *, config: config_lib.SamplingConfig
) -> tuple[jax.Array, jax.Array]:
  """Draws one token.

  Args:
    logits: float32 `[V]`.
    key: PRNG key, consumed.
    config: how to draw; temperature 0 is greedy, with log-probabilities at
      temperature 1.

  Returns:
    The token, int32, and its log-probability under
    `log_softmax(logits / temperature)`, before top-p and top-k.
  """
  chex.assert_rank(logits, 1)
  logps = jax.nn.log_softmax(logits / (config.temperature or 1.0))
  if config.temperature == 0:
    token = jnp.argmax(logps)
  else:
    token = jax.random.categorical(key, _restrict(logps, config))
  return token.astype(jnp.int32), logps[token]


def _restrict(logps: jax.Array, config: config_lib.SamplingConfig) -> jax.Array:
  """Sets log-probs outside top-k and the top-p nucleus to -inf.

  Top-p (https://arxiv.org/abs/1904.09751) applies to the renormalised top-k. A
  token that ties with the smallest kept one is kept too.
  """
  if config.top_k:
    floor = jax.lax.top_k(logps, config.top_k)[0][-1]
    logps = jnp.where(logps >= floor, logps, -jnp.inf)
  if config.top_p < 1:
    ordered = jnp.sort(logps)[::-1]
    p = jax.nn.softmax(ordered)
    inside = jnp.cumsum(p) - p < config.top_p
    floor = jnp.min(jnp.where(inside, ordered, jnp.inf))
    logps = jnp.where(logps >= floor, logps, -jnp.inf)
  return logps
