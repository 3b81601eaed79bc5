"""Exact search of float32 rows by inner product, on a CPU.

FAISS, or NumPy without the extra `train`, finds candidates by a matrix product
in float32, whose rounding depends on the shape of the product. Their inner
products are then computed in float64 and rounded, so a row's score depends on
the two vectors only: not on the other queries of a call, nor on the rows that
are searched with it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

import numpy as np

from anysearch_jax.retrieval.index import search as search_lib

# OpenMP threads that spin while they wait would take cores from other threads.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
try:
  import faiss
except ModuleNotFoundError:
  faiss = None  # type: ignore[assignment]
else:
  # By default FAISS searches few queries without BLAS, one query on one thread.
  faiss.cvar.distance_compute_blas_threshold = 1

# Candidates that a matrix product yields in addition to k.
_EXTRA_CANDIDATES = 8


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

  def search(self, vectors: np.ndarray, k: int) -> list[search_lib.Hits]:
    """Returns the best `k` rows of each query; see `search.Index`.

    The score is the inner product, rounded to float32.
    """
    vectors = search_lib.as_queries(vectors, self.dim)
    if not self.count:
      return [search_lib.NO_HITS] * len(vectors)
    return self._search(vectors, k, k + _EXTRA_CANDIDATES)

  def _search(
    self, vectors: np.ndarray, k: int, candidates: int
  ) -> list[search_lib.Hits]:
    if not len(vectors):
      return []
    candidates = min(candidates, self.count)
    scores, rows = self._candidates(vectors, candidates)
    hits = [
      self._ranked(vector, row_numbers[row_numbers >= 0], k)
      for vector, row_numbers in zip(vectors, rows, strict=True)
    ]
    if candidates == self.count:
      return hits
    # A sum of n products in float32 is off by at most n roundings, relative to
    # the norms: https://doi.org/10.1137/1.9780898718027, section 3.1. If the
    # last candidate is within that error of the k-th, a row beyond them may be
    # among the best, so such queries are searched again with more candidates.
    error = (self.dim + 4) * 2.0**-24 * np.linalg.norm(vectors, axis=1)
    is_near = scores[:, -1] >= scores[:, k - 1] - 2 * error
    undecided = np.flatnonzero(is_near & (rows[:, -1] >= 0))
    decided = self._search(vectors[undecided], k, 8 * candidates)
    for query, better in zip(undecided, decided, strict=True):
      hits[query] = better
    return hits

  def _candidates(
    self, vectors: np.ndarray, count: int
  ) -> tuple[np.ndarray, np.ndarray]:
    """Returns float32 scores and rows `[Q, count]`, -1 where there is none."""
    scores = []
    rows = []
    for first, values in self._arrays:
      piece_scores, positions = _best(vectors, values, min(count, len(values)))
      scores.append(piece_scores)
      rows.append(np.where(positions < 0, -1, positions + first))
    all_scores = np.concatenate(scores, 1)
    order = np.argsort(-all_scores, axis=1)[:, :count]
    return (
      np.take_along_axis(all_scores, order, 1),
      np.take_along_axis(np.concatenate(rows, 1), order, 1),
    )

  def _ranked(
    self, vector: np.ndarray, rows: np.ndarray, k: int
  ) -> search_lib.Hits:
    """Returns the best `k` of some rows by their inner products in float64."""
    if not len(rows):
      return search_lib.NO_HITS
    values = np.empty((len(rows), self.dim), np.float64)
    pieces = np.searchsorted(self._firsts, rows, "right") - 1
    for piece, (first, stored) in enumerate(self._arrays):
      in_piece = pieces == piece
      values[in_piece] = stored[rows[in_piece] - first]
    # One order of sums for every row: a matrix product would have several.
    products = np.einsum("nd,d->n", values, vector.astype(np.float64))
    scores = products.astype(np.float32)
    order = np.lexsort((rows, -scores))[:k]
    return search_lib.Hits(rows[order], scores[order])


def _best(
  vectors: np.ndarray, values: np.ndarray, count: int
) -> tuple[np.ndarray, np.ndarray]:
  """Returns the scores and positions `[Q, count]` of the best values."""
  if faiss is not None:
    return faiss.knn(vectors, values, count, metric=faiss.METRIC_INNER_PRODUCT)
  scores = vectors @ values.T
  positions = np.argpartition(-scores, count - 1, axis=1)[:, :count]
  return np.take_along_axis(scores, positions, 1), positions
