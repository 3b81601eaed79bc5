"""What all measurements share: clocks, and the bandwidth of memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
_READS = 7
_ROWS = 1024


def timed(call: Callable[[], T]) -> tuple[T, float]:
  """Calls a function; returns its result and the seconds that it took."""
  began = time.perf_counter()
  result = call()
  return result, time.perf_counter() - began


def seconds(call: Callable[[], object]) -> float:
  """Returns the seconds that a call takes."""
  return timed(call)[1]


def bandwidth(size: int) -> float:
  """Returns the bytes per second of a sum that reads `size` bytes once.

  A copy says less: on a CPU each line that it writes is read first.
  """
  import jax
  import jax.numpy as jnp

  # Rows, so that all threads have some.
  x = jnp.zeros((_ROWS, size // 4 // _ROWS), jnp.float32)
  total = jax.jit(lambda x: jnp.sum(x, axis=1))

  def call() -> None:
    jax.block_until_ready(total(x))

  call()
  return x.nbytes / min(seconds(call) for _ in range(_READS))
