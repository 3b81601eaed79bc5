"""Exchanges values between the processes that run one program on one mesh.

All processes compute the same values; the first one writes files and prints.
Every process must make these calls in the same order, so only one thread of it
makes them. With a single process they call through and cost nothing; so they do
inside `alone`, where other threads work for this process only.

The values are JSON values (keys are strings) that may contain NumPy arrays of
numbers. Tuples from another process arrive as lists. Errors keep their class if
it is Python's or this project's own. Values are never unpickled, so a received
message cannot run code.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import math
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

T = TypeVar("T")

_PIECE_BYTES = 1 << 22  # Limit on the bytes of each process in one exchange.
# The only key of the JSON object that replaces an array; its value is the
# array's number.
_ARRAY_KEY = "\0array"
_KINDS = "biuf"  # Of NumPy's dtypes, those of numbers.
# Packages whose errors are raised again with their own class.
_KNOWN_PACKAGES = ("builtins", "anysearch_jax")
_thread = threading.local()  # `alone`: whether the thread is inside of it.


@contextlib.contextmanager
def alone() -> Iterator[None]:
  """Lets this thread act inside as if its process were the only one.

  No call of this module is then a collective.
  """
  was_alone = _is_alone()
  _thread.alone = True
  try:
    yield
  finally:
    _thread.alone = was_alone


def _is_alone() -> bool:
  return getattr(_thread, "alone", False)


def count() -> int:
  """Returns the number of processes that act together."""
  return 1 if _is_alone() else jax.process_count()


def index() -> int:
  """Returns the number of this process among those that act together."""
  return 0 if _is_alone() else jax.process_index()


def is_main() -> bool:
  """Returns whether this process is the one that writes files and prints."""
  return index() == 0


def all_gather(make: Callable[[], T]) -> list[T]:
  """Returns the results of `make` in all processes (an all-gather).

  Args:
    make: called once in each process. Its result must be a value that can be
      shared, see the module.

  Raises:
    Exception: `make` failed in some process. A process that failed raises its
      own error, all others that of the first process that failed, so that no
      process waits for one that has left.
  """
  if count() == 1:
    return [make()]
  own_error: Exception | None = None
  try:
    content = encode(make())
  except Exception as error:  # Raised below, after the exchange.
    own_error = error
    content = encode(None, own_error)
  outcomes = [decode(process_content) for process_content in _gather(content)]
  for process, (_, description) in enumerate(outcomes):
    if description is not None:
      failure = own_error or rebuild_error(description)
      failure.add_note(f"Raised in process {process} of {len(outcomes)}.")
      raise failure
  return [value for value, _ in outcomes]


def on_main(make: Callable[[], T]) -> T:
  """Calls `make` in the first process and returns its result in all processes.

  All processes wait until the first one has finished. Only that one sends.

  Args:
    make: its result must be a value that can be shared, see the module.

  Raises:
    Exception: as `all_gather`.
  """
  if count() == 1:
    return make()
  content = b""

  def size() -> int:
    nonlocal content
    if is_main():
      content = encode(make())
    return len(content)

  length = all_gather(size)[0]
  value, _ = decode(_broadcast(content, length))
  return value


def barrier_call(make: Callable[[], T]) -> T:
  """Returns this process's result of `make` once all processes have succeeded.

  The result itself is not shared and may be any object.
  """
  results: list[T] = []
  all_gather(lambda: results.append(make()))
  return results[0]


def to_replicated(x: jax.Array) -> jax.Array:
  """Returns an array that is complete on this process's devices.

  A fully addressable array is returned as it is; any other one is replicated,
  which is a collective.
  """
  if x.is_fully_addressable:
    return x
  assert isinstance(x.sharding, jax.sharding.NamedSharding)
  everywhere = jax.sharding.NamedSharding(x.sharding.mesh, jax.P())
  return _copied(everywhere)(x).addressable_data(0)


@functools.cache
def _copied(sharding: jax.sharding.NamedSharding):
  return jax.jit(lambda x: x, out_shardings=sharding)


def encode(value: Any, error: Exception | None = None) -> bytes:
  """Encodes a value and an error: JSON, then the value's arrays."""
  arrays: list[np.ndarray] = []

  def set_aside(x: Any) -> dict[str, int]:
    if not isinstance(x, np.ndarray) or x.dtype.kind not in _KINDS:
      raise TypeError(
        f"Found {type(x).__name__}, expected JSON values and NumPy arrays of "
        "numbers; nothing else is shared between processes."
      )
    arrays.append(x)
    return {_ARRAY_KEY: len(arrays) - 1}

  description = None if error is None else _describe_error(error)
  text = json.dumps([value, description], default=set_aside).encode()
  file = io.BytesIO()
  for array in (np.frombuffer(text, np.uint8), *arrays):
    np.save(file, array, allow_pickle=False)
  return file.getvalue()


