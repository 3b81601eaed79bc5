"""Reciprocal rank fusion of several searches of one corpus.

See Cormack, Clarke and Buettcher, https://doi.org/10.1145/1571941.1572114
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

import numpy as np

from retrieval import passages
from retrieval.index import search

# The paper's constant; a first rank counts 1.15 times as much as a tenth one.
_CONSTANT = 60
# Each search is asked for this many rows more than k.
_DEPTH = 100


def fuse(found: Sequence[search.Hits], k: int) -> search.Hits:
  """Returns the k rows with the largest sums of 1 / (60 + rank), ranks from 1.

  Args:
    found: the hits of each search for one query.
    k: number of rows to keep.

  Returns:
    Hits with the sums as scores; equal sums by ascending row.
  """
  rows = np.concatenate([hits.rows for hits in found])
  shares = np.concatenate(
    [1 / (_CONSTANT + 1 + np.arange(len(hits.rows))) for hits in found]
  )
  each, place = np.unique(rows, return_inverse=True)
  sums = np.bincount(place, weights=shares, minlength=len(each))
  order = np.argsort(-sums, kind="stable")[:k]
  return search.Hits(
    each[order].astype(np.int64), sums[order].astype(np.float32)
  )


class FusedSearch(search.SearchIndex):
  """A `search.SearchIndex` that fuses several others.

  Args:
    searches: searches of the same corpus.

  Raises:
    ValueError: the searches are of different corpora.
  """

  def __init__(self, searches: Sequence[search.SearchIndex]):
    corpora = {each.identity["corpus"]["sha256"] for each in searches}
    if len(corpora) != 1:
      raise ValueError(
        f"Found indexes of {len(corpora)} corpora, expected one corpus."
      )
    parts = [each.identity["sha256"] for each in searches]
    sha256 = hashlib.sha256(json.dumps(parts).encode()).hexdigest()
    self._searches = searches
    self._corpus: passages.Corpus = searches[0].corpus
    self.identity = {
      "kind": "fused",
      "corpus": searches[0].identity["corpus"],
      "parts": [each.identity for each in searches],
      "sha256": sha256,
    }

  def hits(self, queries: Sequence[str], k: int) -> list[search.Hits]:
    """Returns the fused hits of all searches; see `fuse`."""
    found = [each.hits(queries, k + _DEPTH) for each in self._searches]
    return [fuse(each, k) for each in zip(*found, strict=True)]
