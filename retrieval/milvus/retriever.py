"""Searches a collection of Milvus by words, by vectors, or by both."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pymilvus

from anysearch_jax import types
from retrieval import analysis
from retrieval import built as built_lib
from retrieval import filters as filters_lib
from retrieval import requests as requests_lib
from retrieval.index import search as search_lib
from retrieval.milvus import collection as collection_lib

Answer = tuple[types.Passage, ...]

# The constant of reciprocal rank fusion, and how many rows are fused.
_CONSTANT, _DEPTH = 60, 100


class MilvusRetriever(requests_lib.OneByBatch):
  """Searches a collection on other threads; usable from any event loop.

  Args:
    client: see `collection.connect`.
    collection: a collection that `collection.build` finished.
    ranking: `bm25`; `dense`, by the encoder's vectors; or `hybrid`, both fused
      by reciprocal rank.
    encoder: the encoder that built the collection; None for `bm25`.
    corpus: name of the corpus; a request must name this corpus or none.
    filters: values that fields of the passages may have, see `filters.parse`.
    token: removed from error messages.
    timeout: seconds that a search may take.

  Raises:
    ValueError: the ranking is unknown, the collection is unfinished or has no
      vectors, or the encoder is missing or another one.

  `counters` has the `queries` and the `failures`.
  """

  def __init__(
    self,
    client: pymilvus.MilvusClient,
    collection: str,
    *,
    ranking: str = "bm25",
    encoder: search_lib.Encoder | None = None,
    corpus: str = "",
    filters: filters_lib.Filters | None = None,
    token: str = "",
    timeout: float = 30.0,
  ):
    built_lib.check_ranking(ranking)
    self._client, self._collection = client, collection
    self._ranking, self._encoder = ranking, encoder
    self._corpus, self._token, self._timeout = corpus, token, timeout
    self._built = collection_lib.described(client, collection)
    self._filters = filters or {}
    where = f"collection {collection}"
    filters_lib.check(self._filters, self._built, where)
    self._analyze = analysis.shared(self._built["language"])
    found = collection_lib.rows(client, collection)
    expected = self._built["corpus"]["passages"]
    if found != expected:
      raise ValueError(
        f"{where}: found {found} of {expected} passages; run "
        "launch.build_milvus again to finish it."
      )
    built_lib.check_encoder(ranking, encoder, self._built, where)
    self.counters: Counter[str] = Counter()

  async def search_many(
    self, requests: Sequence[types.SearchRequest]
  ) -> list[Answer | Exception]:
    """Returns answers in the order of the requests, by one search for each `k`.

    A blank query has no passages.

    Returns:
      For each request its passages, or a `RetrievalError`.

    Raises:
      ValueError: a request is invalid, see `requests.check`.
    """
    requests_lib.check(requests, self._corpus)
    self.counters["queries"] += len(requests)
    found: list[Answer | Exception] = [()] * len(requests)
    for k in sorted({request.k for request in requests}):
      slots = [
        i for i, r in enumerate(requests) if r.k == k and r.query.strip()
      ]
      queries = [requests[i].query for i in slots]
      if not queries:
        continue
      try:
        answers = await asyncio.to_thread(self._search, queries, k)
      except pymilvus.MilvusException as error:
        self.counters["failures"] += 1
        failure = types.RetrievalError(
          f"Milvus, collection {self._collection}: {self._said(error)}"
        )
        answers = [failure] * len(queries)
      for i, answer in zip(slots, answers, strict=True):
        found[i] = answer
    return found

  def identity(self) -> dict[str, Any]:
    """Returns JSON values that identify the answers."""
    return built_lib.identity(
      "milvus", self._ranking, self._built, self._filters
    )

  def health(self) -> str:
    """Returns the version of the server; raises RetrievalError without one."""
    try:
      return self._client.get_server_version(timeout=self._timeout)
    except pymilvus.MilvusException as error:
      raise types.RetrievalError(self._said(error)) from None

  def close(self) -> None:
    """Closes the connection."""
    self._client.close()

  def _said(self, error: Exception) -> str:
    return collection_lib.said(error, self._token)

  def _search(self, queries: list[str], k: int) -> list[Answer | Exception]:
    # Lone surrogates cannot be sent.
    texts = [q.encode(errors="replace").decode() for q in queries]
    terms = [" ".join(self._analyze(text)) for text in texts]
    vectors = None
    if self._encoder is not None and self._ranking != "bm25":
      vectors = self._encoder.queries(texts).tolist()
    condition = _condition(self._filters)
    options = {"output_fields": collection_lib.FIELDS, "timeout": self._timeout}
    if self._ranking == "hybrid":
      found = self._client.hybrid_search(
        self._collection,
        [
          pymilvus.AnnSearchRequest(
            data, field, {}, limit=k + _DEPTH, expr=condition or None
          )
          for data, field in ((terms, "words"), (vectors, "dense"))
        ],
        pymilvus.RRFRanker(_CONSTANT),
        limit=k,
        **options,
      )
    else:
      found = self._client.search(
        self._collection,
        data=terms if vectors is None else vectors,
        anns_field="words" if vectors is None else "dense",
        filter=condition,
        limit=k,
        **options,
      )
    return [tuple(map(self._passage, hits)) for hits in found]

  def _passage(self, hit: Any) -> types.Passage:
    values, score = hit["entity"], float(hit["distance"])
    # Milvus Lite returns BM25's scores with a minus.
    score = abs(score) if self._ranking == "bm25" else score
    return types.Passage(values["id"], values["title"], values["text"], score)


def _condition(filters: filters_lib.Filters) -> str:
  """Returns filters in Milvus's language; Milvus Lite has no `in` for JSON."""
  either = (
    " or ".join(
      f"fields[{_quoted(field)}] == {_quoted(value)}" for value in allowed
    )
    for field, allowed in filters.items()
  )
  return " and ".join(f"({each})" for each in either)


def _quoted(text: str) -> str:
  """Returns a literal; Milvus Lite reads no escapes of other characters."""
  return json.dumps(text, ensure_ascii=False)
