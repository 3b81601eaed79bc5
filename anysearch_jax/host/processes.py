"""Several processes that run one program on one mesh of all their devices.

All of them compute the same values; the first one writes files and prints.
Every process makes these calls in the same order. A lone process makes them
too, and then they cost nothing.

What is shared are JSON values (keys are strings) and NumPy arrays of numbers
among them. From another process tuples come as lists, and errors as what they
are where they are Python's or this project's own; nothing that is received can
run anything.
"""

from __future__ import annotations

import functools
import io
import json
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

T = TypeVar("T")

_PIECE = 1 << 22  # Most bytes of each process in one exchange.
# Stands for an array, by its number; no name of anything that is shared.
_ARRAY = "\0array"
# Packages whose errors are raised again as what they are.
_KNOWN = ("builtins", "anysearch_jax", "retrieval")


def first() -> bool:
  """Whether this process is the one that writes files and prints."""
  return jax.process_index() == 0


def share(make: Callable[[], T]) -> list[T]:
  """What `make` gives in each process, known to all.

  Args:
    make: called once in each; what it gives can be shared, see the module.

  Raises:
    Exception: what `make` raised in the first process where it did; all raise
      it, so that none waits for one that has left.
  """
  if jax.process_count() == 1:
    return [make()]
  error = None
  try:
    mine = _encoded(make())
  except Exception as raised:  # Raised again below, here as elsewhere.
    error = raised
    mine = _encoded(None, error)
  outcomes = [_decoded(content) for content in _gather(mine)]
  for process, (_, told) in enumerate(outcomes):
    if told is not None:
      raised = error or _error(**told)
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


def _encoded(value: Any, error: Exception | None = None) -> bytes:
  """A value, or what is told of an error: JSON, then the arrays of it.

  Raises:
    TypeError: a value that cannot be shared.
  """
  arrays: list[np.ndarray] = []

  def aside(x: Any) -> dict[str, int]:
    if not isinstance(x, np.ndarray) or x.dtype.kind not in "biuf":
      raise TypeError(
        f"Found {type(x).__name__}, expected JSON values and NumPy arrays of "
        "numbers; nothing else is shared between processes."
      )
    arrays.append(x)
    return {_ARRAY: len(arrays) - 1}

  told = None if error is None else _told(error)
  text = json.dumps([value, told], default=aside).encode()
  file = io.BytesIO()
  for array in (np.frombuffer(text, np.uint8), *arrays):
    np.save(file, array, allow_pickle=False)
  return file.getvalue()


def _decoded(content: bytes) -> tuple[Any, dict[str, Any] | None]:
  """The value, and what is told of an error; see `_encoded`."""
  file, found = io.BytesIO(content), []
  while file.tell() < len(content):
    found.append(np.load(file, allow_pickle=False))
  text, *arrays = found
  value, told = json.loads(
    text.tobytes(),
    object_hook=lambda x: arrays[x[_ARRAY]] if x.keys() == {_ARRAY} else x,
  )
  return value, told


def _told(error: Exception) -> dict[str, Any]:
  """An error as values: its classes by name, its arguments where plain."""
  # Those of its constructor: `args` has no file name.
  arguments = error.__reduce__()[1]
  plain = all(x is None or isinstance(x, str | int | float) for x in arguments)
  classes = type(error).__mro__
  return {
    "classes": [
      [c.__module__, c.__qualname__]
      for c in classes[: classes.index(Exception)]
    ],
    "arguments": list(arguments) if plain else None,
    "text": str(error),
  }


def _error(
  classes: list[list[str]], arguments: list[Any] | None, text: str
) -> Exception:
  """The error that was told of, or what it is a kind of, with its words."""
  said = f"{classes[0][1] if classes else 'Exception'}: {text}"
  for i, (module, name) in enumerate(classes):
    # Nothing is imported for it: this process runs the same program.
    found = getattr(sys.modules.get(module), name, None)
    known = module.partition(".")[0] in _KNOWN and isinstance(found, type)
    if not known or not issubclass(found, Exception):
      continue
    given = [said] if i or arguments is None else arguments
    try:
      return found(*given)
    except Exception:  # Its constructor wants something else.
      continue
  return RuntimeError(said)


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
