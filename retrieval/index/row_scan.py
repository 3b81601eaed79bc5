"""Exact search of float32 rows by inner product, on all cores of a CPU.

FAISS finds candidates by a matrix product in float32, whose rounding depends on
the shape of the product. Their inner products are then computed in float64 and
rounded, so a row's score depends on the two vectors only: not on the other
queries of a call, nor on the rows that are searched with it.

Rows are divided among threads, and each calls FAISS with one OpenMP thread.
FAISS alone divides every block of 1,024 rows among its threads and waits for
all of them twice a block, which takes longer than the arithmetic if the threads
sleep while they wait, and takes cores from others if they spin.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from concurrent import futures
from typing import NamedTuple

import numpy as np

from anysearch_jax.retrieval.index import search as search_lib

# OpenMP threads that spin while they wait would take cores from other threads.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
import faiss  # noqa: E402

# By default FAISS uses BLAS only for large batches; batches of up to 166
# queries of 768 numbers would take a slower path.
faiss.cvar.distance_compute_blas_threshold = 1

# Up to this many queries, FAISS's loop over rows is faster than a product.
_LOOPS = 2
# Candidates of a product, in addition to k.
_MORE = 8
# The kernels of BLAS compute this many queries at a time.
_PADDED = 4
# A thread takes this many rows at a time, so that a slow core delays less.
_PIECE = 8192
# Rows that stay in the cache while FAISS loops over them for each query.
_CACHED = 1024
# Candidates that are scored at a time; in float64 they are 3 MB.
_SCORED = 512


class Best(NamedTuple):
  """Rows by query, best first.

  Attributes:
    scores: float32 `[Q, n]`.
    rows: int64 `[Q, n]`; -1 is an empty slot, and they come last.
  """

  scores: np.ndarray
  rows: np.ndarray


class RowScan:
  """A `search.Index` over rows in memory or in memory-mapped files.

  Args:
    arrays: the number of the first row, and consecutive rows as a float32
      `[n, dim]` array, in the order of rows.
    dim: width of a vector.
  """

  type = "IndexFlatIP"

  def __init__(self, arrays: Iterable[tuple[int, np.ndarray]], dim: int):
    self._arrays = [(first, rows) for first, rows in arrays if len(rows)]
    self._firsts = np.array([first for first, _ in self._arrays], np.int64)
    self.count = sum(len(rows) for _, rows in self._arrays)
    self.dim = dim
    cores = max(1, faiss.omp_get_max_threads())
    piece = max(min(_PIECE, -(-self.count // cores)), self.count // (8 * cores))
    self._pieces = [
      (first + start, rows[start : start + piece])
      for first, rows in self._arrays
      for start in range(0, len(rows), piece)
    ]
    self._every = faiss.IDSelectorAll()
    # OpenMP's number of threads is that of the thread that sets it.
    self._threads = futures.ThreadPoolExecutor(
      cores, "scan", faiss.omp_set_num_threads, (1,)
    )

  def search(self, vectors: np.ndarray, k: int) -> list[search_lib.Hits]:
    """Returns the best `k` rows of each query; see `search.Index`.

    The score is the inner product, rounded to float32.
    """
    vectors = search_lib.checked(vectors, self.dim)
    if not self.count or not len(vectors):
      return [search_lib.NO_HITS] * len(vectors)
    best = self._search(vectors, k, _MORE)
    return [
      search_lib.Hits(rows[rows >= 0], scores[rows >= 0])
      for scores, rows in zip(*best, strict=True)
    ]

  def _search(self, vectors: np.ndarray, k: int, more: int) -> Best:
    rough = self._candidates(vectors, k + more)
    k = min(k, self.count)
    # A sum of n products in float32 is off by at most n roundings, relative to
    # the norms: https://doi.org/10.1137/1.9780898718027, section 3.1. At least
    # k rows have a score of `least` or more; a row whose float32 score is lower
    # than that by the error is not among the best.
    error = (self.dim + 4) * 2.0**-24
    moved = error * np.linalg.norm(vectors, axis=1)
    least = rough.scores[:, k - 1] - 2 * moved
    n = rough.rows.shape[1]
    is_whole = rough.scores[:, -1] < least
    is_whole |= (rough.rows[:, -1] < 0) | (n >= self.count)
    out = self._scored(vectors, rough.rows, k)
    if not is_whole.all():
      found = self._search(vectors[~is_whole], k, 8 * more)
      out.scores[~is_whole], out.rows[~is_whole] = found
    return out

  def _candidates(self, vectors: np.ndarray, n: int) -> Best:
    """Returns the best `n` rows by float32, and possibly more."""

    # BLAS takes longer for three queries than for four.
    padded = np.pad(vectors, ((0, -len(vectors) % _PADDED), (0, 0)))
    is_looped = len(vectors) <= _LOOPS

    def scan(piece: tuple[int, np.ndarray]) -> Best:
      first, rows = piece
      if not is_looped:
        found = _found(padded, first, rows, n, None)
        return Best(*(x[: len(vectors)] for x in found))
      block = _CACHED if len(vectors) > 1 else len(rows)
      return _merged(
        [
          _found(vectors, first + i, rows[i : i + block], n, self._every)
          for i in range(0, len(rows), block)
        ],
        n,
      )

    found = list(self._threads.map(scan, self._pieces))
    return _merged(found, min(n, self.count))

  def _scored(self, vectors: np.ndarray, rows: np.ndarray, k: int) -> Best:
    """Returns the best `k` of rows `[Q, n]` by their inner products."""
    some = max(1, _SCORED // rows.shape[1])

    def score(start: int) -> np.ndarray:
      here = slice(start, start + some)
      # One order of sums for every row: a matrix product would have several.
      return np.einsum(
        "qnd,qd->qn",
        self._rows(np.maximum(rows[here], 0)).astype(np.float64),
        vectors[here].astype(np.float64),
      )

    starts = range(0, len(vectors), some)
    found = list(self._threads.map(score, starts))
    scores = np.concatenate(found).astype(np.float32)
    is_valid = (rows >= 0) & np.isfinite(scores)
    scores = np.where(is_valid, scores, np.float32(-np.inf))
    rows = np.where(is_valid, rows, -1)
    order = np.lexsort((rows, -scores))[:, :k]
    return Best(
      np.take_along_axis(scores, order, 1), np.take_along_axis(rows, order, 1)
    )

  def _rows(self, rows: np.ndarray) -> np.ndarray:
    """Returns rows of any shape, as float32 `[..., dim]`."""
    if len(self._arrays) == 1:
      first, values = self._arrays[0]
      return values[rows - first]
    out = np.empty((*rows.shape, self.dim), np.float32)
    places = np.searchsorted(self._firsts, rows, "right") - 1
    for place in np.unique(places):
      here = places == place
      first, values = self._arrays[place]
      out[here] = values[rows[here] - first]
    return out


def _merged(parts: Sequence[Best], n: int) -> Best:
  """Returns the best `n` of several parts' rows; ties are in any order."""
  scores = np.concatenate([part.scores for part in parts], 1)
  rows = np.concatenate([part.rows for part in parts], 1)
  order = np.argsort(-scores, axis=1)[:, :n]
  return Best(
    np.take_along_axis(scores, order, 1), np.take_along_axis(rows, order, 1)
  )


def _found(
  vectors: np.ndarray,
  first: int,
  rows: np.ndarray,
  n: int,
  every: faiss.IDSelector | None,
) -> Best:
  """Returns FAISS's best `n` rows of `[N, dim]`, numbered from `first`.

  `every` selects all rows, which makes FAISS loop over them; without it FAISS
  computes a matrix product.
  """
  n = min(n, len(rows))
  scores = np.empty((len(vectors), n), np.float32)
  found = np.empty((len(vectors), n), np.int64)
  # `faiss.knn` takes no selector.
  faiss.knn_inner_product(
    faiss.swig_ptr(vectors),
    faiss.swig_ptr(rows),
    rows.shape[1],
    len(vectors),
    len(rows),
    n,
    faiss.swig_ptr(scores),
    faiss.swig_ptr(found),
    every,
  )
  found[found >= 0] += first
  return Best(scores, found)
