"""Keys of clients, and what each may cost.

A file lists the keys by their SHA-256, so that reading it gives no access:

    {"alice": {"sha256": "...", "requests": 4, "searches_a_day": 1000,
               "tokens_a_day": 1000000, "max_budget": 5}}

What a key used today is kept in an SQLite file beside it and outlives restarts.
A request is charged its whole budget and token limit when it is admitted, and
what it did not use is given back at its end: no timing lets a key exceed its
day. A process that is killed gives nothing back.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import hashlib
import hmac
import logging
import os
import pathlib
import re
import secrets
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from anysearch_jax import budgets
from anysearch_jax.config import settings
from anysearch_jax.host import json_files, run_lock
from anysearch_jax.serving import fields

_NAME = settings.Range(
  "letters, digits, '.', '_' and '-'",
  re.compile(r"[A-Za-z0-9._-]{1,64}").fullmatch,  # type: ignore[arg-type]
)
_PREFIX = "sk-anysearch-"
_log = logging.getLogger(__name__)
_TABLE = (
  "CREATE TABLE IF NOT EXISTS used (key TEXT, day TEXT, searches INTEGER, "
  "tokens INTEGER, PRIMARY KEY (key, day))"
)


@dataclasses.dataclass(frozen=True)
class Key:
  """A client's key.

  Attributes:
    name: of the client, for logs.
    sha256: of the key, in hexadecimal.
    requests: the most at a time.
    searches_a_day, tokens_a_day: the most in a day (UTC); no limit by default.
    max_budget: the most searches of one request.
  """

  name: str = settings.placement("", _NAME)
  sha256: str = settings.placement("")
  requests: int = settings.placement(4, settings.at_least(1))
  searches_a_day: int = settings.placement(
    budgets.UNCAPPED, settings.at_least(0)
  )
  tokens_a_day: int = settings.placement(budgets.UNCAPPED, settings.at_least(0))
  max_budget: int = settings.placement(budgets.UNCAPPED, settings.at_least(0))


def read(path: pathlib.Path) -> tuple[Key, ...]:
  """Reads a file of keys.

  Raises:
    ValueError: the file is not as the module describes; no hash is shown.
  """
  listed = json_files.read(path, missing={})
  if not listed:
    raise ValueError(
      f"--keys={path}: found no keys; make one by --keys={path} --new_key=NAME."
    )
  return tuple(_key(path, name, values) for name, values in listed.items())


def _key(path: pathlib.Path, name: str, values: Any) -> Key:
  where = f"--keys={path}: key {name!r}"
  found = values if isinstance(values, Mapping) else {}
  # Checked first and without its value, which may be the key itself.
  if not re.fullmatch(r"[0-9a-f]{64}", str(found.get("sha256"))):
    raise ValueError(
      f"{where}: sha256 is not one, expected 64 hexadecimal digits (--new_key "
      "writes them)."
    )
  key = settings.from_dict(Key, {**found, "name": name}, path=where)
  settings.check(key, where)
  return key


def add(path: pathlib.Path, name: str) -> str:
  """Adds a key to a file of keys and returns it; it is stored nowhere else.

  Raises ValueError if the name is taken or cannot be one, if the file is
  damaged, or while another process adds a key.
  """
  settings.check(Key(name), "--new_key")
  with run_lock.hold(run_lock.path_beside(path)):
    listed = json_files.read(path, missing={})
    if name in listed:
      raise ValueError(
        f"--new_key: {path} has a key {name!r}; remove it there, or "
        "choose another name."
      )
    key = _PREFIX + secrets.token_urlsafe(32)
    listed[name] = {"sha256": _hash(key), "requests": Key.requests}
    json_files.write(path, listed)
    os.chmod(path, 0o600)
  return key


class Guard:
  """Admits the requests of known keys within their limits.

  Args:
    keys: the known keys.
    path: SQLite file of what was used; it is made if it is missing.
    now: returns the time in a time zone.

  Raises:
    ValueError: the file is damaged or cannot be written.
  """

  def __init__(
    self,
    keys: tuple[Key, ...],
    path: pathlib.Path,
    *,
    now: Callable[..., datetime.datetime] = datetime.datetime.now,
  ):
    self.keys, self._now = keys, now
    self._running: Counter[str] = Counter()
    try:
      self._rows = sqlite3.connect(path, timeout=10, check_same_thread=False)
      self._rows.execute("PRAGMA journal_mode=WAL")
      self._rows.execute(_TABLE)
      self._rows.commit()
    except sqlite3.Error as error:
      raise ValueError(
        f"{path}: {error}; expected the file of what keys have used today. "
        "Without it their day begins again."
      ) from error

  def close(self) -> None:
    """Closes the file."""
    self._rows.close()

  def key(self, header: str | None) -> Key:
    """Returns the key of an `Authorization` header.

    Every known key is compared, each in constant time, so the time that this
    takes says nothing about a key.

    Raises:
      fields.RequestError: 401, there is no such key.
    """
    scheme, _, given = (header or "").partition(" ")
    digest = _hash(given.strip())
    same = [hmac.compare_digest(key.sha256, digest) for key in self.keys]
    if not any(same) or scheme.lower() != "bearer":
      raise fields.RequestError(
        401,
        "Found no key of this service, expected one in the header "
        "'Authorization: Bearer KEY'.",
        code="invalid_api_key",
      )
    return self.keys[same.index(True)]

  @contextlib.contextmanager
  def admitted(
    self,
    key: Key,
    *,
    searches: int,
    tokens: int,
    used: Callable[[], tuple[int, int]],
  ) -> Iterator[None]:
    """Charges a key while a request runs.

    Args:
      key: whose request it is.
      searches, tokens: the most that the request can use.
      used: returns, at its end, the searches and tokens that it did use.

    Raises:
      fields.RequestError: 429, the key has too many requests or has used up its
        day; 400, its requests may not have such a budget; 503, what it uses
        cannot be written.
    """
    if searches > key.max_budget:
      raise fields.refuse(
        "max_tool_calls", searches, f"at most {key.max_budget} for this key"
      )
    if self._running[key.name] >= key.requests:
      raise fields.RequestError(
        429,
        f"Found {key.requests} requests of this key under way, expected fewer; "
        "wait for one to end.",
        code="rate_limit_exceeded",
        retry_after=1,
      )
    day = self._now(datetime.UTC).date().isoformat()
    with self._written():
      # No other process charges between the check and the charge.
      self._rows.execute("BEGIN IMMEDIATE")
      self._check(key, searches, tokens)
      self._charge(key, day, searches, tokens)
    self._running[key.name] += 1
    try:
      yield
    finally:
      self._running[key.name] -= 1
      n, written = used()
      with contextlib.suppress(fields.RequestError):  # Nothing is given back.
        self._charge(key, day, min(n - searches, 0), min(written - tokens, 0))

  def used(self, key: Key) -> tuple[int, int]:
    """Returns the searches and tokens that a key was charged today."""
    day = self._now(datetime.UTC).date().isoformat()
    row = self._rows.execute(
      "SELECT searches, tokens FROM used WHERE key = ? AND day = ?",
      (key.name, day),
    ).fetchone()
    return row or (0, 0)

  def _check(self, key: Key, searches: int, tokens: int) -> None:
    used, now = self.used(key), self._now(datetime.UTC)
    left = 86_400 - (now.hour * 60 + now.minute) * 60 - now.second
    for what, before, wanted, most in (
      ("searches", used[0], searches, key.searches_a_day),
      ("tokens", used[1], tokens, key.tokens_a_day),
    ):
      if before + wanted > most:
        # What is under way may give back what it reserved.
        soon = self._running[key.name] > 0 and wanted <= most
        raise fields.RequestError(
          429,
          f"This key has used or reserved {before} of its {most} {what} of "
          f"today (UTC), and this request may need {wanted}; ask for less, or "
          f"{'when a request has ended' if soon else 'tomorrow'}.",
          code="rate_limit_exceeded" if soon else "insufficient_quota",
          retry_after=1 if soon else left,
        )

  @contextlib.contextmanager
  def _written(self) -> Iterator[None]:
    """Writes what the block changes, all of it or nothing."""
    try:
      with self._rows:
        yield
    except sqlite3.Error as error:
      _log.error("What keys use today cannot be written: %s", error)
      raise fields.RequestError(
        503,
        "The service cannot write what its keys use now; ask later.",
        retry_after=5,
      ) from error

  def _charge(self, key: Key, day: str, searches: int, tokens: int) -> None:
    with self._written():
      self._rows.execute(
        "INSERT INTO used VALUES (?, ?, ?, ?) ON CONFLICT (key, day) DO UPDATE "
        "SET searches = searches + excluded.searches, "
        "tokens = tokens + excluded.tokens",
        (key.name, day, searches, tokens),
      )


def _hash(key: str) -> str:
  return hashlib.sha256(key.encode()).hexdigest()
