"""Vectors of a corpus in shards, and where they come from.

An encoder makes them, or they are read from a FAISS file of exact search, whole
or in parts: Search-R1 publishes those of 21 million passages as `part_aa` and
`part_ab`, to be joined to one `e5_Flat.index` of 64 GB.

    vectors-00007.npy     the rows, float32, bfloat16 (as uint16) or int8
    scales-00007.npy      float32, the factor of each row of int8
    vectors-00007.json    written last: rows, width, and the files' SHA-256

A shard with a JSON file is finished; a resumed builder makes the others again.
"""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from anysearch_jax.host import json_files
from retrieval import passages
from retrieval.index import search

DTYPES = ("float32", "bfloat16", "int8")
_BLOCK = 1 << 22
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


class Rows(NamedTuple):
  """Memory-mapped rows `[n, dim]`, and float32 scales `[n]` of int8 rows."""

  values: np.ndarray
  scales: np.ndarray | None

  def arrays(self) -> list[np.ndarray]:
    """Returns the values and, of int8 rows, the scales."""
    return [self.values] if self.scales is None else [self.values, self.scales]

  def floats(self) -> np.ndarray:
    """Returns the rows as float32 `[n, dim]`."""
    if self.scales is None:
      return np.asarray(self.values, np.float32)
    return self.values.astype(np.float32) * self.scales[:, None]


class Shards:
  """The shards of a folder.

  Args:
    folder: the folder; the first write creates it.
    count: number of rows of all shards.
    each: rows of a shard; the last shard may have fewer.
    dim: width of a vector.
    dtype: one of `DTYPES`.

  Attributes:
    folder: the folder.

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
    if dtype not in DTYPES:
      raise ValueError(
        f"dtype: found {dtype!r}, expected one of {', '.join(DTYPES)}."
      )
    self.folder = pathlib.Path(folder)
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
    self.folder.mkdir(parents=True, exist_ok=True)
    start, end = self.span(shard)
    n, done = end - start, 0
    names = self._names(shard)
    arrays = [
      np.lib.format.open_memmap(
        self.folder / f"{name}.tmp", "w+", dtype=kind, shape=shape
      )
      for name, kind, shape in zip(
        names, self._stored(), ((n, self.dim), (n,)), strict=False
      )
    ]
    for some in vectors:
      if done + len(some) > n or some.shape[1] != self.dim:
        raise ValueError(
          f"Shard {shard} got vectors of shape {some.shape} after {done} rows, "
          f"expected {n} rows of {self.dim} in all."
        )
      here = slice(done, done + len(some))
      if self.dtype == "float32":
        arrays[0][here] = some
      elif self.dtype == "bfloat16":
        arrays[0][here] = some.astype(ml_dtypes.bfloat16).view(np.uint16)
      else:
        arrays[0][here], arrays[1][here] = quantized(some)
      done += len(some)
    if done != n:
      raise ValueError(f"Shard {shard} got {done} rows, expected {n}.")
    for name, array in zip(names, arrays, strict=True):
      array.flush()
      (self.folder / f"{name}.tmp").replace(self.folder / name)
    info = {
      "rows": n,
      "dim": self.dim,
      "dtype": self.dtype,
      "sha256": {name: digest(self.folder / name) for name in names},
    }
    json_files.write(self._info(shard), info)

  def finished(self, shard: int) -> bool:
    """Reads a shard and returns whether it is as it was written."""
    try:
      self.check(shard, read=True)
    except DamagedError:
      return False
    return True

  def written(self, shard: int) -> bool:
    """Returns whether a shard was once finished, without reading it."""
    return self._info(shard).is_file()

  def check(self, shard: int, *, read: bool) -> None:
    """Checks a shard.

    Args:
      shard: number of the shard.
      read: whether to compare the hashes too, which reads every byte.

    Raises:
      DamagedError: a file is missing or differs.
    """
    path, (start, end) = self._info(shard), self.span(shard)
    try:
      info = json.loads(path.read_text())
      sums = dict(info["sha256"])
      found = info["rows"], info["dim"], info["dtype"]
    except (OSError, ValueError, KeyError, TypeError) as error:
      raise DamagedError(
        f"{path}: found no finished shard ({error}); run launch.build_index "
        "again."
      ) from error
    expected = end - start, self.dim, self.dtype
    if found != expected or list(sums) != self._names(shard):
      raise DamagedError(
        f"{path}: found (rows, dimensions, dtype) {found}, expected {expected}."
      )
    for name, sha256 in sums.items():
      file = self.folder / name
      if read and (not file.is_file() or digest(file) != sha256):
        raise DamagedError(
          f"{file}: the bytes differ from those that were written; remove "
          f"{path.name} and run launch.build_index again."
        )
    self.rows(shard)

  def rows(self, shard: int) -> Rows:
    """Returns the memory-mapped rows of a finished shard.

    Raises:
      DamagedError: a file is missing or contains another array.
    """
    start, end = self.span(shard)
    arrays = []
    for name, kind, shape in zip(
      self._names(shard),
      self._stored(),
      ((end - start, self.dim), (end - start,)),
      strict=False,
    ):
      file = self.folder / name
      try:
        array = np.load(file, mmap_mode="r")
      except (OSError, ValueError) as error:
        raise DamagedError(f"{file}: {error}.") from error
      if (array.shape, array.dtype) != (shape, kind):
        raise DamagedError(
          f"{file}: found {array.dtype} {array.shape}, expected {kind} {shape}."
        )
      arrays.append(array)
    if self.dtype == "bfloat16":
      arrays[0] = arrays[0].view(ml_dtypes.bfloat16)
    return Rows(arrays[0], arrays[1] if len(arrays) > 1 else None)

  def _names(self, shard: int) -> list[str]:
    scaled = ["scales"] if self.dtype == "int8" else []
    return [f"{part}-{shard:05d}.npy" for part in ("vectors", *scaled)]

  def _info(self, shard: int) -> pathlib.Path:
    return self.folder / f"vectors-{shard:05d}.json"

  def _stored(self) -> list[np.dtype]:
    kinds = {"float32": ["<f4"], "bfloat16": ["<u2"], "int8": ["|i1", "<f4"]}
    return [np.dtype(kind) for kind in kinds[self.dtype]]


def quantized(vectors: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """Quantizes rows to int8; returns them and their scales, float32 `[n]`."""
  scales = np.abs(vectors).max(axis=1, initial=0.0).astype(np.float32) / 127
  safe = np.where(scales > 0, scales, 1)[:, None]
  return np.rint(vectors / safe).astype(np.int8), scales


def digest(path: str | os.PathLike) -> str:
  """Returns the SHA-256 of a file."""
  found = hashlib.sha256()
  with open(path, "rb") as file:
    while block := file.read(_BLOCK):
      found.update(block)
  return found.hexdigest()


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
      raise DamagedError(
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
      raise DamagedError(
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
              raise DamagedError(f"{part}: it was cut short.")
            at, size = at + len(block), size - len(block)
            yield block
      begin = end


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
  made = encoder.passages([corpus[row].contents for row in rows])
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
