"""Draws one token from logits, with a key that follows from its address.

The draws are those of `jax.random`, to the bit, at the speed that a CPU allows:
JAX compiles Threefry for CPUs as a loop over its rounds, of several small
kernels each, so that programs stay short. In a decode step of a small policy
these loops cost as much as a layer. Here the rounds are unrolled into one
vectorised kernel; other platforms compute what `jax.random` has for them.

Threefry-2x32 with 20 rounds: https://doi.org/10.1145/2063384.2063405.
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

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = np.uint32(0x1BD11BDA)
_TINY = np.finfo(np.float32).tiny
# The bits of 1.0: with 23 random bits of mantissa they are a number in [1, 2).
_ONE = np.uint32(0x3F800000)


def address_key(seed: jax.Array, address: jax.Array) -> jax.Array:
  """Returns the key of an address: `fold_in` of each of its numbers in order.

  `seed` is a PRNG key, `address` uint32 `[n]`.
  """
  return functools.reduce(fold_in, address, seed)


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
  noise = gumbel(key, len(logits))
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


def fold_in(key: jax.Array, data: jax.Array) -> jax.Array:
  """Returns `jax.random.fold_in(key, data)` of a uint32 or int32 scalar."""

  def unrolled(key: jax.Array, data: jax.Array) -> jax.Array:
    words = _hash(jax.random.key_data(key), jnp.uint32(0), data)
    return jax.random.wrap_key_data(jnp.stack(words))

  return _by_platform(unrolled, jax.random.fold_in, key, jnp.uint32(data))


def gumbel(key: jax.Array, size: int) -> jax.Array:
  """Returns `jax.random.gumbel(key, (size,))`, float32."""

  def unrolled(key: jax.Array) -> jax.Array:
    counts = jnp.arange(size, dtype=jnp.uint32)
    high, low = _hash(jax.random.key_data(key), jnp.uint32(0), counts)
    bits = ((high ^ low) >> np.uint32(9)) | _ONE
    uniform = jax.lax.bitcast_convert_type(bits, jnp.float32) - 1
    # As `jax.random.uniform` maps [0, 1) to [tiny, 1).
    uniform = uniform * (np.float32(1) - _TINY) + _TINY
    return -jnp.log(-jnp.log(jnp.maximum(_TINY, uniform)))

  def library(key: jax.Array) -> jax.Array:
    return jax.random.gumbel(key, (size,), jnp.float32)

  return _by_platform(unrolled, library, key)


def _by_platform(unrolled, library, key: jax.Array, *rest: jax.Array):
  """Applies `unrolled` on a CPU, `library` elsewhere and to other PRNGs."""
  if jax.random.key_impl(key) != "threefry2x32":
    return library(key, *rest)
  return jax.lax.platform_dependent(key, *rest, cpu=unrolled, default=library)


def _hash(
  key: jax.Array, x0: jax.Array, x1: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Hashes counters `x0`, `x1` (uint32) with a key of two words."""
  words = key[0], key[1], key[0] ^ key[1] ^ _PARITY
  x0, x1 = x0 + words[0], x1 + words[1]
  for i in range(5):
    for r in _ROTATIONS[i % 2]:
      x0 += x1
      x1 = x0 ^ ((x1 << np.uint32(r)) | (x1 >> np.uint32(32 - r)))
    x0 += words[(i + 1) % 3]
    x1 += words[(i + 2) % 3] + np.uint32(i + 1)
  return x0, x1
