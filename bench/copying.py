"""Memory bandwidth, measured by one large copy."""

from __future__ import annotations

from bench import harness

_COPIES = 7


def bandwidth(size: int) -> float:
  """Returns the bytes per second read and written by a copy of `size` bytes."""
  import jax
  import jax.numpy as jnp

  x = jnp.zeros(size // 4, jnp.float32)
  copy = jax.jit(lambda x: x + 1)

  def call() -> None:
    jax.block_until_ready(copy(x))

  call()
  return 2 * x.nbytes / min(harness.seconds(call) for _ in range(_COPIES))
