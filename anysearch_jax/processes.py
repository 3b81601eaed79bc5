"""Several processes that run one program on one mesh of all their devices.

All of them compute the same values; the first one writes files and prints.
Every process makes these calls in the same order. A lone process makes them
too, and then they cost nothing.
"""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable
from typing import TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

T = TypeVar("T")

_PIECE = 1 << 22  # Most bytes of each process in one exchange.


def first() -> bool:
  """Whether this process is the one that writes files and prints."""
  return jax.process_index() == 0


def share(make: Callable[[], T]) -> list[T]:
  """What `make` gives in each process, known to all.

  Args:
    make: called once in each; what it gives can be pickled.

  Raises:
    Exception: what `make` raised in the first process where it did; all raise
      it, so that none waits for one that has left.
  """
  if jax.process_count() == 1:
    return [make()]
  try:
    mine, error = make(), None
  except Exception as raised:  # Raised again below, here as elsewhere.
    mine, error = None, raised
  outcomes = [
    pickle.loads(content) for content in _gather(_pickled(mine, error))
  ]
  for process, (_, raised) in enumerate(outcomes):
    if raised is not None:
      raised = error or raised
      raised.add_note(f"Raised in process {process} of {len(outcomes)}.")
      raise raised
  return [value for value, _ in outcomes]


def by_first(make: Callable[[], T]) -> T:
  """What `make` gives in the first process, known to all; see `share`.

  No process goes on before the first one is done.
  """
  return share(lambda: make() if first() else None)[0]


def together(make: Callable[[], T]) -> T:
  """What `make` gives in this process, once it went well in all of them."""
  made = []
  share(lambda: made.append(make()))
  return made[0]


def whole(x: jax.Array) -> jax.Array:
  """All of an array, on devices of this process."""
  if x.is_fully_addressable:
    return x
  everywhere = jax.sharding.NamedSharding(x.sharding.mesh, jax.P())
  return _copied(everywhere)(x).addressable_data(0)


@functools.cache
def _copied(sharding: jax.sharding.NamedSharding):
  return jax.jit(lambda x: x, out_shardings=sharding)


def _pickled(value: object, error: Exception | None) -> bytes:
  try:
    return pickle.dumps((value, error))
  except Exception:  # Whatever a library put into its error.
    if error is None:
      raise
    return pickle.dumps((None, RuntimeError(repr(error))))


def _gather(content: bytes) -> list[bytes]:
  """Each process's bytes, in pieces of one size: it compiles once a size."""
  gather = multihost_utils.process_allgather
  sizes = gather(np.uint32(len(content))).tolist()
  longest = max(sizes)
  piece = min(_PIECE, 1 << (longest - 1).bit_length())
  padded = np.zeros(-(-longest // piece) * piece, np.uint8)
  padded[: len(content)] = np.frombuffer(content, np.uint8)
  pieces = [gather(part) for part in padded.reshape(-1, piece)]
  rows = np.concatenate(pieces, axis=1)
  return [row[:size].tobytes() for row, size in zip(rows, sizes)]
