"""What all measurements share: clocks, and printed numbers.

Sides that a bench compares are measured in turns, so that other work on the
machine disturbs all of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TypeVar

T = TypeVar("T")
_READS = 7
_ROWS = 1024


def shown(value: object) -> str:
  """Formats a cell: numbers with four digits, the rest as they are."""
  return f"{value:.4g}" if isinstance(value, float) else str(value)


def print_numbers(numbers: Mapping[str, object]) -> None:
  """Prints a line for each number."""
  for name, value in numbers.items():
    print(f"{name:32} {shown(value)}", flush=True)


def timed(call: Callable[[], T]) -> tuple[T, float]:
  """Calls a function; returns its result and the seconds that it took."""
  began = time.perf_counter()
  result = call()
  return result, time.perf_counter() - began


def seconds(call: Callable[[], object]) -> float:
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
