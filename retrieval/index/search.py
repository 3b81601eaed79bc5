"""Search of a corpus: the protocols of indexes, and `SearchIndex`.

An index finds rows, a corpus has their passages, an encoder makes vectors.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from anysearch_jax import types
from anysearch_jax.retrieval import passages
from anysearch_jax.retrieval import requests as requests_lib
from anysearch_jax.retrieval.encoder import encoder_settings

Answer = tuple[types.Passage, ...]


class Hits(NamedTuple):
  """The best rows for one query, best first; equal scores by ascending row.

  Attributes:
    rows: int64 `[n]`, n <= k, distinct, each in [0, count of the index).
    scores: float32 `[n]`, finite, in descending order.
  """

  rows: np.ndarray
  scores: np.ndarray


NO_HITS = Hits(np.zeros(0, np.int64), np.zeros(0, np.float32))


def as_queries(vectors: np.ndarray, dim: int) -> np.ndarray:
  """Returns queries as float32 `[Q, dim]`; another shape raises ValueError."""
  vectors = np.ascontiguousarray(vectors, np.float32)
  if vectors.ndim != 2 or vectors.shape[1] != dim:
    raise ValueError(
      f"Found vectors of shape {vectors.shape}, expected [Q, {dim}]."
    )
  return vectors


class Index(Protocol):
  """Finds rows by the texts of queries, or by inner products with vectors.

  An index of vectors also has their width as `dim`.
  """

  count: int  # Number of rows.
  type: str  # FAISS's name for such an index.

  def search(self, queries: Any, k: int) -> list[Hits]:
    """Returns the best k rows for each of some texts, or of float32 `[Q, dim]`.

    Thread-safe.
    """
    ...


class Encoder(Protocol):
  """Turns queries and passages into unit vectors; thread-safe."""

  dim: int

  def queries(self, texts: Sequence[str]) -> np.ndarray:
    """Returns the vectors of queries, float32 `[Q, dim]`."""
    ...

  def passages(self, texts: Sequence[str]) -> np.ndarray:
    """Returns the vectors of passages, float32 `[Q, dim]`."""
    ...

  def identity(self) -> dict[str, Any]:
    """Returns JSON values: the hash of the weights, and the settings."""
    ...


@runtime_checkable
class Tokenized(Protocol):
  """An encoder whose tokens can be counted."""

  def tokenizer(self) -> tuple[Any, int]:
    """Returns a tokenizer and the most tokens of a passage after its prefix.

    The tokenizer is a `tokenizers.Tokenizer` without truncation.
    """
    ...


class SearchIndex:
  """Answers queries with passages; thread-safe.

  Args:
    corpus: the passages; row i of the index is row i of the corpus.
    index: finds the rows.
    encoder: makes the vectors by which the index is searched; None if the
      index is searched by texts.
    identity: JSON values; searches with equal values give equal answers.
    model: name of the index's encoder; "" if it has none.
  """

  def __init__(
    self,
    corpus: passages.Corpus,
    index: Any,
    *,
    identity: dict[str, Any],
    encoder: Encoder | None = None,
    model: str = "",
  ):
    self.corpus = corpus
    self._index = index
    self._encoder = encoder
    self.identity = identity
    self._model = model

  def __len__(self) -> int:
    return len(self.corpus)

  @property
  def health_fields(self) -> dict[str, Any]:
    """The fields that the AnySearch authors' server reports as its health.

    Their launcher starts a run only if the values are those of exact search by
    inner product with `intfloat/e5-base-v2`. The backend has the name that they
    use, whether FAISS or JAX computes the answers.
    """
    is_exact = self._index.type.startswith("IndexFlat")
    is_canonical = is_exact and encoder_settings.E5_NAME.search(self._model)
    return {
      "backend": "e5-faiss-flat" if is_canonical else self.identity["kind"],
      "model": self._model,
      "index_type": self._index.type,
      "index_metric": "inner_product" if self._encoder else "bm25",
      "index_size": self._index.count,
      "corpus_size": len(self.corpus),
    }

  def search(
    self, queries: Sequence[str], k: int
  ) -> list[tuple[types.Passage, ...]]:
    """Returns at most `k` passages for each query, best first, with scores.

    Args:
      queries: any texts.
      k: the most passages for each query, at least 1.

    Raises:
      ValueError: `k` is less than 1.
    """
    if k < 1:
      raise ValueError(f"Found k={k}, expected 1 or more passages.")
    if not queries:
      return []
    return [
      types.distinct_passages(
        dataclasses.replace(self.corpus[row], score=score)
        for row, score in zip(*(x.tolist() for x in hits), strict=True)
      )
      for hits in self.hits(queries, k)
    ]

  def hits(self, queries: Sequence[str], k: int) -> list[Hits]:
    """Returns the rows and scores that `search` would return as passages."""
    if self._encoder is None:
      return self._index.search(queries, k)
    return self._index.search(self._encoder.queries(queries), k)


class LocalRetriever(requests_lib.OneByBatch):
  """Searches an index on another thread; usable from any event loop."""

  def __init__(self, searching: SearchIndex):
    self._searching = searching

  async def search_many(
    self, requests: Sequence[types.SearchRequest]
  ) -> list[Answer]:
    """Returns answers in the order of the requests, by one search for each `k`.

    Raises:
      ValueError: a request is invalid, see `requests.check`.
    """
    search = self._searching.search
    return await requests_lib.ask_by_k(
      requests, lambda queries, k: asyncio.to_thread(search, queries, k)
    )

  def identity(self) -> dict:
    """Returns JSON values that identify the answers."""
    return self._searching.identity
