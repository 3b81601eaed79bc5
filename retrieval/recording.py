"""Records and replays the answers of a retriever, to make runs repeatable.

The first recorded answer to a query is final: it is returned to every later
request for the same query, so the log has exactly what a run saw. A log is one
SQLite file with a row for each answer. Any number of threads and processes may
read and write it on a local disk; answers survive a killed process. An answer
that is not as it was written is an error, never a wrong answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import pathlib
import sqlite3
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from anysearch_jax import types
from anysearch_jax.host import loop
from anysearch_jax.retrieval import requests as requests_lib

Answer = tuple[types.Passage, ...]

_APPLICATION, _VERSION = 0x416E5365, 2  # "AnSe".
_BUSY_SECONDS = 60.0


class MissError(LookupError):
  """A strict log has no answer. The run ends: it cannot be repeated from it."""


class Key(NamedTuple):
  """The key of an answer; `identity` is the retriever's identity as JSON."""

  query: str
  k: int
  corpus: str
  identity: str


class AnswerLog:
  """The answers in a file.

  Args:
    path: path of the file.
    writable: whether to create a missing file. If false, the file must exist.

  Raises:
    RetrievalError: the file is missing or is not a log of answers. Methods
      raise it if the file cannot be read or written, or is damaged.
  """

  def __init__(self, path: str | os.PathLike, *, writable: bool):
    self.path = pathlib.Path(path).absolute()
    if not writable and not self.path.exists():
      raise types.RetrievalError(
        f"{self.path}: found no log of answers; record one first."
      )
    self._lock = threading.Lock()
    mode = "rwc" if writable else "ro"
    with self._errors(), contextlib.ExitStack() as unless_refused:
      if writable:
        self.path.parent.mkdir(parents=True, exist_ok=True)
      self._db = sqlite3.connect(
        f"{self.path.as_uri()}?mode={mode}",
        uri=True,
        timeout=_BUSY_SECONDS,
        isolation_level=None,
        check_same_thread=False,
      )
      unless_refused.callback(self._db.close)
      if writable:
        self._create()
      kind = self._kind()
      if kind != (_APPLICATION, _VERSION):
        raise types.RetrievalError(
          f"{self.path}: found a database with application id and version "
          f"{kind}, expected a log of answers with "
          f"{(_APPLICATION, _VERSION)}; name another file."
        )
      unless_refused.pop_all()

  def read(self, keys: Sequence[Key]) -> list[Answer | None]:
    """Returns the answer to each key; None if the log has none."""
    with self._transaction("DEFERRED"):
      return [self._answer(key) for key in keys]

  def write(
    self, answers: Sequence[tuple[Key, Answer]]
  ) -> tuple[list[Answer], int, int]:
    """Adds answers in one transaction; existing answers are kept.

    Returns:
      The answer that the log now has for each key; the number of new answers;
      the number of existing answers with other passages than the given ones.
    """
    in_log = []
    new = conflicts = 0
    with self._transaction("IMMEDIATE"):
      for key, answer in answers:
        recorded = self._answer(key)
        if recorded is None:
          self._insert(key, answer)
          new += 1
        elif [*map(_texts, recorded)] != [*map(_texts, answer)]:
          conflicts += 1
        in_log.append(answer if recorded is None else recorded)
    return in_log, new, conflicts

  def identities(self) -> list[str]:
    """Returns the identities as JSON, in the order of their first answers."""
    with self._transaction("DEFERRED"):
      rows = self._db.execute(
        "SELECT identity FROM answers GROUP BY identity ORDER BY min(rowid)"
      ).fetchall()
    return [identity for (identity,) in rows]

  def __len__(self) -> int:
    with self._transaction("DEFERRED"):
      return self._db.execute("SELECT count(*) FROM answers").fetchone()[0]

  def close(self) -> None:
    with self._lock:
      self._db.close()

  def _kind(self) -> tuple[int, int]:
    """Returns the application id and the version of the database."""
    names = ("application_id", "user_version")
    values = [self._db.execute(f"PRAGMA {name}").fetchone() for name in names]
    return values[0][0], values[1][0]

  def _create(self) -> None:
    """Makes a new file a log, unless another process does so meanwhile."""
    with self._transaction("IMMEDIATE"):
      tables = self._db.execute("SELECT count(*) FROM sqlite_master").fetchone()
      if tables == (0,) and self._kind() == (0, 0):
        self._db.execute(
          "CREATE TABLE answers (address TEXT PRIMARY KEY, identity TEXT, "
          "passages TEXT, digest TEXT)"
        )
        self._db.execute(f"PRAGMA application_id = {_APPLICATION}")
        self._db.execute(f"PRAGMA user_version = {_VERSION}")

  def _answer(self, key: Key) -> Answer | None:
    address = _sha256(*key)
    row = self._db.execute(
      "SELECT identity, passages, digest FROM answers WHERE address = ?",
      (address,),
    ).fetchone()
    if row is None:
      return None
    identity, passages, digest = row
    if digest != _sha256(address, str(identity), str(passages)):
      raise types.RetrievalError(
        f"{self.path}: the answer to {key.query!r} differs from what was "
        "written; the file is damaged. Restore a copy, or record again."
      )
    return tuple(types.Passage(*values) for values in json.loads(passages))

  def _insert(self, key: Key, answer: Answer) -> None:
    address = _sha256(*key)
    passages = json.dumps([(*_texts(p), p.score) for p in answer])
    digest = _sha256(address, key.identity, passages)
    self._db.execute(
      "INSERT INTO answers VALUES (?, ?, ?, ?)",
      (address, key.identity, passages, digest),
    )

  @contextlib.contextmanager
  def _transaction(self, kind: str) -> Iterator[None]:
    with self._lock, self._errors():
      self._db.execute(f"BEGIN {kind}")
      try:
        yield
        self._db.execute("COMMIT")
      finally:
        if self._db.in_transaction:
          self._db.execute("ROLLBACK")

  @contextlib.contextmanager
  def _errors(self) -> Iterator[None]:
    try:
      yield
    except (OSError, sqlite3.Error) as error:
      raise types.RetrievalError(
        f"{self.path}: {error}. Expected a log of answers on a local disk with "
        "room on it; if it is damaged, bring a copy back or record again."
      ) from error


