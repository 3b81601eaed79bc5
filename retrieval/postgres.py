"""A table of PostgreSQL as a retriever, over psycopg's pool and pgvector.

The server's own full-text search finds and ranks words: a passage that has any
word of the query counts, in the order of `ts_rank`, which knows nothing of how
rare a word is (BM25 of launch.build_index does). The comment of the table says
what it was built from.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pgvector.psycopg
import psycopg
import psycopg_pool
from psycopg import conninfo, sql

from anysearch_jax import types
from anysearch_jax.host import redaction
from retrieval import built as built_lib
from retrieval import filters as filters_lib
from retrieval import passages
from retrieval import requests as requests_lib
from retrieval.index import search as search_lib

Answer = tuple[types.Passage, ...]
Pool = psycopg_pool.ConnectionPool

RANKINGS = ("words", "dense", "hybrid")
_SCHEMA = 2  # Of the table; others are refused.
_BATCH = 2048  # Passages of a transaction, with which a build resumes.
_DEPTH = 100  # Rows more than k of each search that reciprocal ranks fuse.
_NAME = re.compile(r"[a-z_][a-z0-9_]{0,47}")
# A lexeme is in quotes and has no space in it, so this turns "and" into "or".
_WORDS = """
  SELECT row, ts_rank(words, asked, 1) AS score FROM {table}, CAST(replace(
    plainto_tsquery(%(language)s::regconfig, %(query)s)::text, ' & ', ' | '
  ) AS tsquery) asked
  WHERE words @@ asked AND {where} ORDER BY score DESC, row LIMIT %(most)s"""
# The inner query has the only order that pgvector's index knows.
_DENSE = """
  SELECT row, score FROM (
    SELECT row, -(dense <#> %(vector)s) AS score FROM {table} WHERE {where}
    ORDER BY dense <#> %(vector)s LIMIT %(most)s
  ) nearest ORDER BY score DESC, row"""
_PLACES = (
  "SELECT row, 60 + row_number() OVER (ORDER BY score DESC, row) AS place FROM"
)
_HYBRID = f"""
  SELECT row, sum(1.0 / place) AS score FROM (
    {_PLACES} ({_WORDS}) w UNION ALL {_PLACES} ({_DENSE}) d
  ) fused GROUP BY row ORDER BY score DESC, row LIMIT %(k)s"""
_FOUND = """
  SELECT id, title, text, found.score::float8 FROM ({ranked}) found
  JOIN {table} USING (row) ORDER BY found.score DESC, row"""
_RANKED = {"words": _WORDS, "dense": _DENSE, "hybrid": _HYBRID}
_CREATE = """
  CREATE TABLE {table} (row int PRIMARY KEY, id text NOT NULL,
    title text NOT NULL, text text NOT NULL, words tsvector GENERATED ALWAYS AS
    (to_tsvector({language}::regconfig, title || ' ' || text)) STORED{more})"""


def connect(address: str, *, password: str = "", timeout: float = 30.0) -> Pool:
  """Returns a pool of connections.

  Args:
    address: libpq's address without a password, such as
      `postgresql://user@host:5432/database` or `host=h dbname=d user=u`.
    password: the password; "": libpq's own ways (PGPASSWORD, a .pgpass file).
    timeout: seconds of a statement, and of a wait for a connection.

  Raises:
    ValueError: the address is invalid, or has a password in it.
    types.RetrievalError: the server cannot be reached.
  """
  try:
    values = conninfo.conninfo_to_dict(address)
  except psycopg.ProgrammingError:  # The message may quote a password.
    values = {}
  # A password with a slash in it ends up in the name of the database.
  slashed = "@" in str(values.get("dbname", ""))
  if not values or slashed or values.keys() & {"password", "sslpassword"}:
    raise ValueError(
      "postgres: found an address that is invalid or has a password in it (it "
      "is not shown), expected one such as postgresql://user@host/database or "
      "host=h dbname=d. Put the password into an environment variable, and "
      "name it by key_variable."
    )
  milliseconds = int(timeout * 1000)
  options: dict[str, Any] = {
    "application_name": "anysearch_jax",
    "client_encoding": "utf8",
    "connect_timeout": max(2, int(timeout)),
    "tcp_user_timeout": milliseconds,  # A machine that is gone ends a wait.
    "options": f"-c statement_timeout={milliseconds}",
    **values,
    "password": password or None,
    "autocommit": True,
  }
  try:
    # A pool writes why it cannot connect into a log, and not to its caller.
    psycopg.connect(**options).close()
  except psycopg.Error as error:
    said = redaction.Redactor(password).quote(" ".join(str(error).split()), 300)
    raise types.RetrievalError(
      f"PostgreSQL at {values.get('host', 'localhost')} cannot be reached "
      f"({said})"
    ) from None
  check = Pool.check_connection  # Replaces what a restarted server has lost.
  return Pool(
    kwargs=options, min_size=0, max_size=4, timeout=timeout, check=check
  )


def described(connection: Any, table: str) -> dict[str, Any] | None:
  """Returns what a table was built from, `finished` or not; None without it.

  Raises:
    ValueError: the name is invalid, or another program made the table.
  """
  if not _NAME.fullmatch(table):  # PostgreSQL finds other spellings too.
    raise ValueError(f"table: found {table!r}, expected small letters and _.")
  oid, text = connection.execute(
    "SELECT to_regclass(%(t)s)::oid, obj_description(to_regclass(%(t)s)::oid)",
    {"t": table},
  ).fetchone()
  try:
    built = json.loads(text or "{}")
  except ValueError:
    built = {}
  if oid is not None and built.get("schema") != _SCHEMA:
    raise ValueError(
      f"table {table}: found one that launch.build_index of this version did "
      "not make; name another one by --table, or drop it."
    )
  return built or None


class PostgresRetriever(requests_lib.OneByBatch):
  """Searches a table on threads; usable from any event loop.

  Args:
    pool: see `connect`.
    table: a table that `build` finished.
    ranking: `words`; `dense`, by the encoder's vectors; or `hybrid`, both fused
      by reciprocal rank.
    encoder: the encoder that built the table; None for `words`.
    filters: values that fields of the passages may have, see `filters.parse`.
    ef_search: candidates of a search of the graph (`hnsw`); 0: 40.

  Raises:
    ValueError: a setting is invalid, or the table does not have what it needs.

  `counters` has the `queries` and the `failures`.
  """

  def __init__(
    self,
    pool: Pool,
    table: str,
    *,
    ranking: str = "words",
    encoder: search_lib.Encoder | None = None,
    filters: filters_lib.Filters | None = None,
    ef_search: int = 0,
  ):
    built_lib.check_ranking(ranking, RANKINGS)
    where, self._filters = f"table {table}", filters or {}
    with pool.connection() as connection:
      built = described(connection, table)
    if not built or not built["finished"]:
      raise ValueError(
        f"{where}: found no table that is finished; build it, or finish it, by "
        "launch.build_index --kind=postgres."
      )
    built_lib.check_encoder(ranking, encoder, built, where)
    filters_lib.check(self._filters, built, where)
    is_graph = ranking != "words" and built["vectors"] == "hnsw"
    if not 0 <= ef_search <= 1000 or (ef_search and not is_graph):
      raise ValueError(
        f"ef_search: found {ef_search} with ranking {ranking} of {where}; "
        "expected 1 to 1000 with vectors of an hnsw graph, otherwise 0."
      )
    self._pool, self._table, self._built = pool, table, built
    self._ranking, self._encoder = ranking, encoder
    self._ef_search = (ef_search or 40) if is_graph else 0
    self.counters: Counter[str] = Counter()

  async def search_many(
    self, requests: Sequence[types.SearchRequest]
  ) -> list[Answer | Exception]:
    """Returns the passages of each request, or its `RetrievalError`.

    Raises:
      ValueError: a request is invalid, see `requests.check`.
    """
    requests_lib.check(requests, "")
    # PostgreSQL has no text with a zero or a lone surrogate in it.
    texts = [r.query.encode(errors="replace").decode() for r in requests]
    texts = [text.replace("\0", " ") for text in texts]
    vectors: Any = [None] * len(texts)
    if self._encoder is not None and self._ranking != "words":
      vectors = await asyncio.to_thread(self._encoder.queries, texts)
    found = await asyncio.gather(
      *(
        asyncio.to_thread(self._answer, text, vector, request.k)
        for text, vector, request in zip(texts, vectors, requests, strict=True)
      )
    )
    self.counters["queries"] += len(found)
    self.counters["failures"] += sum(isinstance(x, Exception) for x in found)
    return found

  def identity(self) -> dict[str, Any]:
    """Returns JSON values that identify the answers."""
    more = {"table": self._table, "ef_search": self._ef_search}
    return built_lib.identity(
      "postgres", self._ranking, self._built, self._filters, **more
    )

  def close(self) -> None:
    """Closes the connections."""
    self._pool.close()

  def _answer(self, text: str, vector: Any, k: int) -> Answer | Exception:
    """Returns the passages of one query; none of a blank one."""
    if not text.strip():
      return ()
    where: list[sql.Composable] = [sql.SQL("true")]
    values: dict[str, Any] = {}
    for i, (field, allowed) in enumerate(self._filters.items()):
      where.append(
        sql.SQL(f"fields ->> %(field{i})s::text = ANY(%(allowed{i})s)")
      )
      values |= {f"field{i}": field, f"allowed{i}": list(allowed)}
    table = sql.Identifier(self._table)
    ranked = sql.SQL(_RANKED[self._ranking]).format(
      table=table, where=sql.SQL(" AND ").join(where)
    )
    values |= {"query": text, "language": self._built["language"], "k": k}
    values |= {"most": k + _DEPTH * (self._ranking == "hybrid")}
    try:
      with self._pool.connection() as connection:
        if described(connection, self._table) != self._built:
          raise ValueError("it is another one than this run has searched.")
        if vector is not None:
          pgvector.psycopg.register_vector(connection)
          values |= {"vector": vector}
        if self._ef_search:
          # Without iteration, filters leave fewer rows than the graph found.
          connection.execute("SET hnsw.iterative_scan = strict_order")
          most = min(max(self._ef_search, k), 1000)
          connection.execute(f"SET hnsw.ef_search = {most}")
        found = sql.SQL(_FOUND).format(ranked=ranked, table=table)
        rows = connection.execute(found, values).fetchall()
    except (psycopg.Error, ValueError) as error:
      return types.RetrievalError(
        f"PostgreSQL, table {self._table}: {said(self._pool, error)}"
      )
    return tuple(types.Passage(*row) for row in rows)


def said(pool: Pool, error: Exception) -> str:
  """Returns an error's words in one line, without the password."""
  options: Any = pool.kwargs
  redact = redaction.Redactor(options["password"] or "")
  return redact.quote(" ".join(str(error).split()), 300)


def build(
  pool: Pool,
  table: str,
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
    pool: see `connect`.
    table: name of the table; created if missing.
    corpus: the passages; row i has the primary key i.
    encoder: encoder of passages; None: words only.
    language: a text search configuration of the server, such as `simple`.
    vectors: `flat`, exact search, or `hnsw`, pgvector's graph.
    fields: other fields of the corpus's rows, for filters.
    on_rows: called with the rows filled in so far and all rows.

  Raises:
    ValueError: a setting is invalid, the table was built from other values, or
      the database cannot have it.
  """
  if vectors not in ("flat", "hnsw"):
    raise ValueError(f"vectors: found {vectors!r}, expected flat or hnsw.")
  built = {"schema": _SCHEMA, "finished": False} | built_lib.description(
    corpus, encoder=encoder, language=language, vectors=vectors, fields=fields
  )
  name = sql.Identifier(table)
  try:
    with pool.connection() as connection:
      run = connection.execute
      run("SET statement_timeout = 0")  # Indexes of a large table take hours.
      there = described(connection, table)
      if there is None:
        _create(connection, table, built)
      elif there | {"finished": False} != built:
        raise ValueError(
          f"table {table}: found one that was built from {there}, expected "
          f"{built}; name another table, or drop this one."
        )
      rows = sql.SQL("SELECT coalesce(max(row) + 1, 0) FROM {}").format(name)
      (done,) = run(rows).fetchone() or (0,)
      on_rows(done, len(corpus))
      for start in range(done, len(corpus), _BATCH):
        part = range(start, min(start + _BATCH, len(corpus)))
        _copy(connection, name, corpus, part, encoder, fields)
        on_rows(part.stop, len(corpus))
      indexes = {"gin": "gin (words)", "hnsw": "hnsw (dense vector_ip_ops)"}
      for each in ["gin", "hnsw"][: 1 + (built.get("vectors") == "hnsw")]:
        make = f"CREATE INDEX IF NOT EXISTS {{}} ON {{}} USING {indexes[each]}"
        run(sql.SQL(make).format(sql.Identifier(f"{table}_{each}"), name))
      run(sql.SQL("ANALYZE {}").format(name))
      _note(connection, table, built | {"finished": True})
  except psycopg.Error as error:
    raise ValueError(
      f"table {table}: {said(pool, error)} Build it again to resume."
    ) from None


def _create(connection: Any, table: str, built: dict[str, Any]) -> None:
  """Creates an empty table."""
  known = connection.execute("SELECT cfgname FROM pg_ts_config").fetchall()
  if (built["language"],) not in known:
    raise ValueError(
      f"language: found {built['language']!r}, expected one of the server's: "
      f"{', '.join(sorted(name for (name,) in known))}."
    )
  with connection.transaction():
    more = ", fields jsonb NOT NULL" * ("fields" in built)
    if "encoder" in built:
      connection.execute("CREATE EXTENSION IF NOT EXISTS vector")
      more += f", dense vector({built['encoder']['dim']}) NOT NULL"
    connection.execute(
      sql.SQL(_CREATE).format(
        table=sql.Identifier(table),
        language=sql.Literal(built["language"]),
        more=sql.SQL(more),
      )
    )
    _note(connection, table, built)


def _note(connection: Any, table: str, built: dict[str, Any]) -> None:
  text = sql.Literal(json.dumps(built, sort_keys=True))
  connection.execute(
    sql.SQL("COMMENT ON TABLE {} IS {}").format(sql.Identifier(table), text)
  )


def _copy(
  connection: Any,
  table: sql.Identifier,
  corpus: passages.Corpus,
  rows: range,
  encoder: search_lib.Encoder | None,
  fields: Sequence[str],
) -> None:
  """Appends rows; fails if another process did."""
  columns: dict[str, list[Any]] = {"row": list(rows)}
  some = [corpus[row] for row in rows]
  for name in ("id", "title", "text"):  # No text has a zero in it there.
    columns[name] = [getattr(p, name).replace("\0", "\ufffd") for p in some]
  if fields:
    kept = (filters_lib.of_row(corpus, row, fields) for row in rows)
    columns["fields"] = [json.dumps(each) for each in kept]
  if encoder is not None:
    pgvector.psycopg.register_vector(connection)
    columns["dense"] = list(encoder.passages([p.contents for p in some]))
  names = sql.SQL(", ").join(map(sql.Identifier, columns))
  into = sql.SQL("COPY {} ({}) FROM STDIN").format(table, names)
  with connection.transaction(), connection.cursor().copy(into) as copy:
    for row in zip(*columns.values(), strict=True):
      copy.write_row(row)
