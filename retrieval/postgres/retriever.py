"""Searches a table of PostgreSQL by words, by vectors, or by both."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pgvector.psycopg
import psycopg
from psycopg import sql

from anysearch_jax import types
from retrieval import analysis
from retrieval import built as built_lib
from retrieval import filters as filters_lib
from retrieval import requests as requests_lib
from retrieval.index import fusion
from retrieval.index import search as search_lib
from retrieval.postgres import server as server_lib
from retrieval.postgres import table as table_lib
from retrieval.postgres import words as words_lib

Answer = tuple[types.Passage, ...]

# How many rows more than k are fused.
_DEPTH = 100
# Candidates of a search of a graph: pgvector's default, and its limit.
_EF, _MOST_EF = 40, 1000


class PostgresRetriever(requests_lib.OneByBatch):
  """Searches a table on other threads; usable from any event loop.

  Args:
    server: the database.
    table: a table that `table.build` finished.
    ranking: `bm25`; `dense`, by the encoder's vectors; or `hybrid`, both fused
      by reciprocal rank.
    encoder: the encoder that built the table; None for `bm25`.
    corpus: name of the corpus; a request must name this corpus or none.
    filters: values that fields of the passages may have, see `filters.parse`.
    ef_search: candidates that a search of the graph (`hnsw`) keeps, at least k;
      0: 40, pgvector's default.

  Raises:
    ValueError: a setting is invalid, the table is missing, unfinished or has no
      vectors, or the encoder is missing or another one.
    types.RetrievalError: the server cannot be reached.

  `counters` has the `queries`, the `failures` and the `reconnects`.
  """

  def __init__(
    self,
    server: server_lib.Server,
    table: str,
    *,
    ranking: str = "bm25",
    encoder: search_lib.Encoder | None = None,
    corpus: str = "",
    filters: filters_lib.Filters | None = None,
    ef_search: int = 0,
  ):
    built_lib.check_ranking(ranking)
    if not 0 <= ef_search <= _MOST_EF:
      raise ValueError(
        f"ef_search: found {ef_search}, expected 0 to {_MOST_EF}."
      )
    self._server, self._name = server, table
    self._filters = filters or {}
    self._ranking, self._encoder = ranking, encoder
    self._corpus, self._ef_search = corpus, ef_search or _EF
    try:
      self._built, self._table = server.run(
        lambda connection: table_lib.described(connection, table)
      )
      where = f"table {table}"
      built_lib.check_encoder(ranking, encoder, self._built, where)
      if ef_search and (
        ranking == "bm25" or self._built.get("vectors") != "hnsw"
      ):
        raise ValueError(
          f"ef_search: found {ef_search} with ranking {ranking} of table "
          f"{table}, which searches no graph; expected it with vectors that "
          "were built by --vectors=hnsw, or none."
        )
      filters_lib.check(self._filters, self._built, where)
      self._analyze = analysis.shared(self._built["language"])
      server.prepare_with(self._prepare)
      server.run(lambda connection: None)
    except psycopg.Error as error:
      raise ValueError(f"table {table}: {server.said(error)}") from None
    self.counters: Counter[str] = Counter()

  def _prepare(self, connection: server_lib.Connection) -> None:
    """Sets up a new connection; the table must be the same as before."""
    try:
      built, _ = table_lib.described(connection, self._name)
    except ValueError as error:
      raise types.RetrievalError(str(error)) from None
    if built != self._built:
      raise types.RetrievalError(
        f"table {self._name}: found one that was built from {built}, expected "
        f"{self._built}, which this run has searched so far."
      )
    if self._ranking != "bm25":
      pgvector.psycopg.register_vector(connection)

  async def search_many(
    self, requests: Sequence[types.SearchRequest]
  ) -> list[Answer | Exception]:
    """Returns answers in the order of the requests.

    The queries are shared out among the server's connections. A blank query
    has no passages.

    Returns:
      For each request its passages, or a `RetrievalError`.

    Raises:
      ValueError: a request is invalid, see `requests.check`.
    """
    requests_lib.check(requests, self._corpus)
    self.counters["queries"] += len(requests)
    found: list[Answer | Exception] = [()] * len(requests)
    asked = [i for i, each in enumerate(requests) if each.query.strip()]
    count = min(self._server.connections, len(asked))
    shares = [asked[i::count] for i in range(count)]
    answers = await asyncio.gather(
      *(
        asyncio.to_thread(self._answers, [requests[i] for i in share])
        for share in shares
      )
    )
    for share, some in zip(shares, answers, strict=True):
      for i, answer in zip(share, some, strict=True):
        found[i] = answer
        self.counters["failures"] += isinstance(answer, Exception)
    self.counters["reconnects"] = self._server.counters["reconnects"]
    return found

  def identity(self) -> dict[str, Any]:
    """Returns JSON values that identify the answers."""
    more: dict[str, Any] = {"table": self._name}
    if self._ranking != "bm25" and self._built["vectors"] == "hnsw":
      more |= {"ef_search": self._ef_search}
    return built_lib.identity(
      "postgres", self._ranking, self._built, self._filters, **more
    )

  def health(self) -> str:
    """Returns the version of the server; raises RetrievalError without one."""
    try:
      return self._server.run(
        lambda c: (c.execute("SHOW server_version").fetchone() or ("",))[0]
      )
    except psycopg.Error as error:
      raise types.RetrievalError(self._failed(error)) from None

  def close(self) -> None:
    """Closes the connections that are idle."""
    self._server.close()

  def _failed(self, error: Exception) -> str:
    return f"PostgreSQL, table {self._name}: {self._server.said(error)}"

  def _late(self, done: int, of: int) -> types.RetrievalError:
    return types.RetrievalError(
      f"PostgreSQL, table {self._name}: {self._server.timeout:g} s were over "
      f"after {done} of {of} queries of a connection. Ask fewer at once, or "
      "make the searches faster."
    )

  def _answers(
    self, requests: Sequence[types.SearchRequest]
  ) -> Sequence[Answer | Exception]:
    # PostgreSQL has no text with a zero or a lone surrogate in it.
    texts = [r.query.encode(errors="replace").decode() for r in requests]
    terms = [self._analyze(text.replace("\0", " ")) for text in texts]
    ks = [request.k for request in requests]
    vectors = None
    if self._encoder is not None and self._ranking != "bm25":
      vectors = self._encoder.queries(texts)
    end = time.monotonic() + self._server.timeout
    try:
      return self._server.run(
        lambda c: self._search(c, terms, vectors, ks, end)
      )
    except psycopg.Error as error:
      return [types.RetrievalError(self._failed(error))] * len(requests)
    except types.RetrievalError as error:
      return [error] * len(requests)

  def _search(
    self,
    connection: server_lib.Connection,
    terms: Sequence[Sequence[str]],
    vectors: np.ndarray | None,
    ks: Sequence[int],
    end: float,
  ) -> list[Answer | Exception]:
    """Returns answers; queries that have none at `end` fail alone."""
    words = {}
    if self._ranking != "dense":
      every = [term for each in terms for term in each]
      words = words_lib.known(connection, self._table, every)
    hits: list[search_lib.Hits | Exception] = []
    for i, k in enumerate(ks):
      depth = k + _DEPTH * (self._ranking == "hybrid")
      if time.monotonic() >= end:
        hits.append(self._late(i, len(ks)))
        continue
      try:
        server_lib.limit(connection, end)
        ranked = []
        if self._ranking != "dense":
          ranked.append(
            words_lib.rank(
              connection, self._table, terms[i], depth, words, self._filters
            )
          )
        if vectors is not None:
          ranked.append(self._nearest(connection, vectors[i], depth))
      except psycopg.errors.QueryCanceled as error:
        # Only this query is too slow.
        hits.append(types.RetrievalError(self._failed(error)))
        continue
      hits.append(fusion.fuse(ranked, k) if len(ranked) > 1 else ranked[0])
    rows = {
      row
      for each in hits
      if not isinstance(each, Exception)
      for row in each.rows.tolist()
    }
    # Of the queries that were in time; the client hangs up some seconds later.
    server_lib.limit(connection, end, least=1.0)
    there = table_lib.passages_of(connection, self._name, sorted(rows))
    return [
      each if isinstance(each, Exception) else _passages(each, there)
      for each in hits
    ]

  def _nearest(
    self, connection: server_lib.Connection, vector: np.ndarray, k: int
  ) -> search_lib.Hits:
    """Returns the rows with the largest inner products."""
    if self._built["vectors"] == "hnsw":
      connection.execute(
        "SELECT set_config('hnsw.ef_search', %s, false)",
        [str(min(max(self._ef_search, k), _MOST_EF))],
      )
      if self._filters:
        # Otherwise a graph finds `ef_search` rows, and filters leave fewer.
        connection.execute("SET hnsw.iterative_scan = strict_order")
    rows: sql.Composable = sql.Identifier(f"{self._name}_vectors")
    if self._filters:
      rows = sql.SQL("{} JOIN {} USING (row)").format(
        rows, sql.Identifier(self._name)
      )
    condition, values = words_lib.where(self._filters)
    # The inner query has the only order that pgvector's index knows.
    found = connection.execute(
      sql.SQL(
        "SELECT row, score FROM (SELECT row, -(dense <#> %(vector)s) AS score "
        "FROM {rows} WHERE {where} ORDER BY dense <#> %(vector)s LIMIT %(k)s) "
        "AS nearest ORDER BY score DESC, row"
      ).format(rows=rows, where=condition),
      values | {"vector": vector, "k": k},
    ).fetchall()
    return search_lib.Hits(
      np.asarray([row for row, _ in found], np.int64),
      np.asarray([score for _, score in found], np.float32),
    )


def _passages(hits: search_lib.Hits, there: dict[int, types.Passage]) -> Answer:
  return tuple(
    types.Passage(p.id, p.title, p.text, float(score))
    for p, score in zip(
      map(there.__getitem__, hits.rows.tolist()), hits.scores, strict=True
    )
  )
