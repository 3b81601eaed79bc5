"""BM25 over a column of PostgreSQL's full-text search.

A passage's terms, as `analysis` makes them, are a tsvector with a GIN index.
`ts_rank_cd` knows nothing of how rare a word is, and a question has many words
of which a passage has few. So rows are ranked by BM25, computed by the server:
`ts_rank` of a single word grows with the number of its positions, from which
follows how often the passage has it.

A search reads rows that have one of the query's rarest words. Words that
cannot lift a row without these among the best k only count (MaxScore, see
`word_ranking`), so the result is that of scoring every row. PostgreSQL keeps
255 positions of a word, so BM25 counts it 255 times at most.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from psycopg import sql

from retrieval import filters as filters_lib
from retrieval.index import search as search_lib
from retrieval.postgres import server as server_lib

# PostgreSQL's limits: bytes of a lexeme, positions of it, the last position.
_LONGEST, _POSITIONS, _LAST = 2046, 255, 16383
# The rarest words of a query count.
_WORDS = 256
# The first of two searches reads the rarest words with this many rows.
_TRIED = 512
# Sums of the server and of the bound may round apart.
_SLACK = 1 + 1e-6


class Word(NamedTuple):
  """What a table knows of a word.

  weight: the inverse document frequency.
  passages: number of passages that have it.
  largest: the largest factor of its frequency in a passage, in (0, 1).
  """

  weight: float
  passages: int
  largest: float


class Table(NamedTuple):
  """A table of passages, `words` and their lengths, and how BM25 weighs them.

  name: of the table; that of its words ends in `_words`.
  passages: number of its passages.
  average: mean number of terms of a passage, above 0.
  k1, b: saturation and length normalisation.
  """

  name: str
  passages: int
  average: float
  k1: float
  b: float


def lexeme(term: str) -> str:
  """Returns the lexeme of a term: itself, or its hash if it is too long."""
  raw = term.encode(errors="replace")
  if len(raw) <= _LONGEST and "\0" not in term:
    return raw.decode()
  return hashlib.sha256(raw).hexdigest()


def vector(terms: Sequence[str]) -> str:
  """Returns the tsvector of a passage's terms, as COPY reads it."""
  places: dict[str, list[int]] = {}
  for place, term in enumerate(terms, 1):
    places.setdefault(lexeme(term), []).append(place)
  if len(terms) > _LAST:
    # Later positions would be one, and their number is what counts.
    places = {k: [*range(1, len(v) + 1)] for k, v in places.items()}
  return " ".join(
    f"{_quoted(word)}:{','.join(map(str, at[:_POSITIONS]))}"
    for word, at in places.items()
  )


def count_words(connection: server_lib.Connection, table: Table) -> None:
  """Makes the table of words: in how many passages, and how heavy at most."""
  connection.execute(
    sql.SQL(
      "CREATE TABLE {words} AS SELECT u.lexeme, count(*)::int AS passages, "
      "max(cardinality(u.positions) / (cardinality(u.positions) + {norm})) "
      "AS largest FROM {name} AS p, unnest(p.words) AS u GROUP BY u.lexeme"
    ).format(
      words=sql.Identifier(f"{table.name}_words"),
      name=sql.Identifier(table.name),
      norm=_norm(table),
    )
  )
  connection.execute(
    sql.SQL("ALTER TABLE {} ADD PRIMARY KEY (lexeme)").format(
      sql.Identifier(f"{table.name}_words")
    )
  )


def known(
  connection: server_lib.Connection, table: Table, terms: Iterable[str]
) -> dict[str, Word]:
  """Returns the words among terms that the table has."""
  found = connection.execute(
    sql.SQL(
      "SELECT lexeme, passages, largest FROM {} WHERE lexeme = ANY(%s)"
    ).format(sql.Identifier(f"{table.name}_words")),
    [sorted({lexeme(term) for term in terms})],
  ).fetchall()
  return {
    word: Word(
      float(np.log(1 + (table.passages - n + 0.5) / (n + 0.5))),
      n,
      float(largest),
    )
    for word, n, largest in found
  }


