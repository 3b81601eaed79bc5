"""Vectors of a corpus in shards, and where they come from.

An encoder makes them, or they are read from a FAISS file of exact search, whole
or in parts: Search-R1 publishes those of 21 million passages as `part_aa` and
`part_ab`, to be joined to one `e5_Flat.index` of 64 GB.

    vectors-00007.npy     the rows, float32 or bfloat16 (as uint16)
    vectors-00007.json    written last: the file's SHA-256

A shard with a JSON file is finished; a resumed builder makes the others again.
"""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from anysearch_jax.config import settings
from anysearch_jax.host import disk, json_files
from anysearch_jax.retrieval import passages
from anysearch_jax.retrieval.index import search

_STORED: dict[str, Any] = {
  "float32": np.dtype("<f4"),
  "bfloat16": np.dtype("<u2"),
}
DTYPES = tuple(_STORED)
# Of a FAISS file: kind, width, rows, two unused numbers, whether trained,
# metric, and how many float32 values follow.
_HEADER = struct.Struct("<4siqqq?iQ")
_INNER_PRODUCT = 0
# Rows that are read, and passages that an encoder sorts by length, at a time.
_ROWS = 4096
# Passages that stand for a corpus, and the least cosine of equal vectors.
_SAMPLE, _SAME = 64, 0.98

# Yields the vectors of rows from the first to the second, exclusive.
Source = Callable[[int, int], Iterator[np.ndarray]]


class DamagedError(ValueError):
  """A file of an index differs from what was written."""


