"""Databases of passages: what Milvus and PostgreSQL have in common.

A collection of Milvus or a table of PostgreSQL notes its description: the JSON
values from which it was built. A run checks what it needs of them.
"""

from __future__ import annotations

import abc
import asyncio
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

from anysearch_jax import types
from anysearch_jax.host import redaction
from retrieval import filters as filters_lib
from retrieval import passages
from retrieval import requests as requests_lib
from retrieval.index import search as search_lib

Answer = tuple[types.Passage, ...]
Built = Mapping[str, Any]


class Asked(NamedTuple):
  """A search of one or several queries.

  Attributes:
    texts: queries with a word in them and without lone surrogates.
    vectors: the vector of each, float32; None if words are ranked alone.
    k: the most passages of a query.
    ranking: one of the table's.
    filters: values that fields of the passages may have, see `filters.parse`.
  """

  texts: list[str]
  vectors: list[Any]
  k: int
  ranking: str
  filters: filters_lib.Filters


class Row(NamedTuple):
  """A passage to insert, with other fields of its row and its vector."""

  number: int
  passage: types.Passage
  fields: dict[str, str]
  vector: Any


class Table(abc.ABC):
  """A table or collection, whether it is there or not.

  Attributes:
    kind: the database's, as `retrieval.kind` has it.
    noun: what the database calls it, for messages.
    rankings: by words; `dense`, by vectors; `hybrid`, both fused by reciprocal
      rank.
    errors: what its client raises.
    batch: passages of an insertion.
    in_batches: whether `find` takes several queries.
    basis: what else a description has.
    name: its name.
    key: the database's key, which messages leave out.
  """

  kind: ClassVar[str]
  noun: ClassVar[str]
  rankings: ClassVar[tuple[str, str, str]]
  errors: ClassVar[tuple[type[Exception], ...]]
  batch: ClassVar[int]
  in_batches: ClassVar[bool]
  basis: ClassVar[Mapping[str, Any]]
  name: str
  key: str

  def __str__(self) -> str:
    return f"{self.noun} {self.name}"

  @abc.abstractmethod
  def noted(self) -> dict[str, Any]:
    """Returns the description; {} if the table is missing.

    Raises:
      ValueError: another program made the table.
    """

  @abc.abstractmethod
  def count(self) -> int:
    """Returns the number of passages."""

  @abc.abstractmethod
  def is_finished(self, built: Built) -> bool:
    """Returns whether a table of this description has all that it needs."""

  @abc.abstractmethod
  def create(self, built: Built) -> None:
    """Creates the empty table and notes its description."""

  @abc.abstractmethod
  def insert(self, built: Built, rows: Sequence[Row]) -> None:
    """Inserts rows with what the description says that they have."""

  @abc.abstractmethod
  def finish(self, built: Built) -> None:
    """Makes indexes, when all passages are there."""

  @abc.abstractmethod
  def find(self, built: Built, asked: Asked) -> list[Answer]:
    """Returns the passages of each query, best first; thread-safe."""

  @abc.abstractmethod
  def close(self) -> None: ...

  def options(self) -> dict[str, Any]:
    """Returns what else the answers depend on, as JSON values."""
    return {}

  def described(self) -> dict[str, Any]:
    """Returns the description of a table that is finished, or ValueError."""
    built = self.noted()
    if not built or not self.is_finished(built):
      raise ValueError(
        f"{self}: found no {self.noun} that is finished; build it, or finish "
        f"it, by launch.build_index --kind={self.kind}."
      )
    return built


def said(error: Exception, key: str) -> str:
  """Returns an error's words in one line, without the key."""
  text = getattr(error, "message", "") or str(error) or type(error).__name__
  return redaction.Redactor(key).quote(" ".join(str(text).split()), 300)


def build(
  table: Table,
  corpus: passages.Corpus,
  *,
  encoder: search_lib.Encoder | None = None,
  language: str = "english",
  vectors: str = "flat",
  fields: Sequence[str] = (),
  on_rows: Callable[[int, int], None] = lambda done, of: None,
) -> None:
  """Fills a table, or resumes filling it.

  Args:
    table: created if missing.
    corpus: the passages; row i has the primary key i.
    encoder: encoder of passages; None: words only.
    language: language of the passages: one of `analysis.LANGUAGES` for Milvus,
      a text search configuration of the server for PostgreSQL.
    vectors: how vectors are indexed: `flat` is exact; `hnsw` is a graph, and
      Milvus has others.
    fields: other fields of the corpus's rows, for filters.
    on_rows: called with the rows inserted so far and all rows.

  Raises:
    ValueError: a setting is invalid, the table was built from other values, or
      the database cannot have it.
  """
  filters_lib.check_fields(corpus, fields)
  built: dict[str, Any] = {
    **table.basis,
    "corpus": {"sha256": corpus.sha256, "passages": len(corpus)},
    "language": language,
  }
  if encoder is not None:
    built |= {"encoder": _named(encoder), "vectors": vectors}
  if fields:
    built |= {"fields": sorted(fields)}
  try:
    there = table.noted()
    if not there:
      table.create(built)
    elif there != built:
      raise ValueError(
        f"{table}: found one that was built from {there}, expected {built}; "
        f"name another {table.noun}, or drop this one."
      )
    if (done := table.count()) < len(corpus):
      done -= done % table.batch
    on_rows(done, len(corpus))
    for start in range(done, len(corpus), table.batch):
      rows = range(start, min(start + table.batch, len(corpus)))
      some = [corpus[row] for row in rows]
      kept: list[dict[str, str]] = [{}] * len(rows)
      if fields:
        kept = [filters_lib.of_row(corpus, row, fields) for row in rows]
      encoded: Any = [None] * len(rows)
      if encoder is not None:
        encoded = encoder.passages([passage.contents for passage in some])
      table.insert(built, [*map(Row, rows, some, kept, encoded)])
      on_rows(rows.stop, len(corpus))
    table.finish(built)
  except table.errors as error:
    raise ValueError(
      f"{table}: {said(error, table.key)} Build it again to resume."
    ) from None


