"""Records and replays the answers of a retriever, to make runs repeatable.

The first recorded answer to a query is final: it is returned to every later
request for the same query, so the log has exactly what a run saw. A log is one
SQLite file with a row for each answer. Any number of threads and processes may
read and write it on a local disk; answers survive a killed process.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pathlib
import sqlite3
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from anysearch_jax import types
from anysearch_jax.host import disk, listing, loop
from anysearch_jax.retrieval import requests as requests_lib

Answer = tuple[types.Passage, ...]

_BUSY_SECONDS = 60.0
_TABLE = "anysearch_answers"


class MissError(LookupError):
  """A strict log has no answer. The run ends: it cannot be repeated from it."""


def count(path: str | os.PathLike) -> int:
  """Returns the number of answers in a log.

  Raises:
    RetrievalError: the file is missing or is not a log of answers.
  """
  with _open_log(pathlib.Path(path), is_new=False) as database:
    return database.execute(f"SELECT count(*) FROM {_TABLE}").fetchone()[0]


class Recorder:
  """A retriever that combines another retriever with a log of answers.

  Modes:
    record: always asks the retriever, and writes the answers. If the log
      already has an answer, that one is returned.
    replay: asks the retriever only for answers that the log lacks, and writes
      them.
    strict: asks only the log; needs no retriever.

  Failures are not recorded. Searches may come from any event loop and thread,
  and several processes may use one file.

  Args:
    retriever: the wrapped retriever; a strict recorder does not ask it.
    path: path of the log.
    mode: one of the modes above.
    identity: JSON values; retrievers with equal values give equal answers.
      None: the only identity in the log.

  Raises:
    ValueError: an identity is needed.
    RetrievalError: the log is missing or is not a log of answers.

  `counters` has the `hits` (answers from the log), the `misses`, the `failures`
  among the misses, and the answers `recorded`.
  """

  def __init__(
    self,
    retriever: types.Retriever | None,
    path: str | os.PathLike,
    *,
    mode: str,
    identity: Any = None,
  ):
    self._retriever = None if mode == "strict" else retriever
    self._mode = mode
    self._path = pathlib.Path(path).absolute()
    with _open_log(self._path, is_new=mode != "strict") as database:
      recorded = database.execute(
        f"SELECT identity FROM {_TABLE} GROUP BY identity ORDER BY min(rowid)"
      ).fetchall()
    if identity is None:
      if len(recorded) != 1:
        identities = listing.first_names(
          [name for (name,) in recorded], characters=300
        )
        raise ValueError(
          f"No identity is given, and {self._path} holds answers of "
          f"{identities or 'no retriever'}; pass the retriever's identity."
        )
      identity = json.loads(recorded[0][0])
    self._identity = json.dumps(
      identity, sort_keys=True, separators=(",", ":"), allow_nan=False
    )
    self.counters: Counter[str] = Counter()
    if mode == "strict" or hasattr(retriever, "search_many"):
      self.search_many = self._answers

  async def search(
    self, request: types.SearchRequest
  ) -> Sequence[types.Passage]:
    """Returns one answer. Raises as `search_many`, and what the answer is."""
    (answer,) = await self._answers([request])
    if isinstance(answer, Exception):
      raise answer
    return answer

  @loop.inside
  async def _answers(
    self, requests: Sequence[types.SearchRequest]
  ) -> list[Answer | Exception]:
    """Answers from the log, and asks the retriever for all misses at once.

    It is the method `search_many` if the retriever has one.

    Returns:
      For each request its passages, the exception of the retriever or, in mode
      strict, a `MissError`.

    Raises:
      RetrievalError: the log cannot be read or written.
    """
    answers: dict[str, Answer | Exception] = {}
    if self._mode != "record":
      keys = [_key(request) for request in requests]
      answers |= await asyncio.to_thread(self._read, keys)
    missing = [request for request in requests if _key(request) not in answers]
    self.counters["hits"] += len(requests) - len(missing)
    self.counters["misses"] += len(missing)
    if missing and self._retriever is None:
      answers |= {_key(request): self._miss(request) for request in missing}
    elif missing:
      replies = await requests_lib.answers(self._retriever, missing)
      new_answers: dict[str, str] = {}
      for request, reply in zip(missing, replies, strict=True):
        if isinstance(reply, Exception):
          self.counters["failures"] += 1
          answers[_key(request)] = reply
        else:
          rows = [(p.id, p.title, p.text, float(p.score)) for p in reply]
          new_answers[_key(request)] = json.dumps(rows)
      answers |= await asyncio.to_thread(self._write, new_answers)
    return [answers[_key(request)] for request in requests]

  def identity(self) -> Any:
    """Returns JSON values that identify the retriever that answers or did."""
    return json.loads(self._identity)

  def _read(self, keys: Sequence[str]) -> dict[str, Answer]:
    """Returns the answers that the log has."""
    with _open_log(self._path, is_new=False) as database:
      return self._select(database, keys)

  def _write(self, new_answers: Mapping[str, str]) -> dict[str, Answer]:
    """Adds answers, keeps existing ones, and returns those of the log."""
    rows = [
      (self._identity, key, passages) for key, passages in new_answers.items()
    ]
    with _open_log(self._path, is_new=False) as database:
      written = database.executemany(
        f"INSERT OR IGNORE INTO {_TABLE} VALUES (?, ?, ?)", rows
      )
      self.counters["recorded"] += max(written.rowcount, 0)
      return self._select(database, list(new_answers))

  def _select(
    self, database: sqlite3.Connection, keys: Sequence[str]
  ) -> dict[str, Answer]:
    answers = {}
    for key in keys:
      row = database.execute(
        f"SELECT passages FROM {_TABLE} WHERE identity = ? AND request = ?",
        (self._identity, key),
      ).fetchone()
      if row is not None:
        passages = json.loads(row[0])
        answers[key] = tuple(types.Passage(*values) for values in passages)
    return answers

  def _miss(self, request: types.SearchRequest) -> MissError:
    return MissError(
      f"{self._path}: found no answer to {request.query!r} with "
      f"k={request.k}, corpus {request.corpus!r}, identity {self._identity}. "
      "Record it in mode replay with the retriever."
    )


def _key(request: types.SearchRequest) -> str:
  """Returns the key of a request; ASCII, also of lone surrogates."""
  return json.dumps([request.query, request.k, request.corpus])


@contextlib.contextmanager
def _open_log(
  path: pathlib.Path, *, is_new: bool
) -> Iterator[sqlite3.Connection]:
  """Opens a log for one transaction.

  Args:
    path: path of the log.
    is_new: whether to create a missing log.

  Raises:
    RetrievalError: the log is missing, is another file, or cannot be used.
  """
  if not is_new and not path.exists():
    raise types.RetrievalError(
      f"{path}: found no log of answers; record one first."
    )
  mode = "rwc" if is_new else "rw"  # Read-only, if the file is.
  try:
    if is_new:
      path.parent.mkdir(parents=True, exist_ok=True)
      disk.create_private(path)
    connection = sqlite3.connect(
      f"{path.absolute().as_uri()}?mode={mode}",
      uri=True,
      timeout=_BUSY_SECONDS,
    )
    with contextlib.closing(connection) as database, database:
      tables = database.execute("SELECT name FROM sqlite_master").fetchall()
      if is_new and not tables:
        database.execute(
          f"CREATE TABLE IF NOT EXISTS {_TABLE} (identity TEXT, request TEXT, "
          "passages TEXT, PRIMARY KEY (identity, request))"
        )
      elif (_TABLE,) not in tables:
        raise sqlite3.DatabaseError(
          f"found a database without the table {_TABLE}"
        )
      yield database
  except (OSError, sqlite3.Error, ValueError, TypeError) as error:
    raise types.RetrievalError(
      f"{path}: {error}. Expected a log of answers on a local disk with room "
      "on it; if it is damaged, bring a copy back or record again."
    ) from error
