"""Reads the vectors of a FAISS file of exact search, whole or in parts.

Search-R1 publishes the vectors of 21 million passages as `part_aa` and
`part_ab`, to be joined to one `e5_Flat.index` of 64 GB. Here the parts are read
in their order as one file, a block of rows at a time.
"""

from __future__ import annotations

import hashlib
import os
import pathlib
import struct
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from retrieval.index import vectors as vectors_lib

# Kind, width, rows, two unused numbers, whether trained, metric, and how many
# float32 values follow.
_HEADER = struct.Struct("<4siqqq?iQ")
_INNER_PRODUCT = 0
_BLOCK = 1 << 22
# Rows that are read at a time.
_ROWS = 4096


class FlatFile:
  """The rows of an IndexFlatIP that FAISS wrote.

  Args:
    parts: the file, or its parts in their order.

  Attributes:
    count: number of rows.
    dim: width of a vector.

  Raises:
    vectors.DamagedError: a part is missing, or the bytes are not as many as the
      header announces.
    ValueError: the file is of another kind than IndexFlatIP.
  """

  def __init__(self, parts: Sequence[str | os.PathLike]):
    self._parts = [pathlib.Path(part).absolute() for part in parts]
    self._shown = ", ".join(map(str, self._parts))
    try:
      sizes = [part.stat().st_size for part in self._parts]
      self._ends = np.cumsum(sizes).tolist()
      head = b"".join(self._read(0, min(_HEADER.size, self._ends[-1])))
      kind, dim, count, _, _, _, metric, values = _HEADER.unpack(head)
    except (OSError, struct.error, IndexError) as error:
      raise vectors_lib.DamagedError(
        f"{self._shown}: {error}; expected a FAISS file or its parts."
      ) from error
    if kind != b"IxFI" or metric != _INNER_PRODUCT:
      raise ValueError(
        f"{self._shown}: found a FAISS file of kind {kind!r} and metric "
        f"{metric}, expected IndexFlatIP (b'IxFI', metric 0), first part "
        "first. Other kinds are searched as they are: --kind=faiss_file."
      )
    size = _HEADER.size + 4 * count * dim
    if dim < 1 or count < 0 or values != count * dim or size != self._ends[-1]:
      raise vectors_lib.DamagedError(
        f"{self._shown}: found {self._ends[-1]} bytes for {count} rows of "
        f"{dim}, expected {size}; name all parts in their order, or copy them "
        "again."
      )
    self.count, self.dim = count, dim

  def rows(self, start: int, end: int) -> Iterator[np.ndarray]:
    """Yields rows `start` to `end` (exclusive) as float32 `[n, dim]` blocks."""
    for first in range(start, end, _ROWS):
      last = min(first + _ROWS, end)
      at = _HEADER.size + 4 * first * self.dim
      data = b"".join(self._read(at, 4 * (last - first) * self.dim))
      yield np.frombuffer(data, "<f4").reshape(last - first, self.dim)

  def identity(self) -> dict[str, Any]:
    """Returns the bytes and the SHA-256 of the joined parts."""
    digest = hashlib.sha256()
    for block in self._read(0, self._ends[-1]):
      digest.update(block)
    return {"bytes": self._ends[-1], "sha256": digest.hexdigest()}

  def _read(self, at: int, size: int) -> Iterator[bytes]:
    """Yields `size` bytes from `at` in blocks, from one part after another."""
    begin = 0
    for part, end in zip(self._parts, self._ends, strict=True):
      if size and at < end:
        with part.open("rb") as file:
          file.seek(at - begin)
          while size and at < end:
            block = file.read(min(size, end - at, _BLOCK))
            if not block:
              raise vectors_lib.DamagedError(f"{part}: it was cut short.")
            at, size = at + len(block), size - len(block)
            yield block
      begin = end
