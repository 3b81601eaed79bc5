"""Search in a memory-mapped FAISS file of any kind that someone else built.

FAISS's own defaults read one list of an inverted file, and 16 candidates of a
graph, which finds little; `DEFAULTS` are larger. Ids of the index are row
numbers.
"""

from __future__ import annotations

import os
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import faiss
import numpy as np

from anysearch_jax.host import git_lfs
from anysearch_jax.retrieval.index import search as search_lib
from anysearch_jax.retrieval.index import vectors as vectors_lib

# The number of lists or candidates that a search reads by default.
DEFAULTS = {"nprobe": 64, "efSearch": 256}
# A row must be among this many hits of its own vector.
_HITS = 10
# A stored vector is as expected up to this relative distance, a cosine of .98.
_LARGEST_DISTANCE = 0.2
# An index is as expected if at least this share of a sample of its rows is.
LEAST_AGREEMENT = 0.75
# FAISS's own default number of candidates in a graph.
_LEAST_CANDIDATES = 16
# Rows that are read at a time.
_ROWS = 4096


class FaissFile:
  """A `search.Index` over a FAISS file of any kind.

  Args:
    path: path of the file.

  Attributes:
    index: FAISS's index.

  Raises:
    vectors.DamagedError: FAISS cannot read the file.
    ValueError: the metric of the index is not the inner product.
  """

  def __init__(self, path: str | os.PathLike):
    path = pathlib.Path(path)
    try:
      self.index: Any = faiss.read_index(str(path), faiss.IO_FLAG_MMAP_IFC)
    except RuntimeError as error:
      if path.is_file():
        git_lfs.refuse_pointer(path, vectors_lib.DamagedError)
      reason = str(error).splitlines()[0]
      raise vectors_lib.DamagedError(
        f"{path}: FAISS cannot read it ({reason}); expected an index file. Run "
        "anysearch build_index again, or copy the file again."
      ) from error
    if self.index.metric_type != faiss.METRIC_INNER_PRODUCT:
      raise ValueError(
        f"{path}: found an index of FAISS metric {self.index.metric_type}, "
        "expected inner products (metric 0); build it with "
        "METRIC_INNER_PRODUCT over unit vectors."
      )
    self.count = self.index.ntotal
    self.dim = self.index.d
    self.type = type(self.index).__name__

  def search(self, vectors: np.ndarray, k: int) -> list[search_lib.Hits]:
    """See `search.Index`."""
    hits = []
    vectors = search_lib.as_queries(vectors, self.dim)
    for scores, rows in zip(*self.index.search(vectors, k), strict=True):
      # FAISS leaves slots empty, and orders equal scores arbitrarily.
      filled = np.flatnonzero((rows >= 0) & np.isfinite(scores))
      order = filled[np.lexsort((rows[filled], -scores[filled]))]
      hits.append(search_lib.Hits(rows[order].astype(np.int64), scores[order]))
    return hits

  def stored(self, start: int, end: int) -> Iterator[np.ndarray]:
    """Yields rows of an exact index as float32 `[n, dim]` blocks.

    Args:
      start: the first row.
      end: the row after the last one.
    """
    for first in range(start, end, _ROWS):
      yield self.index.reconstruct_n(first, min(_ROWS, end - first))


def _without_id_map(index: Any) -> Any:
  """Returns the index inside of maps of ids."""
  while isinstance(index := faiss.downcast_index(index), faiss.IndexIDMap):
    index = index.index
  return index


def _parameters(index: Any) -> set[str]:
  space = faiss.ParameterSpace()
  space.initialize(index)
  ranges = space.parameter_ranges
  return {ranges.at(i).name for i in range(ranges.size())}


def set_search_depth(index: Any, value: int) -> dict[str, Any]:
  """Sets the number of lists or candidates that a search reads.

  Args:
    index: a FAISS index of any kind.
    value: lists (`nprobe`) or candidates (`efSearch`); 0 means `DEFAULTS`.

  Returns:
    JSON values: the `parameter` and its `value`; {} if `value` is 0 and the
    index has no such parameter.

  Raises:
    ValueError: the index has no such parameter.
  """
  index = _without_id_map(index)
  names = _parameters(index)
  name = next((name for name in DEFAULTS if name in names), "")
  if not name and not value:
    return {}
  if not name:
    raise ValueError(
      f"nprobe, ef_search: found {value} for a {type(index).__name__}, "
      "expected an index with inverted lists or a graph."
    )
  value = value or DEFAULTS[name]
  space = faiss.ParameterSpace()
  space.set_index_parameter(index, name, value)
  if "quantizer_efSearch" in names:
    # The graph that finds the lists.
    candidates = max(_LEAST_CANDIDATES, 2 * value)
    space.set_index_parameter(index, "quantizer_efSearch", candidates)
  return {"parameter": name, "value": value}


def agreement(index: Any, rows: Sequence[int], vectors: np.ndarray) -> float:
  """Returns the share of rows that store the expected vectors.

  An expected vector is encoded and decoded as the index does it (by its
  quantizer, if there is one) and compared with the stored vector. An index that
  cannot return its vectors is searched instead: a row counts if it is among the
  first 10 hits of its expected vector.

  Args:
    index: an index whose ids are row numbers.
    rows: distinct rows.
    vectors: the expected vector of each row, float32 `[rows, dim]`.
  """
  code = _without_id_map(index)
  if hasattr(code, "storage"):  # Of a graph.
    code = faiss.downcast_index(code.storage)
  try:
    stored = _stored(index, rows)
    expected = code.sa_decode(code.sa_encode(vectors))
  except (RuntimeError, IndexError):
    hits = index.search(vectors, _HITS)[1]
    return float(np.mean((hits == np.asarray(rows)[:, None]).any(1)))
  distances = np.linalg.norm(stored - expected, axis=1)
  return float(
    np.mean(distances < _LARGEST_DISTANCE * np.linalg.norm(expected, axis=1))
  )


def _stored(index: Any, rows: Sequence[int]) -> np.ndarray:
  """Returns the vectors of rows; raises if the index cannot return them."""
  index = faiss.downcast_index(index)
  if isinstance(index, faiss.IndexIDMap):
    ids = faiss.vector_to_array(index.id_map)
    positions = [int(np.flatnonzero(ids == row)[0]) for row in rows]
    return _stored(index.index, positions)
  lists: Any = faiss.try_extract_index_ivf(index)
  if lists is not None:
    # FAISS 1.15 crashes here.
    if "FastScan" in type(faiss.downcast_index(lists)).__name__:
      raise RuntimeError("The codes of FastScan cannot be read back.")
    lists.make_direct_map()
  return np.stack([index.reconstruct(row) for row in rows])
