"""Search in memory-mapped FAISS index files.

`FaissFile` opens any index of inner products. `FaissFlat` is exact and has two
copies of the vectors: float32, for several queries at once by a matrix product,
and float16, for few queries, which reads half the bytes. Both only select
candidates (`row_scan`), and their result is used only if rounding cannot have
excluded a better row.
"""

from __future__ import annotations

import itertools
import os
import pathlib
import struct
from collections.abc import Callable, Iterable

import faiss
import numpy as np

from retrieval.index import row_scan
from retrieval.index import search as search_lib
from retrieval.index import vectors as vectors_lib

# Up to this many queries, the float16 scan is faster.
_FEW = 2
# Candidates of the float16 scan, in addition to k.
_MORE = 61
# Bound of the relative rounding error of a float16 score.
_ROUNDING = 2.0**-10
_FULL, _HALF = "flat.faiss", "half.faiss"


class FaissFile:
  """A `search.VectorIndex` over a FAISS file of any kind.

  Args:
    path: path of the file.
    rows: the row of each id, see `faiss_tuning.rows_of_ids`; None: ids are
      row numbers.

  Attributes:
    index: FAISS's index.

  Raises:
    vectors.DamagedError: FAISS cannot read the file.
    ValueError: the metric of the index is not the inner product.
  """

  def __init__(self, path: str | os.PathLike, rows: np.ndarray | None = None):
    self.index, self._rows = _open(pathlib.Path(path)), rows
    self.count, self.dim = self.index.ntotal, self.index.d
    self.type = type(self.index).__name__

  def search(self, vectors: np.ndarray, k: int) -> list[search_lib.Hits]:
    """See `search.VectorIndex`."""
    scores, ids = self.index.search(_checked(vectors, self.dim), k)
    if self._rows is not None and len(self._rows[0]):
      at = np.searchsorted(self._rows[0], ids)
      ids = np.where(ids >= 0, self._rows[1][at % len(self._rows[0])], -1)
    return _hits(scores, ids)


class FaissFlat:
  """Exact search over the files that `write` made.

  Args:
    folder: the folder of the files.
    part: the first row that is searched, and the row after the last; None: all
      rows.

  Attributes:
    count: number of rows.
    dim: width of a vector.
    type: FAISS's name of the index of float32 vectors.

  Raises:
    vectors.DamagedError: a file is missing, truncated or of another kind.
  """

  type = "IndexFlatIP"

  def __init__(
    self, folder: str | os.PathLike, part: tuple[int, int] | None = None
  ):
    folder = pathlib.Path(folder)
    self._full, self._half = _open(folder / _FULL), _open(folder / _HALF)
    self.count, self.dim = self._full.ntotal, self._full.d
    kinds = faiss.IndexFlat, faiss.IndexScalarQuantizer
    for index, kind in zip((self._full, self._half), kinds, strict=True):
      if not isinstance(index, kind) or index.ntotal != self.count:
        raise vectors_lib.DamagedError(
          f"{folder}: found a {type(index).__name__} of {index.ntotal} rows, "
          f"expected a {kind.__name__} of {self.count}; run "
          "launch.build_index again."
        )
    self._first, end = part or (0, self.count)
    size = self.count * self.dim
    vectors = self._full.get_xb()  # type: ignore[attr-defined]  # IndexFlat's.
    rows = faiss.rev_swig_ptr(vectors, size).reshape(self.count, self.dim)
    self._scan = row_scan.RowScan(
      [(self._first, rows[self._first : end])], self.dim
    )
    pieces = max(1, min(faiss.omp_get_max_threads(), end - self._first))
    cuts = np.linspace(self._first, end, pieces + 1).astype(int).tolist()
    self._selectors = [
      faiss.IDSelectorRange(*ends) for ends in itertools.pairwise(cuts)
    ]

  def search(self, vectors: np.ndarray, k: int) -> list[search_lib.Hits]:
    """See `search.VectorIndex`."""
    vectors = _checked(vectors, self.dim)
    if len(vectors) > _FEW:
      return self._scan.search(vectors, k).hits()
    if not len(vectors) or not self._scan.count:
      return self._scan.search(vectors, k).hits()
    rough = self._rough(vectors, min(k + _MORE, self._scan.count))
    # By Cauchy-Schwarz no score of a unit vector changes by more than this.
    return self._scan.settled(
      vectors, rough, k, _ROUNDING, lambda some: self._scan.search(some, k)
    ).hits()

  def _rough(self, vectors: np.ndarray, n: int) -> row_scan.Best:
    """Returns the best `n` rows by the float16 copy."""

    def scan(selector: faiss.IDSelector) -> row_scan.Best:
      # FAISS replaces the constructor by one that takes keywords.
      among = faiss.SearchParameters(sel=selector)  # type: ignore[call-arg]
      return row_scan.Best(*self._half.search(vectors, n, params=among))

    return row_scan.merged(self._scan.map(scan, self._selectors), n)


