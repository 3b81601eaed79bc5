"""Vectors of a corpus in shards, and where they come from.

An encoder makes them, or they are read from a FAISS file of exact search.

    vectors-00007.npy     the rows, float32 or bfloat16 (as uint16)
    vectors-00007.json    written last: the file's SHA-256

A shard with a JSON file is finished; a resumed builder makes the others again.
"""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np

from anysearch_jax.config import settings
from anysearch_jax.host import disk, git_lfs, json_files
from anysearch_jax.retrieval import passages
from anysearch_jax.retrieval.index import search

_STORED: dict[str, Any] = {
  "float32": np.dtype("<f4"),
  "bfloat16": np.dtype("<u2"),
}
DTYPES = tuple(_STORED)
# Passages that an encoder gets at a time and sorts by length.
_ROWS = 4096
# Passages that represent a corpus when vectors are compared.
_SAMPLE_SIZE = 64

# Yields the vectors of rows from the first to before the second.
Source = Callable[[int, int], Iterator[np.ndarray]]


class DamagedError(ValueError):
  """A file of an index differs from what was written."""


class Shards:
  """The shards of a folder.

  Args:
    folder: the folder; the first write creates it.
    count: number of rows of all shards.
    rows_per_shard: rows of a shard; the last shard may have fewer.
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
    rows_per_shard: int,
    dim: int,
    dtype: str,
  ):
    settings.require("dtype", dtype, DTYPES)
    self._folder = pathlib.Path(folder)
    self.count = count
    self.rows_per_shard = rows_per_shard
    self.dim = dim
    self.dtype = dtype

  def __len__(self) -> int:
    return -(-self.count // self.rows_per_shard)

  def span(self, shard: int) -> tuple[int, int]:
    """Returns the first row of a shard and the row after its last one."""
    start = shard * self.rows_per_shard
    return start, min(start + self.rows_per_shard, self.count)

  def write(self, shard: int, vectors: Iterator[np.ndarray]) -> None:
    """Writes a shard; it counts as finished only when all of it is written.

    Args:
      shard: number of the shard.
      vectors: all rows of the shard in order, as float32 `[n, dim]` arrays.

    Raises:
      ValueError: the rows are too many, too few, or of another width.
    """
    self._folder.mkdir(parents=True, exist_ok=True)
    file, info = self._files(shard)
    start, end = self.span(shard)
    n = end - start
    done = 0
    partial_file = file.with_suffix(".tmp")
    stored = np.lib.format.open_memmap(
      partial_file, "w+", dtype=_STORED[self.dtype], shape=(n, self.dim)
    )
    for block in vectors:
      if done + len(block) > n or block.shape[1] != self.dim:
        raise ValueError(
          f"Shard {shard} got vectors of shape {block.shape} after {done} "
          f"rows, expected {n} rows of {self.dim} in all."
        )
      if self.dtype == "bfloat16":
        block = block.astype(ml_dtypes.bfloat16).view(np.uint16)
      stored[done : done + len(block)] = block
      done += len(block)
    if done != n:
      raise ValueError(f"Shard {shard} got {done} rows, expected {n}.")
    stored.flush()
    partial_file.replace(file)
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
        f"{path}: found no finished shard ({error}); run anysearch build_index "
        "again."
      ) from error
    self.rows(shard)
    if disk.fingerprint(file)["sha256"] != sha256:
      raise DamagedError(
        f"{file}: the bytes differ from those that were written; remove "
        f"{path.name} and run anysearch build_index again."
      )

  def rows(self, shard: int) -> np.ndarray:
    """Returns the memory-mapped rows `[n, dim]` of a finished shard.

    Raises:
      DamagedError: the file is missing or contains another array.
    """
    file, _ = self._files(shard)
    start, end = self.span(shard)
    try:
      array = np.lib.format.open_memmap(file, mode="r")
    except (OSError, ValueError) as error:
      if file.is_file():
        git_lfs.refuse_pointer(file, DamagedError)
      raise DamagedError(f"{file}: {error}.") from error
    actual = (array.dtype, array.shape)
    expected = (_STORED[self.dtype], (end - start, self.dim))
    if actual != expected:
      raise DamagedError(f"{file}: found {actual}, expected {expected}.")
    is_half = self.dtype == "bfloat16"
    return array.view(ml_dtypes.bfloat16) if is_half else array

  def _files(self, shard: int) -> tuple[pathlib.Path, pathlib.Path]:
    name = f"vectors-{shard:05d}"
    return self._folder / f"{name}.npy", self._folder / f"{name}.json"


def from_encoder(corpus: passages.Corpus, encoder: search.Encoder) -> Source:
  """Returns a source of the vectors that an encoder makes of the passages."""

  def vectors(start: int, end: int) -> Iterator[np.ndarray]:
    for first in range(start, end, _ROWS):
      last = min(first + _ROWS, end)
      yield encoder.passages(list(corpus.contents(first, last)))

  return vectors


def sample_rows(count: int) -> list[int]:
  """Returns up to 64 rows, spread evenly over `count` rows."""
  rows = np.linspace(0, count - 1, _SAMPLE_SIZE).astype(int)
  return np.unique(rows).tolist()
