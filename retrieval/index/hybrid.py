"""Search by words and by meaning: two indexes of the same rows, fused."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from anysearch_jax.retrieval import fusion
from anysearch_jax.retrieval.index import search as search_lib

# Rows of each index that are fused.
_CANDIDATES = 100


class HybridIndex:
  """A `search.Index` that is searched by texts.

  Args:
    words: finds rows by texts.
    vectors: finds rows by vectors.
    encoder: makes the vectors of queries.
  """

  type = "Hybrid"

  def __init__(
    self,
    words: search_lib.Index,
    vectors: search_lib.Index,
    encoder: search_lib.Encoder,
  ):
    self._words = words
    self._vectors = vectors
    self._encoder = encoder
    self.count = words.count

  def search(self, queries: Sequence[str], k: int) -> list[search_lib.Hits]:
    """Returns the best rows by the sum of both scores; see `search.Index`."""
    candidates = max(k, _CANDIDATES)
    word_hits = self._words.search(queries, candidates)
    vectors = self._encoder.queries(queries)
    dense_hits = self._vectors.search(vectors, candidates)
    return [
      _fused(words, dense, k)
      for words, dense in zip(word_hits, dense_hits, strict=True)
    ]


def _fused(
  words: search_lib.Hits, dense: search_lib.Hits, k: int
) -> search_lib.Hits:
  rankings = [
    fusion.scaled(dict(zip(hits.rows.tolist(), hits.scores.tolist())))
    for hits in (words, dense)
  ]
  weights = (1 - fusion.DENSE_WEIGHT, fusion.DENSE_WEIGHT)
  sums = fusion.added(rankings, weights)
  return search_lib.Hits(
    np.fromiter(sums.keys(), np.int64, len(sums))[:k],
    np.fromiter(sums.values(), np.float32, len(sums))[:k],
  )