def write(
  folder: str | os.PathLike,
  rows: Callable[[], Iterable[np.ndarray]],
  *,
  count: int,
  dim: int,
) -> None:
  """Writes both files in parts, so memory does not grow with the index.

  Args:
    folder: an existing folder; each file appears complete or not at all.
    rows: returns all unit vectors in order, as float32 `[n, dim]` arrays; it is
      called once for each file.
    count: number of all rows.
    dim: width of a vector.
  """
  half = faiss.IndexScalarQuantizer(
    dim, faiss.ScalarQuantizer.QT_fp16, faiss.METRIC_INNER_PRODUCT
  )
  for name, index, kind, unit in (
    (_FULL, faiss.IndexFlatIP(dim), np.float32, 4),
    (_HALF, half, np.float16, 1),
  ):
    path = pathlib.Path(folder) / name
    beside = path.with_suffix(".tmp")
    with beside.open("wb") as file:
      file.write(_header(index, count, kind=kind, unit=unit))
      for some in rows():
        file.write(np.ascontiguousarray(some, kind).tobytes())
    beside.replace(path)
    found = _open(path)
    if (found.ntotal, found.d) != (count, dim):
      raise ValueError(
        f"{path}: FAISS reads {found.ntotal} rows of {found.d}, expected "
        f"{count} of {dim}; this version of FAISS has another file format."
      )


def _header(index: faiss.Index, count: int, *, kind: type, unit: int) -> bytes:
  """Returns the bytes before the vectors in an index's file.

  FAISS can only write an index that is in memory, so the file is written here.
  It ends with the size of the vectors (in `unit` bytes) and the vectors; the
  number of rows follows the kind and the width at its beginning.
  """
  one = np.zeros((1, index.d), np.float32)
  index.train(one)
  index.add(one)
  row = index.d * np.dtype(kind).itemsize
  data = bytearray(faiss.serialize_index(index))[:-row]
  data[8:16] = struct.pack("<q", count)
  data[-8:] = struct.pack("<Q", count * row // unit)
  return bytes(data)


def _open(path: pathlib.Path) -> faiss.Index:
  try:
    index = faiss.read_index(str(path), faiss.IO_FLAG_MMAP_IFC)
  except RuntimeError as error:
    reason = str(error).splitlines()[0]
    raise vectors_lib.DamagedError(
      f"{path}: FAISS cannot read it ({reason}); expected an index file. Run "
      "launch.build_index again, or copy the file again."
    ) from error
  if index.metric_type != faiss.METRIC_INNER_PRODUCT:
    raise ValueError(
      f"{path}: found an index of FAISS metric {index.metric_type}, expected "
      "inner products (metric 0); build it with METRIC_INNER_PRODUCT over unit "
      "vectors."
    )
  return index


def _checked(vectors: np.ndarray, dim: int) -> np.ndarray:
  vectors = np.ascontiguousarray(vectors, np.float32)
  if vectors.ndim != 2 or vectors.shape[1] != dim:
    raise ValueError(
      f"Found vectors of shape {vectors.shape}, expected [Q, {dim}]."
    )
  return vectors


def _hits(scores: np.ndarray, rows: np.ndarray) -> list[search_lib.Hits]:
  """Converts FAISS's results: no empty slots, equal scores by ascending row."""
  out = []
  for s, r in zip(scores, rows, strict=True):
    kept = np.flatnonzero((r >= 0) & np.isfinite(s))
    order = kept[np.lexsort((r[kept], -s[kept]))]
    out.append(
      search_lib.Hits(r[order].astype(np.int64), s[order].astype(np.float32))
    )
  return out
