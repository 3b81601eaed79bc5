"""Draws one token from logits, with a key that follows from its address."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Generic, NamedTuple, TypeVar

import chex
import jax
import jax.numpy as jnp
import numpy as np

from anysearch_jax import config as config_lib

# NumPy arrays on the host, JAX arrays on the devices, abstract ones in a plan.
A = TypeVar("A", np.ndarray, jax.Array, jax.ShapeDtypeStruct)


def address_key(seed: jax.Array, address: jax.Array) -> jax.Array:
  """Returns the key of an address: `fold_in` of each of its numbers in order.

  `seed` is a PRNG key, `address` uint32 `[n]`.
  """
  return functools.reduce(jax.random.fold_in, address, seed)


class Settings(NamedTuple, Generic[A]):
  """How rows are drawn, as in `config.SamplingConfig`; each `[R]`.

  temperature: float32; 0 is greedy. top_p: float32. top_k: int32.
  """

  temperature: A
  top_p: A
  top_k: A


def settings(rows: Sequence[config_lib.SamplingConfig]) -> Settings[np.ndarray]:
  """Returns the settings of some rows as arrays."""
  return Settings(
    np.array([row.temperature for row in rows], np.float32),
    np.array([row.top_p for row in rows], np.float32),
    np.array([row.top_k for row in rows], np.int32),
  )


def restricts(config: config_lib.SamplingConfig) -> bool:
  """Returns whether top-p or top-k is on."""
  return config.top_p < 1 or config.top_k > 0


def sample(
  logits: jax.Array,
  key: jax.Array,
  settings: Settings[jax.Array],
  *,
  restricted: bool,
  given: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
  """Draws one token.

  Args:
    logits: float32 `[V]`.
    key: PRNG key, consumed.
    settings: scalars; temperature 0 is greedy, with log-probabilities at
      temperature 1.
    restricted: whether top-p and top-k apply. They need the sorted vocabulary,
      so a program in which no row restricts leaves them out.
    given: int, the token to return instead of a draw; negative: it is drawn.

  Returns:
    The token, int32, and its log-probability under
    `log_softmax(logits / temperature)`, before top-p and top-k.
  """
  chex.assert_rank(logits, 1)
  drawn = settings.temperature > 0
  logps = jax.nn.log_softmax(
    logits / jnp.where(drawn, settings.temperature, 1.0)
  )
  allowed = _restrict(logps, settings) if restricted else logps
  # The sum that `jax.random.categorical` takes the largest of; greedy rows take
  # the largest without noise.
  noise = jax.random.gumbel(key, logits.shape)
  token = _largest(jnp.where(drawn, noise, 0.0) + allowed)
  if given is not None:
    token = jnp.where(given >= 0, given, token)
  return token, logps[token]


def _largest(x: jax.Array) -> jax.Array:
  """Returns the index of the largest number of `[V]`, int32; ties: the first.

  A CPU computes `argmax` one number after the other. The maximum, and the
  smallest index that has it, are vectorised.
  """

  def two_passes(x: jax.Array) -> jax.Array:
    last = len(x) - 1
    at = jnp.where(x >= jnp.max(x), jnp.arange(len(x), dtype=jnp.int32), last)
    return jnp.min(at)

  return jax.lax.platform_dependent(
    x, cpu=two_passes, default=lambda x: jnp.argmax(x).astype(jnp.int32)
  )


def _restrict(logps: jax.Array, settings: Settings[jax.Array]) -> jax.Array:
  """Sets log-probs outside top-k and the top-p nucleus to -inf.

  Top-p (https://arxiv.org/abs/1904.09751) applies to the renormalised top-k. A
  token that ties with the smallest kept one is kept too.
  """
  _, top_p, top_k = settings
  ordered = jnp.sort(logps)[::-1]
  floor = jnp.where(top_k > 0, ordered[top_k - 1], -jnp.inf)
  p = jax.nn.softmax(jnp.where(ordered >= floor, ordered, -jnp.inf))
  inside = (jnp.cumsum(p) - p < top_p) & (ordered >= floor)
  nucleus = jnp.min(jnp.where(inside, ordered, jnp.inf))
  floor = jnp.where(top_p < 1, nucleus, floor)
  return jnp.where(logps >= floor, logps, -jnp.inf)
