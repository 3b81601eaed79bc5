"""Parts of an index: consecutive rows that one of several servers has."""

from __future__ import annotations

import re

import numpy as np

from retrieval.index import search as search_lib
from retrieval.index import vectors as vectors_lib


class PartOfShards(vectors_lib.Shards):
  """Consecutive shards of a folder, numbered from 0, as do their rows.

  Args:
    whole: all shards of the folder.
    first, last: the shards from `first` to `last`, exclusive.
  """

  def __init__(self, whole: vectors_lib.Shards, first: int, last: int):
    start, end = whole.span(first)[0], whole.span(last - 1)[1]
    super().__init__(
      whole.folder,
      count=end - start,
      each=whole.each,
      dim=whole.dim,
      dtype=whole.dtype,
    )
    self._whole, self._first = whole, first

  def rows(self, shard: int) -> vectors_lib.Rows:
    """See `vectors.Shards`."""
    return self._whole.rows(self._first + shard)

  def check(self, shard: int, *, read: bool) -> None:
    """See `vectors.Shards`."""
    self._whole.check(self._first + shard, read=read)


class Shifted:
  """A `search.VectorIndex` over a part, whose rows are numbered in the whole.

  Args:
    index: the index over the part.
    first: number of the part's first row in the whole.
    count: number of rows of the whole.
  """

  def __init__(self, index: search_lib.VectorIndex, first: int, count: int):
    self._index, self._first, self.count = index, first, count
    self.dim, self.type = index.dim, index.type

  def search(self, vectors: np.ndarray, k: int) -> list[search_lib.Hits]:
    """See `search.VectorIndex`."""
    return [
      search_lib.Hits(hits.rows + self._first, hits.scores)
      for hits in self._index.search(vectors, k)
    ]


def parse(text: str) -> tuple[int, int]:
  """Parses `I/N`, the I-th of N parts, from 0.

  Raises:
    ValueError: the text has another form, or I is not in [0, N).
  """
  found = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text)
  part, of = map(int, found.groups()) if found else (0, 0)
  if part >= of:
    raise ValueError(
      f"shard: found {text!r}, expected I/N, such as 0/4 for the first of four."
    )
  return part, of


def span(count: int, part: int, of: int) -> tuple[int, int]:
  """Returns the beginning and the end, exclusive, of the I-th of N parts.

  Raises:
    ValueError: there are fewer items than parts.
  """
  if count < of:
    raise ValueError(
      f"shard: found {of} parts of an index with {count} rows (or files of "
      "vectors); expected at most that many."
    )
  return count * part // of, count * (part + 1) // of
