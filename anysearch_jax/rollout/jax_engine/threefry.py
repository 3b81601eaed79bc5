"""The draws of `jax.random`, to the bit, at the speed that a CPU allows.

JAX compiles Threefry for CPUs as a loop over its rounds, of several small
kernels each, so that programs stay short. In a decode step of a small policy
these loops cost as much as a layer. Here the rounds are unrolled into one
vectorised kernel; other platforms compute what `jax.random` has for them.

Threefry-2x32 with 20 rounds: https://doi.org/10.1145/2063384.2063405.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = np.uint32(0x1BD11BDA)
_TINY = np.finfo(np.float32).tiny
# The bits of 1.0: with 23 random bits of mantissa they are a number in [1, 2).
_ONE = np.uint32(0x3F800000)


def fold_in(key: jax.Array, data: jax.Array) -> jax.Array:
  """Returns `jax.random.fold_in(key, data)`.

  Args:
    key: a PRNG key.
    data: uint32 or int32 scalar.
  """

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