def decode(content: bytes) -> tuple[Any, dict[str, Any] | None]:
  """Returns the value and the description of the error; see `encode`.

  Raises:
    ValueError: the bytes are not a result of `encode`.
  """
  try:
    text, *arrays = _read_arrays(content)
    value, description = json.loads(
      text.tobytes(),
      object_hook=lambda x: (
        arrays[x[_ARRAY_KEY]] if x.keys() == {_ARRAY_KEY} else x
      ),
    )
  # A damaged header can make NumPy raise almost any exception.
  except Exception as error:
    raise ValueError(
      f"Found a message of {len(content)} bytes in another form ({error}), "
      "expected one of this program; start all processes from one version."
    ) from error
  return value, description


def _read_arrays(content: bytes) -> Iterator[np.ndarray]:
  """Yields arrays that `np.save` wrote one after another.

  `np.load` would also open a zip file, whose end it never finds here, and
  allocate what a header claims. An array here is backed by its bytes.
  """
  file = io.BytesIO(content)
  while file.tell() < len(content):
    np.lib.format.read_magic(file)
    shape, is_fortran, dtype = np.lib.format.read_array_header_1_0(file)
    if dtype.kind not in _KINDS or min(shape, default=0) < 0:
      raise ValueError(f"an array of {dtype} {shape}")
    values = np.frombuffer(content, dtype, math.prod(shape), file.tell())
    file.seek(values.nbytes, io.SEEK_CUR)
    yield values.reshape(shape, order="F" if is_fortran else "C").copy("A")


def _describe_error(error: Exception) -> dict[str, Any]:
  """Describes an error: the names of its classes, and its message."""
  classes = type(error).__mro__
  return {
    "classes": [
      [c.__module__, c.__qualname__]
      for c in classes[: classes.index(Exception)]
    ],
    "text": str(error),
  }


def rebuild_error(description: Mapping[str, Any]) -> Exception:
  """Rebuilds a received error, or its nearest known base with its message."""
  classes = description["classes"]
  text = description["text"]
  sentence = f"{classes[0][1] if classes else 'Exception'}: {text}"
  for i, (module, name) in enumerate(classes):
    # Nothing is imported, so a message cannot load code; this process runs the
    # same program and has the module already.
    error_class: object = getattr(sys.modules.get(module), name, None)
    if module.partition(".")[0] not in _KNOWN_PACKAGES:
      continue
    if not (
      isinstance(error_class, type) and issubclass(error_class, Exception)
    ):
      continue
    try:
      return error_class(sentence if i else text)
    except Exception:  # Its constructor takes other arguments.
      continue
  return RuntimeError(sentence)


def _gather(content: bytes) -> list[bytes]:
  """Returns the bytes of every process."""
  gather = multihost_utils.process_allgather
  sizes = gather(np.uint32(len(content))).tolist()
  pieces = [gather(piece) for piece in _pieces(content, max(sizes))]
  rows = np.concatenate(pieces, axis=1)
  return [row[:size].tobytes() for row, size in zip(rows, sizes)]


def _broadcast(content: bytes, length: int) -> bytes:
  """Returns the first process's bytes; those of others do not count."""
  pieces = [
    multihost_utils.broadcast_one_to_all(piece)
    for piece in _pieces(content, length)
  ]
  return np.concatenate(pieces)[:length].tobytes()


def _pieces(content: bytes, length: int) -> np.ndarray:
  """Returns bytes in rows, padded to hold `length` bytes.

  JAX compiles a program for each shape that is exchanged. The size of a piece
  is a power of two up to `_PIECE_BYTES`, so only a few programs are compiled.
  """
  size = min(_PIECE_BYTES, 1 << (length - 1).bit_length())
  padded = np.zeros(-(-length // size) * size, np.uint8)
  padded[: len(content)] = np.frombuffer(content, np.uint8)
  return padded.reshape(-1, size)
