"""Draws one token from logits, with a key derived from its address.

A draw depends on the run's seed, the episode's address, the turn and the index
of the token, and on nothing else: not on the lane, the call or other rows. So a
run repeats, whatever the timing.
"""

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

  Attributes:
    temperature: float32; 0 is greedy.
    top_p: float32; 1 is off.
    top_k: int32; 0 is off.
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
  forced: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
  """Draws one token.

  Args:
    logits: float32 `[V]`.
    key: PRNG key, consumed.
    settings: scalars; temperature 0 is greedy, with log-probabilities at
      temperature 1.
    restricted: whether top-p and top-k apply. They need the sorted vocabulary,
      so a program in which no row restricts leaves them out.
    forced: int, the token to return instead of a draw; negative: draw one.

  Returns:
    The token, int32, and its log-probability under
    `log_softmax(logits / temperature)`, before top-p and top-k.
  """
  chex.assert_rank(logits, 1)
  is_random = settings.temperature > 0
  logps = jax.nn.log_softmax(
    logits / jnp.where(is_random, settings.temperature, 1.0)
  )
  allowed = _restrict(logps, settings) if restricted else logps
  # `jax.random.categorical` is the argmax of logits and Gumbel noise, too.
  # Without the noise, the same argmax is the greedy token.
  noise = jax.random.gumbel(key, logits.shape)
  token = _argmax(jnp.where(is_random, noise, 0.0) + allowed)
  if forced is not None:
    token = jnp.where(forced >= 0, forced, token)
  return token, logps[token]


def _argmax(x: jax.Array) -> jax.Array:
  """Returns the index of the largest number of `[V]`, int32; ties: the first.

  On CPUs, XLA computes `argmax` one number after the other. It vectorises the
  maximum, and the minimum of the indices that have it.
  """

  def two_passes(x: jax.Array) -> jax.Array:
    indices = jnp.arange(len(x), dtype=jnp.int32)
    return jnp.min(jnp.where(x >= jnp.max(x), indices, len(x) - 1))

  return jax.lax.platform_dependent(
    x, cpu=two_passes, default=lambda x: jnp.argmax(x).astype(jnp.int32)
  )


def _restrict(logps: jax.Array, settings: Settings[jax.Array]) -> jax.Array:
  """Sets log-probs outside top-k and the top-p nucleus to -inf.

  Top-p (https://arxiv.org/abs/1904.09751) applies to the renormalised top-k. A
  token that ties with the smallest kept one is kept too.
  """
  top_p = settings.top_p
  top_k = settings.top_k
  descending = jnp.sort(logps)[::-1]
  floor = jnp.where(top_k > 0, descending[top_k - 1], -jnp.inf)
  p = jax.nn.softmax(jnp.where(descending >= floor, descending, -jnp.inf))
  # A token is in the nucleus if the tokens before it have less than top_p.
  in_nucleus = (jnp.cumsum(p) - p < top_p) & (descending >= floor)
  nucleus_floor = jnp.min(jnp.where(in_nucleus, descending, jnp.inf))
  floor = jnp.where(top_p < 1, nucleus_floor, floor)
  return jnp.where(logps >= floor, logps, -jnp.inf)
