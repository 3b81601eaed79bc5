"""A table of PostgreSQL, over psycopg's pool and pgvector.

The server's own full-text search finds and ranks words: a passage that has any
word of the query counts, in the order of `ts_rank`, which knows nothing of how
rare a word is (BM25 of launch.build_index does). The comment of the table has
its description.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Sequence
from typing import Any

import pgvector.psycopg
import psycopg
import psycopg_pool
from psycopg import conninfo, sql

from anysearch_jax import types
from retrieval import built as built_lib

Pool = psycopg_pool.ConnectionPool

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
_NOTED = """
  SELECT to_regclass(%(t)s)::oid, obj_description(to_regclass(%(t)s)::oid)"""


def connect(address: str, *, key: str = "", timeout: float = 30.0) -> Pool:
  """Returns a pool of connections.

  Args:
    address: libpq's address without a password, such as
      `postgresql://user@host:5432/database` or `host=h dbname=d user=u`.
    key: the password; "": libpq's own ways (PGPASSWORD, a .pgpass file).
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
    "client_encoding": "utf8",
    "connect_timeout": max(2, int(timeout)),
    "tcp_user_timeout": milliseconds,  # A machine that is gone ends a wait.
    "options": f"-c statement_timeout={milliseconds}",
    **values,
    "password": key or None,
    "autocommit": True,
  }
  try:
    # A pool writes why it cannot connect into a log, and not to its caller.
    psycopg.connect(**options).close()
  except psycopg.Error as error:
    raise types.RetrievalError(
      f"PostgreSQL at {values.get('host', 'localhost')} cannot be reached "
      f"({built_lib.said(error, key)})"
    ) from None
  check = Pool.check_connection  # Replaces what a restarted server has lost.
  return Pool(
    kwargs=options, min_size=0, max_size=4, timeout=timeout, check=check
  )


