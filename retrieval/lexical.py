"""BM25 over passages in memory: a retriever without a service.

The ranking is deterministic: equal scores keep the order of the corpus.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import bm25s
import numpy as np

from anysearch_jax import types
from anysearch_jax.environment import tools
from anysearch_jax.host import listing
from anysearch_jax.retrieval import analysis
from anysearch_jax.retrieval import requests as requests_lib

# bm25s logs a line for every index that it builds.
logging.getLogger("bm25s").setLevel(logging.WARNING)


# Saturation and length normalisation of BM25.
_PARAMETERS = {"k1": 1.5, "b": 0.75}
# A word of the title counts this often, so that a passage about a thing ranks
# above passages that mention it.
_TITLE_WEIGHT = 3
# Number of cached answers; the least recently used one is evicted.
_CACHED_ANSWERS = 65536


class LexicalRetriever(requests_lib.OneByBatch):
  """Answers searches by BM25 over titles and texts, with one index per corpus.

  An index is built when its corpus is first searched; answers are cached.

  Args:
    corpora: maps the name of a corpus to its passages, or is a function of the
      name.
    reads: returns the part of a query that is searched, such as
      `World.searched`.
  """

  def __init__(
    self,
    corpora: Mapping[str, Sequence[types.Passage]]
    | Callable[[str], Sequence[types.Passage]],
    *,
    reads: Callable[[str], str] = str,
  ):
    self._corpora = corpora
    self._reads = reads
    self._index = functools.cache(self._build_index)
    self._cached = functools.lru_cache(_CACHED_ANSWERS)(self._rank)
    self._pages = functools.cache(self._build_pages)

  async def search_many(
    self, requests: Sequence[types.SearchRequest]
  ) -> list[Sequence[types.Passage]]:
    """Answers requests in their order; see `lookup`."""
    return [self._cached(r.query, r.k, r.corpus) for r in requests]

  def lookup(
    self, query: str, k: int, corpus: str = ""
  ) -> tuple[types.Passage, ...]:
    """Returns the best passages for a query.

    Args:
      query: any text; it is matched by its words in lower case.
      k: the most passages, >= 1.
      corpus: name of the corpus.

    Returns:
      At most `k` passages that share a word with the query, best first, with
      their scores.

    Raises:
      ValueError: `k` is less than 1, or the corpus is unknown.
    """
    return self._cached(query, k, corpus)

  def page(self, name: str, corpus: str = "") -> Sequence[types.Passage]:
    """Returns the passages with a title or id as `tools.page_name` reads it.

    They are in corpus order. Raises ValueError for an unknown corpus.
    """
    return self._pages(corpus).get(tools.page_name(name), ())

  def identity(self, corpora: Sequence[str] = ("",)) -> dict[str, Any]:
    """Returns JSON values that identify the answers: settings and corpora.

    `sha256` is the hash of the passages' titles and texts in order.
    """
    digest = hashlib.sha256()
    count = 0
    for corpus in corpora:
      passages = self._passages(corpus)
      count += len(passages)
      for passage in passages:
        for text in (passage.title, passage.text):
          data = text.encode()
          # The length prefix distinguishes "ab" + "c" from "a" + "bc".
          digest.update(len(data).to_bytes(8, "little") + data)
    return {
      "kind": "bm25",
      **_PARAMETERS,
      "title_weight": _TITLE_WEIGHT,
      "corpora": len(corpora),
      "passages": count,
      "sha256": digest.hexdigest(),
    }

  def _rank(self, query: str, k: int, corpus: str) -> tuple[types.Passage, ...]:
    if k < 1:
      raise ValueError(f"Found k={k}; expected 1 or more passages.")
    passages, index = self._index(corpus)
    if index is None:
      return ()
    words = analysis.words(self._reads(query))
    indexed_words = [word for word in words if word in index.vocab_dict]
    if not indexed_words:
      return ()
    rows, scores = _best(index.get_scores(indexed_words), k)
    return tuple(
      dataclasses.replace(passages[row], score=score)
      for row, score in zip(rows.tolist(), scores.tolist(), strict=True)
    )

  def _build_index(
    self, corpus: str
  ) -> tuple[Sequence[types.Passage], bm25s.BM25 | None]:
    """Returns the passages and their index; None if no passage has a word."""
    passages = self._passages(corpus)
    texts = [
      analysis.words(p.title) * _TITLE_WEIGHT + analysis.words(p.text)
      for p in passages
    ]
    if not any(texts):
      return passages, None
    index = bm25s.BM25(**_PARAMETERS, method="lucene", backend="numpy")
    index.index(texts, show_progress=False)
    return passages, index

  def _build_pages(self, corpus: str) -> dict[str, list[types.Passage]]:
    """Returns the passages of a corpus by title and by id."""
    pages: dict[str, list[types.Passage]] = {}
    for passage in self._passages(corpus):
      for name in {*map(tools.page_name, (passage.title, passage.id))}:
        pages.setdefault(name, []).append(passage)
    return pages

  def _passages(self, corpus: str) -> Sequence[types.Passage]:
    if callable(self._corpora):
      return self._corpora(corpus)
    if corpus not in self._corpora:
      names = listing.first_names([*map(repr, sorted(self._corpora))]) or "none"
      raise ValueError(f"Found no corpus {corpus!r}; there are: {names}.")
    return self._corpora[corpus]


def _best(scores: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
  """Returns the best k rows with a score above 0, and their float32 scores.

  Equal scores keep the order of rows, so that a run repeats to the byte.
  """
  if k < len(scores):
    # Keep all rows with the k-th score, so that the sort below breaks ties.
    kth_score = np.partition(scores, -k)[-k]
    rows = np.flatnonzero(scores >= max(kth_score, np.finfo(np.float32).tiny))
  else:
    rows = np.flatnonzero(scores > 0)
  rows = rows[np.argsort(-scores[rows], kind="stable")[:k]]
  return rows, scores[rows].astype(np.float32)
