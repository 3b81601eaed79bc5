"""Searching a corpus: the protocols of indexes, and what answers queries.

An index knows rows, a corpus their passages, an encoder the vectors of texts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from retrieval import passages
from retrieval.encoder import encoder_settings


class Hits(NamedTuple):
  """The best rows for one query, best first; equal scores by ascending row.

  rows: int64 `[n]`, n <= k, each in [0, rows of the index) and once only.
  scores: float32 `[n]`, finite, not ascending.
  """

  rows: np.ndarray
  scores: np.ndarray


class VectorIndex(Protocol):
  """Exact search by inner product."""

  count: int  # Rows.
  dim: int
  type: str  # The name of such an index in FAISS.

  def search(self, vectors: np.ndarray, k: int) -> list[Hits]:
    """The best rows for each vector, float32 `[Q, dim]`; any thread may ask."""
    ...


class TextIndex(Protocol):
  """Search by the words of a query."""

  count: int
  type: str

  def search(self, queries: Sequence[str], k: int) -> list[Hits]:
    """The best rows for each query; any thread may ask."""
    ...


class Encoder(Protocol):
  """Unit vectors of texts; any thread may ask."""

  dim: int

  def queries(self, texts: Sequence[str]) -> np.ndarray:
    """float32 `[Q, dim]`."""
    ...

  def passages(self, texts: Sequence[str]) -> np.ndarray:
    """float32 `[Q, dim]`."""
    ...

  def identity(self) -> dict[str, Any]:
    """JSON values: weights by their hash, and the settings."""
    ...


class PassageSearch:
  """Answers queries with passages; any thread may ask.

  Args:
    corpus: its row i is the index's row i.
    index: a `VectorIndex` with an encoder, a `TextIndex` without.
    encoder: of queries.
    identity: what answers come from, as JSON values; equal ones answer alike.
    model: the encoder's name.

  Raises:
    ValueError: parts that do not belong together.
  """

  def __init__(
    self,
    corpus: passages.Corpus,
    index: VectorIndex | TextIndex,
    *,
    encoder: Encoder | None = None,
    identity: dict[str, Any],
    model: str = "",
  ):
    if index.count != len(corpus):
      raise ValueError(
        f"The index has {index.count} rows, the corpus {len(corpus)} passages; "
        "expected one row a passage, in the same order."
      )
    if encoder is not None and encoder.dim != index.dim:
      raise ValueError(
        f"The index holds vectors of {index.dim} numbers, the encoder makes "
        f"{encoder.dim}; expected the encoder that the index was built with."
      )
    self._corpus, self._index, self._encoder = corpus, index, encoder
    self.identity = identity
    self._model = model

  def __len__(self) -> int:
    return len(self._corpus)

  @property
  def corpus(self) -> passages.Corpus:
    """What is searched."""
    return self._corpus

  @property
  def described(self) -> dict[str, Any]:
    """What the health check of the AnySearch authors' server says.

    Their launcher starts no run unless the values are those of exact search by
    inner product with `intfloat/e5-base-v2`. Their name of such a backend
    stands for the answers, whether FAISS or JAX computes them.
    """
    exact = self._index.type.startswith("IndexFlat")
    is_canonical = exact and encoder_settings.is_e5_name(self._model)
    return {
      "backend": "e5-faiss-flat" if is_canonical else self.identity["kind"],
      "model": self._model,
      "index_type": self._index.type,
      "index_metric": "bm25" if self._encoder is None else "inner_product",
      "index_size": self._index.count,
      "corpus_size": len(self._corpus),
    }

  def search(
    self, queries: Sequence[str], k: int
  ) -> list[tuple[passages.Passage, ...]]:
    """At most `k` passages for each query, best first, with their scores.

    Args:
      queries: any text.
      k: 1 or more.

    Raises:
      ValueError: another k.
    """
    if k < 1:
      raise ValueError(f"Found k={k}, expected 1 or more passages.")
    if not queries:
      return []
    return [
      tuple(
        passages.Passage(p.id, p.title, p.text, float(score))
        for p, score in zip(
          map(self._corpus.__getitem__, hits.rows.tolist()),
          hits.scores,
          strict=True,
        )
      )
      for hits in self.hits(queries, k)
    ]

  def hits(self, queries: Sequence[str], k: int) -> list[Hits]:
    """The rows of `search`."""
    asked = queries if self._encoder is None else self._encoder.queries(queries)
    return self._index.search(asked, k)
