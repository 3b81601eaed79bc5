"""Reads GGUF files: their metadata, and tensors as plain numbers.

The header is parsed here because the reader of the `gguf` package makes NumPy
views of each string, which takes 40 seconds for a vocabulary, and trusts every
count of a file. The numbers of its blocks are the package's. The format is at
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

import functools
import math
import mmap
import pathlib
import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

import gguf
import ml_dtypes
import numpy as np

from anysearch_jax.host import git_lfs

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
# Types of values in the metadata; the others are numbers.
_STRING = 8
_ARRAY = 9
_NUMBERS = {
  0: "u1",
  1: "i1",
  2: "<u2",
  3: "<i2",
  4: "<u4",
  5: "<i4",
  6: "<f4",
  7: "?",
  10: "<u8",
  11: "<i8",
  12: "<f8",
}
# Limits of what a file may ask for: the largest vocabularies have 600,000
# merges, in a header of 12 MB.
_MAX_HEADER_BYTES = 64 * 2**20
_MAX_ENTRIES = 2**16
_MAX_STRINGS = 2**21
_MAX_AXES = 4
# Bytes of numbers that `blocks` yields at a time.
_BLOCK_BYTES = 16 * 2**20
_Kind = gguf.GGMLQuantizationType
# Types whose numbers a safetensors file holds as they are.
STORED: dict[_Kind, np.dtype] = {
  _Kind.F32: np.dtype("<f4"),
  _Kind.F16: np.dtype("<f2"),
  _Kind.BF16: np.dtype(ml_dtypes.bfloat16),
}
# Blocks of gpt-oss and of Blackwell GPUs, of models that are not read here.
_REFUSED = (_Kind.MXFP4, _Kind.NVFP4)


class Tensor(NamedTuple):
  """Where a tensor is.

  Attributes:
    name: its name in the file.
    kind: the type of its blocks.
    shape: its shape, rows first.
    start: its first byte in the file.
  """

  name: str
  kind: _Kind
  shape: tuple[int, ...]
  start: int

  @property
  def rows(self) -> int:
    """The number of rows; each number of a vector is a row."""
    return self.shape[0]

  @property
  def row_bytes(self) -> int:
    """The bytes of a row in the file."""
    block_size, block_bytes = gguf.GGML_QUANT_SIZES[self.kind]
    return math.prod(self.shape[1:]) // block_size * block_bytes


class GgufFile(NamedTuple):
  """The header of a file.

  Attributes:
    path: the file.
    metadata: values by key; arrays of numbers are NumPy's, those of strings
      lists.
    tensors: all tensors by name.
  """

  path: pathlib.Path
  metadata: dict[str, Any]
  tensors: dict[str, Tensor]


class _Cursor:
  """Reads values one after another from the beginning of a file."""

  def __init__(self, data: mmap.mmap):
    self.data = data
    self.position = 0

  def take(self, size: int) -> bytes:
    """Returns the next `size` bytes."""
    end = self.position + size
    if end > len(self.data):
      raise ValueError("ends in the middle of its header; copy it again")
    if end > _MAX_HEADER_BYTES:
      raise ValueError(
        f"its header has more than {_MAX_HEADER_BYTES >> 20} MiB; expected "
        "a vocabulary and sizes"
      )
    content = self.data[self.position : end]
    self.position = end
    return content

  def number(self, form: str = "<I") -> int:
    """Returns the next number, in a format of `struct`."""
    return struct.unpack(form, self.take(struct.calcsize(form)))[0]

  def text(self) -> str:
    """Returns the next string."""
    return self.take(self.number("<Q")).decode()

  def value(self) -> Any:
    """Returns the next value, whose type comes first."""
    kind = self.number()
    if kind == _STRING:
      return self.text()
    if kind != _ARRAY:
      return self.numbers(kind, 1)[0].item()
    kind = self.number()
    count = self.number("<Q")
    if kind != _STRING:
      return self.numbers(kind, count)
    if count > _MAX_STRINGS:
      raise ValueError(
        f"found an array of {count} strings, expected at most {_MAX_STRINGS}"
      )
    return [self.text() for _ in range(count)]

  def numbers(self, kind: int, count: int) -> np.ndarray:
    """Returns the next `count` numbers of a type."""
    if kind not in _NUMBERS:
      raise ValueError(f"found a value of the unknown type {kind}")
    dtype = np.dtype(_NUMBERS[kind])
    return np.frombuffer(self.take(count * dtype.itemsize), dtype)


def read(path: pathlib.Path) -> GgufFile:
  """Reads the header of a file, and checks that all of its tensors are there.

  Args:
    path: the file.

  Raises:
    ValueError: the file is missing, damaged, in parts, or has a tensor of a
      type that is not supported; the message names it.
  """
  if not path.is_file():
    raise ValueError(f"{path}: no such file; expected a GGUF file.")
  git_lfs.refuse_pointer(path)
  try:
    if path.stat().st_size < len(_MAGIC):
      raise ValueError("is no GGUF file, which begins with 'GGUF'")
    with (
      path.open("rb") as file,
      mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
    ):
      return _read(path, data)
  except ValueError as error:
    raise ValueError(f"{path}: {error}.") from error


def _read(path: pathlib.Path, data: mmap.mmap) -> GgufFile:
  """Parses the header of a file; errors do not name it."""
  cursor = _Cursor(data)
  magic = cursor.take(len(_MAGIC))
  if magic != _MAGIC:
    raise ValueError(
      f"is no GGUF file: begins with {magic!r}, expected {_MAGIC!r}"
    )
  version = cursor.number()
  if version not in _VERSIONS:
    raise ValueError(
      f"found version {version} of GGUF, expected 2 or 3 with the lowest byte "
      "first; convert the model again with llama.cpp"
    )
  tensor_count = cursor.number("<Q")
  key_count = cursor.number("<Q")
  if max(tensor_count, key_count) > _MAX_ENTRIES:
    raise ValueError(
      f"found {tensor_count} tensors and {key_count} keys, expected at most "
      f"{_MAX_ENTRIES} of each"
    )
  metadata: dict[str, Any] = {}
  for _ in range(key_count):
    key = cursor.text()
    if key in metadata:
      raise ValueError(f"has the key {key!r} twice")
    metadata[key] = cursor.value()
  parts = metadata.get("split.count", 0)
  if parts > 1:
    raise ValueError(
      f"is one of {parts} parts of a model, expected the whole; join them by "
      "`llama-gguf-split --merge FIRST_PART OUTPUT`"
    )
  entries = [_tensor(cursor) for _ in range(tensor_count)]
  alignment = metadata.get("general.alignment", gguf.GGUF_DEFAULT_ALIGNMENT)
  if type(alignment) is not int or alignment < 1:
    raise ValueError(f"general.alignment is {alignment!r}, expected 32")
  first_byte = -(-cursor.position // alignment) * alignment
  tensors: dict[str, Tensor] = {}
  for entry in entries:
    tensor = entry._replace(start=first_byte + entry.start)
    if tensor.name in tensors:
      raise ValueError(f"has the tensor {tensor.name!r} twice")
    end = tensor.start + tensor.rows * tensor.row_bytes
    if end > len(data):
      raise ValueError(
        f"tensor {tensor.name!r} ends at byte {end}, but the file has "
        f"{len(data)} bytes; copy it again"
      )
    tensors[tensor.name] = tensor
  return GgufFile(path, metadata, tensors)


def _tensor(cursor: _Cursor) -> Tensor:
  """Reads the entry of a tensor; `start` counts from the first tensor."""
  name = cursor.text()
  axes = cursor.number()
  if not 1 <= axes <= _MAX_AXES:
    raise ValueError(
      f"tensor {name!r} has {axes} axes, expected 1 to {_MAX_AXES}"
    )
  # The fastest axis comes first.
  shape = tuple(cursor.number("<Q") for _ in range(axes))[::-1]
  number = cursor.number()
  start = cursor.number("<Q")
  if number not in set(_Kind):
    raise ValueError(
      f"tensor {name!r} is of type {number}, which the installed package gguf "
      "does not know; type `pip install -U gguf`"
    )
  kind = _Kind(number)
  block_size, block_bytes = gguf.GGML_QUANT_SIZES[kind]
  if kind in _REFUSED or not _is_readable(kind, block_bytes):
    raise ValueError(
      f"tensor {name!r} is of type {kind.name}, which is not supported; "
      "expected numbers or blocks such as Q4_K or Q8_0, so convert the model "
      "again or take its safetensors"
    )
  if math.prod(shape[1:]) % block_size:
    raise ValueError(
      f"tensor {name!r} of type {kind.name} has rows of "
      f"{math.prod(shape[1:])} numbers, expected a multiple of {block_size}"
    )
  return Tensor(name, kind, shape, start)


@functools.cache
def _is_readable(kind: _Kind, block_bytes: int) -> bool:
  """Whether the package can read blocks of a type."""
  try:
    gguf.dequantize(np.zeros((1, block_bytes), np.uint8), kind)
  except NotImplementedError:
    return False
  return True


def blocks(
  file: GgufFile, tensor: Tensor, *, order: np.ndarray | None = None
) -> Iterator[np.ndarray]:
  """Yields the numbers of a tensor, some whole rows at a time.

  Args:
    file: the file.
    tensor: one of its tensors.
    order: the order in which the rows are read; None means the file's.

  Yields:
    Arrays of one axis: of the type in `STORED`, of blocks float32.
  """
  width = max(math.prod(tensor.shape[1:]), 1)
  rows_at_once = max(_BLOCK_BYTES // (4 * width), 1)
  packed = np.memmap(
    file.path,
    np.uint8,
    mode="r",
    offset=tensor.start,
    shape=(tensor.rows, tensor.row_bytes),
  )
  for first in range(0, tensor.rows, rows_at_once):
    rows = slice(first, first + rows_at_once)
    part = packed[rows] if order is None else packed[order[rows]]
    part = np.ascontiguousarray(part).reshape(1, -1)
    if tensor.kind in STORED:
      yield part.view(STORED[tensor.kind]).reshape(-1)
    else:
      yield gguf.dequantize(part, tensor.kind).reshape(-1)
