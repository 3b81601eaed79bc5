"""Memory bandwidth, measured by one large copy."""

from __future__ import annotations

import time


def bandwidth(size: int) -> float:
  """Returns the bytes per second read and written by a copy of `size` bytes."""
  import jax
  import jax.numpy as jnp

  x = jnp.zeros(size // 4, jnp.float32)
  copy = jax.jit(lambda x: x + 1)
  jax.block_until_ready(copy(x))
  seconds = []
  for _ in range(7):
    started = time.perf_counter()
    jax.block_until_ready(copy(x))
    seconds.append(time.perf_counter() - started)
  return 2 * x.nbytes / min(seconds)