def _named(encoder: search_lib.Encoder) -> dict[str, Any]:
  """Returns what identifies an encoder, wherever its folder is."""
  values = {k: v for k, v in encoder.identity().items() if k != "folder"}
  return {"dim": encoder.dim} | values


class DatabaseRetriever(requests_lib.OneByBatch):
  """Searches a finished table on threads; usable from any event loop.

  Args:
    table: a table that `build` finished.
    ranking: one of the table's; "": by words.
    encoder: the encoder that built the table; None for words.
    filters: values that fields of the passages may have, see `filters.parse`.

  Raises:
    ValueError: the table is not finished, the ranking or a field is unknown,
      there are no vectors, or another encoder made them.

  `counters` has the `queries` and the `failures`.
  """

  def __init__(
    self,
    table: Table,
    *,
    ranking: str = "",
    encoder: search_lib.Encoder | None = None,
    filters: filters_lib.Filters | None = None,
  ):
    words = table.rankings[0]
    self._ranking, self._filters = ranking or words, filters or {}
    if self._ranking not in table.rankings:
      raise ValueError(
        f"ranking: found {ranking!r}, expected one of "
        f"{', '.join(table.rankings)}."
      )
    self._table, self._built = table, table.described()
    filters_lib.check(self._filters, self._built, str(table))
    self._encoder = None if self._ranking == words else encoder
    if self._ranking != words:
      expected, given = self._built.get("encoder"), encoder and _named(encoder)
      if expected is None or given != expected:
        raise ValueError(
          f"ranking {ranking}: found the encoder {given}, expected the one of "
          f"{table}, {expected}."
        )
    self.counters: Counter[str] = Counter()

  async def search_many(
    self, requests: Sequence[types.SearchRequest]
  ) -> list[Answer | Exception]:
    """Returns the passages of each request, or its `RetrievalError`.

    A blank query has no passages.

    Raises:
      ValueError: a request is invalid, see `requests.check`.
    """
    requests_lib.check(requests, "")
    # Lone surrogates cannot be sent.
    texts = [r.query.encode(errors="replace").decode() for r in requests]
    vectors: Any = [None] * len(texts)
    if self._encoder is not None:
      vectors = await asyncio.to_thread(self._encoder.queries, texts)
    calls: dict[int, list[int]] = {}
    for i, request in enumerate(requests):
      if request.query.strip():
        call = request.k if self._table.in_batches else i
        calls.setdefault(call, []).append(i)
    found: list[Answer | Exception] = [()] * len(requests)

    async def answer(slots: list[int]) -> None:
      asked = Asked(
        [texts[i] for i in slots],
        [vectors[i] for i in slots],
        requests[slots[0]].k,
        self._ranking,
        self._filters,
      )
      answers = await asyncio.to_thread(self._answers, asked)
      for i, each in zip(slots, answers, strict=True):
        found[i] = each

    await asyncio.gather(*map(answer, calls.values()))
    self.counters["queries"] += len(found)
    self.counters["failures"] += sum(isinstance(x, Exception) for x in found)
    return found

  def _answers(self, asked: Asked) -> Sequence[Answer | Exception]:
    try:
      return self._table.find(self._built, asked)
    except self._table.errors as error:
      failure = (
        f"{self._table.kind}, {self._table}: {said(error, self._table.key)}"
      )
      return [types.RetrievalError(failure)] * len(asked.texts)

  def identity(self) -> dict[str, Any]:
    """Returns JSON values that identify the answers, with their hash."""
    values: dict[str, Any] = {"kind": self._table.kind}
    values |= {"ranking": self._ranking}
    values |= self._table.options() | self._built
    if self._filters:
      values |= {"filter": {k: list(v) for k, v in self._filters.items()}}
    canonical = json.dumps(values, sort_keys=True).encode()
    return values | {"sha256": hashlib.sha256(canonical).hexdigest()}

  def close(self) -> None:
    """Closes the connections."""
    self._table.close()
