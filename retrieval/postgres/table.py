"""Fills a table of PostgreSQL with the passages of a corpus.

    NAME           row, id, title, text, words (tsvector, GIN), length, and
                   fields (jsonb) if there are any
    NAME_words     each word: in how many passages, and how heavy at most
    NAME_vectors   row, dense (vector of pgvector), if an encoder made vectors

The comment of NAME says what it was built from. Rows come by COPY, each
transaction a part of the corpus, so a build that was killed resumes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

import pgvector.psycopg
import psycopg
from psycopg import sql

from anysearch_jax import types
from retrieval import analysis, passages
from retrieval import built as built_lib
from retrieval import filters as filters_lib
from retrieval.index import search as search_lib
from retrieval.postgres import server as server_lib
from retrieval.postgres import words as words_lib

# Of the tables; others are refused.
SCHEMA = 1
VECTORS = ("flat", "hnsw")
# Passages of a transaction.
_BATCH = 2048
# Making an index of a large table takes hours.
_SECONDS = 86400.0
# A row of PostgreSQL fits into a page of 8 kB, pgvector's HNSW has a limit too.
_WIDEST = 1900
_NAME = re.compile(r"[a-z_][a-z0-9_]{0,47}")


def build(
  server: server_lib.Server,
  table: str,
  corpus: passages.Corpus,
  *,
  encoder: search_lib.Encoder | None = None,
  k1: float = 0.9,
  b: float = 0.4,
  language: str = analysis.DEFAULT,
  vectors: str = "flat",
  fields: Sequence[str] = (),
  on_rows: Callable[[int, int], None] = lambda done, of: None,
) -> dict[str, Any]:
  """Fills a table, or resumes filling it.

  Args:
    server: the database.
    table: name of the table; created if missing.
    corpus: the passages; row i has the primary key i.
    encoder: encoder of passages; None: BM25 only.
    k1, b: saturation and length normalisation of BM25.
    language: language of the passages, one of `analysis.LANGUAGES`.
    vectors: `flat`, exact search, or `hnsw`, pgvector's graph.
    fields: other fields of the corpus's rows, for filters.
    on_rows: called with the rows filled in so far and all rows.

  Returns:
    The identity that the table stores.

  Raises:
    ValueError: a setting is invalid, the table was built from other values, or
      the database cannot have it.
    types.RetrievalError: the server cannot be reached.
  """
  _check(table, vectors, encoder)
  identity = {"schema": SCHEMA} | built_lib.description(
    corpus,
    encoder=encoder,
    k1=k1,
    b=b,
    language=language,
    vectors=vectors,
    fields=fields,
  )
  analyze = analysis.shared(language)
  try:
    done = server.run(lambda c: _begin(c, table, identity), _SECONDS)
    on_rows(done, len(corpus))
    for start in range(done, len(corpus), _BATCH):
      stop = min(start + _BATCH, len(corpus))
      some = [corpus[row] for row in range(start, stop)]
      terms = [analyze(passage.contents) for passage in some]
      rows: list[tuple[Any, ...]] = [
        (row, p.id, p.title, p.text, words_lib.vector(words), len(words))
        for row, p, words in zip(range(start, stop), some, terms, strict=True)
      ]
      if fields:
        rows = [
          (*row, json.dumps(filters_lib.of_row(corpus, row[0], fields)))
          for row in rows
        ]
      dense: Any = ()
      if encoder is not None:
        dense = encoder.passages([passage.contents for passage in some])
      server.run(lambda c: _copy(c, table, rows, dense), _SECONDS)  # noqa: B023
      on_rows(stop, len(corpus))
    server.run(lambda c: _finish(c, table, identity), _SECONDS)
  except psycopg.Error as error:
    raise ValueError(f"table {table}: {server.said(error)}") from None
  return identity


def described(
  connection: server_lib.Connection, table: str
) -> tuple[dict[str, Any], words_lib.Table]:
  """Returns the identity of a finished table, and how its words are weighed.

  Raises:
    ValueError: the table is missing, unfinished, or of another program, or the
      name is invalid.
  """
  _check_name(table)
  comment = _comment(connection, table)
  if comment is None:
    raise ValueError(
      f"table {table}: found no such table in database "
      f"{connection.info.dbname}; build it with launch.build_postgres."
    )
  built = comment["built"]
  if "average" not in comment:
    raise ValueError(
      f"table {table}: found a table that is not finished; run "
      "launch.build_postgres again to finish it."
    )
  count = built["corpus"]["passages"]
  return built, words_lib.Table(
    table, count, comment["average"], built["k1"], built["b"]
  )


def _check_name(table: str) -> None:
  # PostgreSQL would find other spellings of a name too, and then not its words.
  if not _NAME.fullmatch(table):
    raise ValueError(
      f"table: found {table!r}, expected a name of small letters, digits and "
      "_, at most 48 of them."
    )


def _check(
  table: str, vectors: str, encoder: search_lib.Encoder | None
) -> None:
  _check_name(table)
  if vectors not in VECTORS:
    raise ValueError(
      f"vectors: found {vectors!r}, expected one of {', '.join(VECTORS)}."
    )
  if encoder is not None and encoder.dim > _WIDEST:
    raise ValueError(
      f"encoder: found vectors of {encoder.dim} numbers, expected at most "
      f"{_WIDEST}, which fit into a page of PostgreSQL."
    )


def _comment(
  connection: server_lib.Connection, table: str
) -> dict[str, Any] | None:
  """Returns what `build` noted with a table; None without the table.

  Raises:
    ValueError: another program, or another version of this one, made it.
  """
  (found,) = connection.execute(
    "SELECT to_regclass(%s)::oid", [table]
  ).fetchone() or (None,)
  if found is None:
    return None
  (text,) = connection.execute(
    "SELECT obj_description(%s::oid, 'pg_class')", [found]
  ).fetchone() or (None,)
  try:
    values = json.loads(text or "")
    if values["built"]["schema"] == SCHEMA:
      return values
  except (ValueError, KeyError, TypeError):
    pass
  raise ValueError(
    f"table {table}: found a table that launch.build_postgres of this version "
    "did not make; name another one by --table, or drop it."
  )


def _note(
  connection: server_lib.Connection, table: str, values: dict[str, Any]
) -> None:
  text = json.dumps(values, sort_keys=True)
  connection.execute(
    sql.SQL("COMMENT ON TABLE {} IS {}").format(
      sql.Identifier(table), sql.Literal(text)
    )
  )


def _begin(
  connection: server_lib.Connection, table: str, identity: dict[str, Any]
) -> int:
  """Creates the tables unless they exist; returns how many rows they have."""
  (encoding,) = connection.execute("SHOW server_encoding").fetchone() or ("",)
  if encoding != "UTF8":
    raise ValueError(
      f"database {connection.info.dbname}: found the encoding {encoding}, "
      "expected UTF8, which has every character."
    )
  name = sql.Identifier(table)
  comment = _comment(connection, table)
  if comment is not None:
    if comment["built"] != identity:
      raise ValueError(
        f"table {table}: found one that was built from {comment['built']}, "
        f"expected {identity}; name another table, or drop this one."
      )
    count = sql.SQL("SELECT coalesce(max(row) + 1, 0) FROM {}").format(name)
    (rows,) = connection.execute(count).fetchone() or (0,)
    return rows
  with connection.transaction():
    connection.execute(
      sql.SQL(
        "CREATE TABLE {} (row int PRIMARY KEY, id text NOT NULL, "
        "title text NOT NULL, text text NOT NULL, words tsvector NOT NULL, "
        "length int NOT NULL{})"
      ).format(
        name, sql.SQL(", fields jsonb NOT NULL" * ("fields" in identity))
      )
    )
    if "encoder" in identity:
      _create_vectors(connection, table, identity["encoder"]["dim"])
    _note(connection, table, {"built": identity})
  return 0


def _create_vectors(
  connection: server_lib.Connection, table: str, dim: int
) -> None:
  try:
    connection.execute("CREATE EXTENSION IF NOT EXISTS vector")
  except psycopg.Error as error:
    raise ValueError(
      f"database {connection.info.dbname}: vectors need pgvector, which the "
      f"server refuses ({error.diag.message_primary}); install it there and "
      "let an administrator run CREATE EXTENSION vector, or build without an "
      "encoder."
    ) from None
  # PLAIN: a scan would fetch each vector from elsewhere otherwise.
  connection.execute(
    sql.SQL(
      "CREATE TABLE {name} (row int PRIMARY KEY, dense vector({dim}) "
      "NOT NULL); ALTER TABLE {name} ALTER COLUMN dense SET STORAGE PLAIN"
    ).format(name=sql.Identifier(f"{table}_vectors"), dim=sql.Literal(dim))
  )


def _copy(
  connection: server_lib.Connection,
  table: str,
  rows: Sequence[tuple[Any, ...]],
  dense: Sequence[Any],
) -> None:
  """Appends rows, and their vectors if there are any.

  Raises:
    ValueError: another process fills the table.
  """
  name, vectors = sql.Identifier(table), sql.Identifier(f"{table}_vectors")
  with connection.transaction():
    connection.execute(
      sql.SQL("LOCK TABLE {} IN SHARE ROW EXCLUSIVE MODE").format(name)
    )
    last = sql.SQL("SELECT coalesce(max(row), -1) FROM {}").format(name)
    (found,) = connection.execute(last).fetchone() or (-1,)
    if found == rows[-1][0]:
      return  # Written before the connection was lost.
    if found != rows[0][0] - 1:
      raise ValueError(
        f"table {table}: found row {found} as the last one, expected "
        f"{rows[0][0] - 1}; another process fills the table. Run one of them."
      )
    if len(dense):
      pgvector.psycopg.register_vector(connection)
    with connection.cursor() as cursor:
      with cursor.copy(sql.SQL("COPY {} FROM STDIN").format(name)) as copy:
        for row in rows:
          # PostgreSQL has no text with a zero in it.
          copy.write_row([_storable(value) for value in row])
      if len(dense):
        into = sql.SQL("COPY {} FROM STDIN").format(vectors)
        with cursor.copy(into) as copy:
          for row, values in zip(rows, dense, strict=True):
            copy.write_row((row[0], values))


def _storable(value: Any) -> Any:
  return value.replace("\0", "\ufffd") if isinstance(value, str) else value


def _finish(
  connection: server_lib.Connection, table: str, identity: dict[str, Any]
) -> None:
  """Makes the indexes, each in a transaction, and says that it is finished."""
  comment = _comment(connection, table)
  if comment is None or "average" in comment:
    return
  name = sql.Identifier(table)
  mean = sql.SQL("SELECT avg(length)::float8, count(*) FROM {}").format(name)
  average, count = connection.execute(mean).fetchone() or (0, 0)
  if not average:
    raise ValueError("Found no word in any passage, expected at least one.")
  if count != identity["corpus"]["passages"]:
    raise ValueError(
      f"table {table}: found {count} rows, expected "
      f"{identity['corpus']['passages']}; drop it and build it again."
    )
  connection.execute(
    sql.SQL("CREATE INDEX IF NOT EXISTS {} ON {} USING gin (words)").format(
      sql.Identifier(f"{table}_gin"), name
    )
  )
  if identity.get("vectors") == "hnsw":
    connection.execute(
      sql.SQL(
        "CREATE INDEX IF NOT EXISTS {} ON {} USING hnsw (dense vector_ip_ops)"
      ).format(
        sql.Identifier(f"{table}_hnsw"), sql.Identifier(f"{table}_vectors")
      )
    )
  weighed = words_lib.Table(
    table, count, average, identity["k1"], identity["b"]
  )
  for each in (table, f"{table}_vectors")[: 1 + ("encoder" in identity)]:
    connection.execute(sql.SQL("ANALYZE {}").format(sql.Identifier(each)))
  with connection.transaction():
    words_lib.count_words(connection, weighed)
    _note(connection, table, {"built": identity, "average": average})


def passages_of(
  connection: server_lib.Connection, table: str, rows: Sequence[int]
) -> dict[int, types.Passage]:
  """Returns the passages of rows, with a score of 0."""
  found = connection.execute(
    sql.SQL("SELECT row, id, title, text FROM {} WHERE row = ANY(%s)").format(
      sql.Identifier(table)
    ),
    [list(rows)],
  )
  return {row: types.Passage(*values) for row, *values in found}