def rank(
  connection: server_lib.Connection,
  table: Table,
  terms: Sequence[str],
  k: int,
  words: Mapping[str, Word],
  filters: filters_lib.Filters,
) -> search_lib.Hits:
  """Returns the best k rows that have a term of the query.

  Args:
    connection: to the database.
    table: the table.
    terms: the query's terms, repeated ones too; the 256 rarest count.
    k: the most rows, >= 1.
    words: see `known`.
    filters: which rows may be found; words weigh as in the whole table.
  """
  times = Counter(w for w in map(lexeme, terms) if w in words)
  order = sorted(times, key=lambda word: (words[word].passages, word))[:_WORDS]
  if not order:
    return search_lib.Hits(np.zeros(0, np.int64), np.zeros(0, np.float32))
  weights = {word: words[word].weight * times[word] for word in order}
  # What the words from each on add to a score at most.
  rest = [0.0]
  for word in reversed(order):
    rest.append(rest[-1] + weights[word] * words[word].largest)
  rest.reverse()
  seen = itertools.accumulate(words[word].passages for word in order)
  tried = sum(passages < max(_TRIED, 4 * k) for passages in seen) + 1
  read = min(tried, len(order))
  found = _best(connection, table, weights, order[:read], k, filters)
  floor = found[k - 1][1] if len(found) == k else 0.0
  needed = sum(floor <= bound * _SLACK for bound in rest[:-1])
  if needed > read:
    found = _best(connection, table, weights, order[:needed], k, filters)
  rows, scores = zip(*found) if found else ((), ())
  return search_lib.Hits(
    np.asarray(rows, np.int64), np.asarray(scores, np.float32)
  )


def where(
  filters: filters_lib.Filters,
) -> tuple[sql.Composable, dict[str, Any]]:
  """Returns the condition of filters, and the values of its placeholders."""
  conditions: list[sql.Composable] = [sql.SQL("true")]
  values: dict[str, Any] = {}
  for i, (field, allowed) in enumerate(filters.items()):
    conditions.append(
      sql.SQL("fields ->> {}::text = ANY({}::text[])").format(
        sql.Placeholder(f"field{i}"), sql.Placeholder(f"allowed{i}")
      )
    )
    values |= {f"field{i}": field, f"allowed{i}": list(allowed)}
  return sql.SQL(" AND ").join(conditions), values


def _best(
  connection: server_lib.Connection,
  table: Table,
  weights: Mapping[str, float],
  read: Sequence[str],
  k: int,
  filters: filters_lib.Filters,
) -> list[tuple[int, float]]:
  """Returns the best rows, and their scores, that have a word of `read`."""
  values: dict[str, Any] = {
    "steps": _STEPS,
    "read": " | ".join(map(_quoted, read)),
    "k": k,
  }
  condition, more = where(filters)
  counts, score = [], []
  for i, (word, weight) in enumerate(weights.items()):
    each = sql.Identifier(f"n{i}")
    values[f"word{i}"] = _quoted(word)
    counts.append(
      sql.SQL(
        "width_bucket(ts_rank('{{1,1,1,1}}', words, {}::tsquery)::float8, "
        "%(steps)s) AS {}"
      ).format(sql.Placeholder(f"word{i}"), each)
    )
    score.append(
      sql.SQL("{}::float8 * {each} / ({each} + norm)").format(
        sql.Literal(weight), each=each
      )
    )
  # OFFSET 0 keeps the counts from being computed again for each mention.
  query = sql.SQL(
    "SELECT row, {score} AS score FROM (SELECT row, {norm} AS norm, {counts} "
    "FROM {name} WHERE words @@ %(read)s::tsquery AND {where} OFFSET 0) "
    "AS counted "
    "ORDER BY score DESC, row LIMIT %(k)s"
  ).format(
    score=sql.SQL(" + ").join(score),
    norm=_norm(table),
    counts=sql.SQL(", ").join(counts),
    name=sql.Identifier(table.name),
    where=condition,
  )
  return connection.execute(query, values | more).fetchall()


def _norm(table: Table) -> sql.Composed:
  """Returns what BM25 adds to a frequency, by the length of the passage."""
  # Not 0 even without saturation (k1 = 0): it divides.
  return sql.SQL(
    "greatest({}::float8 * ({}::float8 + {}::float8 * length / {}::float8), "
    "1e-9)"
  ).format(*map(sql.Literal, (table.k1, 1 - table.b, table.b, table.average)))


def _quoted(word: str) -> str:
  """Returns a lexeme as tsvector and tsquery read it."""
  return "'" + word.replace("\\", "\\\\").replace("'", "''") + "'"


def _steps() -> list[float]:
  """Returns between which ranks of a single word its number of positions grows.

  `ts_rank` of a word with n positions is (1 + 1/4 + ... + 1/n^2) / (pi^2 / 6),
  see calc_rank_or in PostgreSQL's tsrank.c.
  """
  ranks = np.cumsum(1 / np.arange(1, _POSITIONS + 1) ** 2) / 1.64493406685
  return [float(ranks[0] / 2), *((ranks[1:] + ranks[:-1]) / 2).tolist()]


_STEPS = _steps()