class Shards:
  """The shards of a folder.

  Args:
    folder: the folder; the first write creates it.
    count: number of rows of all shards.
    each: rows of a shard; the last shard may have fewer.
    dim: width of a vector.
    dtype: one of `DTYPES`.

  Raises:
    ValueError: the dtype is unknown.
  """

  def __init__(
    self,
    folder: str | os.PathLike,
    *,
    count: int,
    each: int,
    dim: int,
    dtype: str,
  ):
    settings.require("dtype", dtype, DTYPES)
    self._folder = pathlib.Path(folder)
    self.count, self.each, self.dim, self.dtype = count, each, dim, dtype

  def __len__(self) -> int:
    return -(-self.count // self.each)

  def span(self, shard: int) -> tuple[int, int]:
    """Returns the first row of a shard and the row after its last one."""
    return shard * self.each, min((shard + 1) * self.each, self.count)

  def write(self, shard: int, vectors: Iterator[np.ndarray]) -> None:
    """Writes a shard; it counts as finished only when all of it is written.

    Args:
      shard: number of the shard.
      vectors: all rows of the shard in order, as float32 `[n, dim]` arrays.

    Raises:
      ValueError: the rows are too many, too few, or of another width.
    """
    self._folder.mkdir(parents=True, exist_ok=True)
    (file, info), (start, end) = self._files(shard), self.span(shard)
    n, done = end - start, 0
    beside = file.with_suffix(".tmp")
    stored = np.lib.format.open_memmap(
      beside, "w+", dtype=_STORED[self.dtype], shape=(n, self.dim)
    )
    for some in vectors:
      if done + len(some) > n or some.shape[1] != self.dim:
        raise ValueError(
          f"Shard {shard} got vectors of shape {some.shape} after {done} rows, "
          f"expected {n} rows of {self.dim} in all."
        )
      if self.dtype == "bfloat16":
        some = some.astype(ml_dtypes.bfloat16).view(np.uint16)
      stored[done : done + len(some)] = some
      done += len(some)
    if done != n:
      raise ValueError(f"Shard {shard} got {done} rows, expected {n}.")
    stored.flush()
    beside.replace(file)
    sha256 = disk.fingerprint(file)["sha256"]
    json_files.write(info, {"sha256": {file.name: sha256}})

  def finished(self, shard: int) -> bool:
    """Reads a shard and returns whether it is as it was written."""
    try:
      self.check(shard)
    except DamagedError:
      return False
    return True

  def written(self, shard: int) -> bool:
    """Returns whether a shard was once finished, without reading it."""
    return self._files(shard)[1].is_file()

  def check(self, shard: int) -> None:
    """Reads a shard and compares its hash.

    Raises:
      DamagedError: a file is missing or differs.
    """
    file, path = self._files(shard)
    try:
      sha256 = json.loads(path.read_text())["sha256"][file.name]
    except (OSError, ValueError, KeyError, TypeError) as error:
      raise DamagedError(
        f"{path}: found no finished shard ({error}); run launch.build_index "
        "again."
      ) from error
    self.rows(shard)
    if disk.fingerprint(file)["sha256"] != sha256:
      raise DamagedError(
        f"{file}: the bytes differ from those that were written; remove "
        f"{path.name} and run launch.build_index again."
      )

  def rows(self, shard: int) -> np.ndarray:
    """Returns the memory-mapped rows `[n, dim]` of a finished shard.

    Raises:
      DamagedError: the file is missing or contains another array.
    """
    (file, _), (start, end) = self._files(shard), self.span(shard)
    try:
      array = np.load(file, mmap_mode="r")
    except (OSError, ValueError) as error:
      raise DamagedError(f"{file}: {error}.") from error
    found = array.dtype, array.shape
    expected = _STORED[self.dtype], (end - start, self.dim)
    if found != expected:
      raise DamagedError(f"{file}: found {found}, expected {expected}.")
    is_half = self.dtype == "bfloat16"
    return array.view(ml_dtypes.bfloat16) if is_half else array

  def _files(self, shard: int) -> tuple[pathlib.Path, pathlib.Path]:
    name = f"vectors-{shard:05d}"
    return self._folder / f"{name}.npy", self._folder / f"{name}.json"


class FlatFile:
  """The rows of an IndexFlatIP that FAISS wrote.

  Args:
    parts: the file, or its parts in their order.

  Attributes:
    count: number of rows.
    dim: width of a vector.

  Raises:
    DamagedError: a part is missing, or the bytes are not as many as the header
      announces.
    ValueError: the file is of another kind than IndexFlatIP.
  """

  def __init__(self, parts: Sequence[str | os.PathLike]):
    paths = [pathlib.Path(part).absolute() for part in parts]
    shown = ", ".join(map(str, paths))
    try:
      # Empty files cannot be mapped.
      self._maps = [
        np.memmap(path, np.uint8, "r") for path in paths if path.stat().st_size
      ]
      self._ends = np.cumsum([len(part) for part in self._maps]).tolist()
      kind, dim, count, _, _, _, metric, values = _HEADER.unpack(
        self._bytes(0, _HEADER.size).tobytes()
      )
    except (OSError, struct.error, ValueError) as error:
      raise DamagedError(
        f"{shown}: {error}; expected a FAISS file or its parts."
      ) from error
    if kind != b"IxFI" or metric != _INNER_PRODUCT:
      raise ValueError(
        f"{shown}: found a FAISS file of kind {kind!r} and metric {metric}, "
        "expected IndexFlatIP (b'IxFI', metric 0), first part first. Other "
        "kinds are searched as they are: --kind=faiss_file."
      )
    size = _HEADER.size + 4 * count * dim
    if dim < 1 or count < 0 or values != count * dim or size != self._ends[-1]:
      raise DamagedError(
        f"{shown}: found {self._ends[-1]} bytes for {count} rows of {dim}, "
        f"expected {size}; name all parts in their order, or copy them again."
      )
    self.count, self.dim = count, dim

  def rows(self, start: int, end: int) -> Iterator[np.ndarray]:
    """Yields rows `start` to `end` (exclusive) as float32 `[n, dim]` blocks."""
    for first in range(start, end, _ROWS):
      last = min(first + _ROWS, end)
      at, stop = (_HEADER.size + 4 * row * self.dim for row in (first, last))
      yield self._bytes(at, stop).view("<f4").reshape(-1, self.dim)

  def identity(self) -> dict[str, Any]:
    """Returns the bytes and the SHA-256 of the joined parts."""
    found = hashlib.sha256()
    for part in self._maps:
      found.update(part.data)
    return {"bytes": self._ends[-1], "sha256": found.hexdigest()}

  def _bytes(self, start: int, stop: int) -> np.ndarray:
    """Copies bytes `start` to `stop` (exclusive) of the joined parts."""
    return np.concatenate(
      [
        part[max(0, start - end + len(part)) : max(0, stop - end + len(part))]
        for part, end in zip(self._maps, self._ends, strict=True)
      ]
    )


def encoded(corpus: passages.Corpus, encoder: search.Encoder) -> Source:
  """Returns the vectors that an encoder makes of the passages."""

  def make(start: int, end: int) -> Iterator[np.ndarray]:
    for first in range(start, end, _ROWS):
      last = min(first + _ROWS, end)
      yield encoder.passages(list(corpus.contents(first, last)))

  return make


def read(
  corpus: passages.Corpus, encoder: search.Encoder, file: FlatFile
) -> Source:
  """Returns the vectors of a file, after encoding a sample of its passages.

  Raises:
    ValueError: the file has other rows than the corpus, or the encoder makes
      other vectors of the sampled passages.
  """
  if (file.count, file.dim) != (len(corpus), encoder.dim):
    raise ValueError(
      f"vectors: found {file.count} rows of {file.dim}, expected {len(corpus)} "
      f"of {encoder.dim}, one row a passage, of the encoder's dimension."
    )
  rows = sample(len(corpus))
  texts = (next(corpus.contents(row, row + 1)) for row in rows)
  made = encoder.passages(list(texts))
  for row, vector in zip(rows, made, strict=True):
    (stored,) = next(file.rows(row, row + 1))
    cosine, length = float(stored @ vector), float(np.linalg.norm(stored))
    if not (cosine > _SAME and abs(length - 1) < 1 - _SAME):
      raise ValueError(
        f"vectors: found one of length {length:.3f} for row {row}, whose "
        f"cosine with the encoder's vector of that passage is {cosine:.3f}; "
        f"expected more than {_SAME}. The corpus or the encoder is another "
        "one, or vectors are not of unit length."
      )
  return file.rows


def sample(count: int) -> list[int]:
  """Returns up to 64 rows that are spread over `count` rows."""
  rows = np.linspace(0, count - 1, _SAMPLE).astype(int)
  return np.unique(rows).tolist()