class Table(built_lib.Table):
  """A `built.Table` of PostgreSQL.

  Args:
    pool: see `connect`.
    name: the table's.
    ef_search: candidates of a search of the graph (`hnsw`), <= 1000; 0: 40.
  """

  kind, noun, rankings = "postgres", "table", ("words", "dense", "hybrid")
  errors, in_batches = (psycopg.Error,), False
  batch, basis = 2048, {"schema": 3}

  def __init__(self, pool: Pool, name: str, *, ef_search: int = 0):
    if not _NAME.fullmatch(name):  # PostgreSQL finds other spellings too.
      raise ValueError(f"table: found {name!r}, expected small letters and _.")
    options: Any = pool.kwargs
    self.name, self.key = name, options["password"] or ""
    self._pool, self._ef_search = pool, ef_search

  def noted(self) -> dict[str, Any]:
    with self._pool.connection() as connection:
      return self._noted(connection)

  def _noted(self, connection: Any) -> dict[str, Any]:
    oid, text = connection.execute(_NOTED, {"t": self.name}).fetchone()
    built: dict[str, Any] = {}
    with contextlib.suppress(ValueError):
      built = json.loads(text or "{}")
    if oid is not None and not self.basis.items() <= built.items():
      raise ValueError(
        f"{self}: found one that launch.build_index of this version did not "
        "make; name another one by --table, or drop it."
      )
    return built

  def described(self) -> dict[str, Any]:
    built = super().described()
    is_graph = built.get("vectors") == "hnsw"
    if not 0 <= self._ef_search <= 1000 or (self._ef_search and not is_graph):
      raise ValueError(
        f"ef_search: found {self._ef_search} for {self}; expected 1 to 1000 "
        "with vectors of an hnsw graph, otherwise 0."
      )
    return built

  def count(self) -> int:
    return self._one("SELECT coalesce(max(row) + 1, 0) FROM {table}")

  def is_finished(self, built: built_lib.Built) -> bool:
    return self._one("SELECT to_regclass(%s) IS NOT NULL", f"{self.name}_gin")

  def _one(self, statement: str, *values: Any) -> Any:
    with self._pool.connection() as run:
      return run.execute(self._sql(statement), values).fetchall()[0][0]

  def create(self, built: built_lib.Built) -> None:
    if (how := built.get("vectors", "flat")) not in ("flat", "hnsw"):
      raise ValueError(f"vectors: found {how!r}, expected flat or hnsw.")
    more = ", fields jsonb NOT NULL" * ("fields" in built)
    with self._pool.connection() as run, run.transaction():
      if "encoder" in built:
        run.execute("CREATE EXTENSION IF NOT EXISTS vector")
        more += f", dense vector({built['encoder']['dim']}) NOT NULL"
      text = sql.Literal(json.dumps(built, sort_keys=True))
      language = sql.Literal(built["language"])
      run.execute(self._sql(_CREATE, language=language, more=sql.SQL(more)))
      run.execute(self._sql("COMMENT ON TABLE {table} IS {text}", text=text))

  def insert(
    self, built: built_lib.Built, rows: Sequence[built_lib.Row]
  ) -> None:
    """Appends rows; fails if another process did."""
    columns = ["row", "id", "title", "text"]
    columns += ["fields"] * ("fields" in built) + ["dense"] * (
      "encoder" in built
    )
    names = sql.SQL(", ").join(map(sql.Identifier, columns))
    into = self._sql("COPY {table} ({names}) FROM STDIN", names=names)
    with self._pool.connection() as run:
      if "encoder" in built:
        pgvector.psycopg.register_vector(run)
      with run.transaction(), run.cursor().copy(into) as copy:
        for row, p, fields, vector in rows:
          # No text has a zero in it there.
          texts = (x.replace("\0", "\ufffd") for x in (p.id, p.title, p.text))
          rest = {"fields": json.dumps(fields), "dense": vector}
          copy.write_row([row, *texts, *(rest[n] for n in columns[4:])])

  def finish(self, built: built_lib.Built) -> None:
    # The one of words comes last: it says that the table is finished.
    indexes = {"hnsw": "hnsw (dense vector_ip_ops)", "gin": "gin (words)"}
    if built.get("vectors") != "hnsw":
      del indexes["hnsw"]
    with self._pool.connection() as run:
      run.execute("SET statement_timeout = 0")  # A large table takes hours.
      run.execute(self._sql("ANALYZE {table}"))
      for name, what in indexes.items():
        index = sql.Identifier(f"{self.name}_{name}")
        make = f"CREATE INDEX IF NOT EXISTS {{index}} ON {{table}} USING {what}"
        run.execute(self._sql(make, index=index))

  def find(
    self, built: built_lib.Built, asked: built_lib.Asked
  ) -> list[built_lib.Answer]:
    where = ["true"]
    (query,), (vector,) = asked.texts, asked.vectors
    values: dict[str, Any] = {
      "query": query.replace("\0", " "),
      "vector": vector,
      "language": built["language"],
      "k": asked.k,
      "most": asked.k + _DEPTH * (asked.ranking == "hybrid"),
    }
    for i, (field, found) in enumerate(asked.filters.items()):
      where.append(f"fields ->> %(field{i})s::text = ANY(%(found{i})s)")
      values |= {f"field{i}": field, f"found{i}": list(found)}
    allowed = sql.SQL(" AND ".join(where))
    ranked = self._sql(_RANKED[asked.ranking], where=allowed)
    with self._pool.connection() as run:
      if self._noted(run) != built:
        raise psycopg.Error("it is another one than this run has searched.")
      if vector is not None:
        pgvector.psycopg.register_vector(run)
        if built["vectors"] == "hnsw":
          # Without iteration, filters leave fewer rows than the graph found.
          run.execute("SET hnsw.iterative_scan = strict_order")
          most = min(max(self._ef_search or 40, asked.k), 1000)
          run.execute(f"SET hnsw.ef_search = {most}")
      rows = run.execute(self._sql(_FOUND, ranked=ranked), values).fetchall()
    return [tuple(types.Passage(*row) for row in rows)]

  def _sql(self, statement: str, **parts: sql.Composable) -> sql.Composed:
    table = sql.Identifier(self.name)
    return sql.SQL(statement).format(table=table, **parts)

  def options(self) -> dict[str, Any]:
    return {"ef_search": self._ef_search}

  def close(self) -> None:
    self._pool.close()