def _texts(passage: types.Passage) -> tuple[str, str, str]:
  return passage.id, passage.title, passage.text


def _sha256(*values: Any) -> str:
  """Returns the hash of JSON values; ASCII, also of lone surrogates."""
  return hashlib.sha256(json.dumps(values).encode("ascii")).hexdigest()


class Recorder:
  """A retriever that combines another retriever with a log of answers.

  Modes:
    record: always asks the retriever, and writes the answers. If the log
      already has other passages, `counters["conflicts"]` counts them, and the
      log's passages are returned.
    replay: asks the retriever only for answers that the log lacks, and writes
      them.
    strict: asks only the log; needs no retriever.

  Failures are not recorded. Searches may come from any event loop and thread,
  and several processes may use one file; see `AnswerLog`.

  Args:
    retriever: the wrapped retriever; a strict recorder does not ask it.
    path: path of the log.
    mode: one of the modes above.
    identity: JSON values; retrievers with equal values give equal answers. None
      without a retriever: the only identity in the log.

  Raises:
    ValueError: an identity is needed.
    RetrievalError: the log is missing or is not a log of answers.

  `counters` has the `hits` (answers from the log), the `misses`, the `failures`
  among the misses, the answers `recorded`, and the `conflicts`.
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
    self._log = AnswerLog(path, writable=mode != "strict")
    self.close = self._log.close  # The retriever stays open.
    if identity is None:
      known = self._log.identities()
      if retriever is not None or len(known) != 1:
        self._log.close()
        raise ValueError(
          f"No identity is given, and {self._log.path} holds answers of "
          f"{', '.join(known) or 'no retriever'}; pass the retriever's "
          "identity."
        )
      identity = json.loads(known[0])
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
  ) -> list[Sequence[types.Passage] | Exception]:
    """Is `search_many` if the retriever has it, which gets all misses at once.

    A request has passages, the retriever's exception or, in mode strict, a
    `MissError`. Raises RetrievalError if the log cannot be read or written.
    """
    keys = [Key(r.query, r.k, r.corpus, self._identity) for r in requests]
    held: list[Any] = [None] * len(keys)
    if self._mode != "record":
      held = await asyncio.to_thread(self._log.read, keys)
    missing = [i for i, answer in enumerate(held) if answer is None]
    self.counters["hits"] += len(keys) - len(missing)
    self.counters["misses"] += len(missing)
    if missing and self._retriever is None:
      known = await asyncio.to_thread(self._log.identities)
      for i in missing:
        held[i] = self._miss(keys[i], known)
    elif missing:
      found = await requests_lib.answers(
        self._retriever, [requests[i] for i in missing]
      )
      # As the log returns them: in a tuple, with scores of Python.
      good = {
        i: tuple(types.Passage(*_texts(p), float(p.score)) for p in answer)
        for i, answer in zip(missing, found, strict=True)
        if not isinstance(answer, Exception)
      }
      written, new, others = await asyncio.to_thread(
        self._log.write, [(keys[i], answer) for i, answer in good.items()]
      )
      # The log's answers, which may be older ones, and the exceptions.
      for i, answer in (*zip(missing, found), *zip(good, written)):
        held[i] = answer
      self.counters["failures"] += len(missing) - len(good)
      self.counters["recorded"] += new
      self.counters["conflicts"] += others
    return held

  def identity(self) -> Any:
    """Returns JSON values that identify the retriever that answers or did."""
    return json.loads(self._identity)

  def _miss(self, key: Key, known: list[str]) -> MissError:
    hint = f" It holds answers of {', '.join(known) or 'nobody'} only."
    hint = "" if key.identity in known else hint
    return MissError(
      f"{self._log.path}: found no answer to {key.query!r} with k={key.k}, "
      f"corpus {key.corpus!r}, identity {key.identity}.{hint} Record it in "
      "mode replay with the retriever."
    )
