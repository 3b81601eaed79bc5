"""Keys of clients, and the quota of each.

A file lists the keys by their SHA-256, so that reading it gives no access:

    {"alice": {"sha256": "...", "requests": 4, "searches_a_day": 1000,
               "tokens_a_day": 1000000, "max_budget": 5}}

The usage of each key and day is in an SQLite file beside it, so it outlives
restarts. A request is charged its whole budget and token limit when it is
admitted, and the unused part is refunded at its end: a key cannot exceed its
daily quota, however its requests overlap. If the server is killed, nothing is
refunded.
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
from anysearch_jax.host import disk, json_files, openai_requests, run_lock

_NAME = settings.Range(
  "letters, digits, '.', '_' and '-'",
  re.compile(r"[A-Za-z0-9._-]{1,64}").fullmatch,  # type: ignore[arg-type]
)
_PREFIX = "sk-anysearch-"
_SECONDS_A_DAY = 86_400
_log = logging.getLogger(__name__)
_TABLE = (
  "CREATE TABLE IF NOT EXISTS used (key TEXT, day TEXT, searches INTEGER, "
  "tokens INTEGER, PRIMARY KEY (key, day))"
)


@dataclasses.dataclass(frozen=True)
class Key:
  """A client's key.

  Attributes:
    name: the client's name, for logs.
    sha256: hash of the key, 64 hexadecimal digits.
    requests: limit of requests at a time.
    searches_a_day, tokens_a_day: limits of a day (UTC); none by default.
    max_budget: limit of the searches of one request; none by default.
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
    ValueError: the file has another form than the module describes. The error
      shows no hash.
  """
  listed = json_files.read(path, missing={})
  if not listed:
    raise ValueError(
      f"--keys={path}: found no keys; make one by --keys={path} --new_key=NAME."
    )
  return tuple(_key(path, name, values) for name, values in listed.items())


def _key(path: pathlib.Path, name: str, values: Any) -> Key:
  location = f"--keys={path}: key {name!r}"
  settings_of_key = values if isinstance(values, Mapping) else {}
  # Checked first; the error omits the value, which may be the key itself.
  if not re.fullmatch(r"[0-9a-f]{64}", str(settings_of_key.get("sha256"))):
    raise ValueError(
      f"{location}: sha256 is not one, expected 64 hexadecimal digits "
      "(--new_key writes them)."
    )
  key = settings.from_dict(
    Key, {**settings_of_key, "name": name}, path=location
  )
  settings.check(key, location)
  return key


def add(path: pathlib.Path, name: str) -> str:
  """Adds a new key to a file of keys.

  Returns:
    The key itself, which is stored nowhere.

  Raises:
    ValueError: the name is taken or invalid, the file is damaged, or another
      process is adding a key.
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
    path: SQLite file of their usage; it is made if it is missing.
    file: the file of the keys, which is read again when it has changed; None:
      the keys never change. If the file is gone or lists no key, every request
      is refused. If it is damaged, as in the middle of an edit, the last good
      keys hold and the log says so.
    now: returns the time in a time zone.

  Raises:
    ValueError: the file is damaged or cannot be written.
  """

  def __init__(
    self,
    keys: tuple[Key, ...],
    path: pathlib.Path,
    *,
    file: pathlib.Path | None = None,
    now: Callable[..., datetime.datetime] = datetime.datetime.now,
  ):
    self.keys = keys
    self._file = file
    self._version: tuple[int, ...] | None = None
    self._now = now
    self._running: Counter[str] = Counter()  # Requests, by the key's name.
    try:
      disk.create_private(path)
      self._database = sqlite3.connect(
        path, timeout=10, check_same_thread=False
      )
      self._database.execute("PRAGMA journal_mode=WAL")
      self._database.execute(_TABLE)
      self._database.commit()
    except sqlite3.Error as error:
      raise ValueError(
        f"{path}: {error}; expected the file of what keys have used today. "
        "Without it their day begins again."
      ) from error

  def close(self) -> None:
    """Closes the file."""
    self._database.close()

  def authenticate(self, header: str | None) -> Key:
    """Returns the key of an `Authorization` header.

    All keys are compared, each in constant time, so the time of this call
    reveals nothing about a key.

    Raises:
      openai_requests.RequestError: 401, there is no such key.
    """
    self._read_again()
    scheme, _, secret = (header or "").partition(" ")
    digest = _hash(secret.strip())
    matches = [hmac.compare_digest(key.sha256, digest) for key in self.keys]
    if not any(matches) or scheme.lower() != "bearer":
      raise openai_requests.RequestError(
        401,
        "Found no key of this service, expected one in the header "
        "'Authorization: Bearer KEY'.",
        code="invalid_api_key",
      )
    return self.keys[matches.index(True)]

  def knows(self, name: str) -> bool:
    """Returns whether there is a key of a name."""
    self._read_again()
    return any(key.name == name for key in self.keys)

  def _read_again(self) -> None:
    """Reads the file of keys if it is another one than at the last look."""
    if self._file is None:
      return
    # Looked at before it is read: a change in between is read the next time.
    version = _version(self._file)
    if version == self._version:
      return
    self._version = version
    try:
      listed = json_files.read(self._file, missing={})
      self.keys = read(self._file) if listed else ()
    except (ValueError, OSError) as error:
      _log.error("%s The last good keys hold until it is mended.", error)
      return
    if not self.keys:
      _log.error("%s lists no keys: every request is refused.", self._file)

  @contextlib.contextmanager
  def admitted(
    self,
    key: Key,
    *,
    searches: int,
    tokens: int,
    used: Callable[[], tuple[int, int]],
  ) -> Iterator[None]:
    """Charges a key while a request runs, and refunds the unused part.

    Args:
      key: the key of the request.
      searches, tokens: the most that the request can use.
      used: called at the end of the request; returns the searches and tokens
        that it used.

    Raises:
      openai_requests.RequestError: 429, the key has too many requests at a
        time or has used up its day; 400, the budget exceeds that of the key;
        503, the usage cannot be written.
    """
    if searches > key.max_budget:
      raise openai_requests.refuse(
        "max_tool_calls", searches, f"at most {key.max_budget} for this key"
      )
    if self._running[key.name] >= key.requests:
      raise openai_requests.RequestError(
        429,
        f"Found {key.requests} requests of this key under way, expected fewer; "
        "wait for one to end.",
        code="rate_limit_exceeded",
        retry_after=1,
      )
    day = self._now(datetime.UTC).date().isoformat()
    with self._written():
      # The lock keeps other processes from charging between check and charge.
      self._database.execute("BEGIN IMMEDIATE")
      self._check(key, searches, tokens)
      self._charge(key, day, searches, tokens)
    self._running[key.name] += 1
    try:
      yield
    finally:
      self._running[key.name] -= 1
      used_searches, used_tokens = used()
      # A refund that cannot be written is lost; it is no error of the request.
      with contextlib.suppress(openai_requests.RequestError):
        self._charge(
          key,
          day,
          searches=min(used_searches - searches, 0),
          tokens=min(used_tokens - tokens, 0),
        )

  def usage_today(self, key: Key) -> tuple[int, int]:
    """Returns the searches and tokens that a key was charged today."""
    day = self._now(datetime.UTC).date().isoformat()
    row = self._database.execute(
      "SELECT searches, tokens FROM used WHERE key = ? AND day = ?",
      (key.name, day),
    ).fetchone()
    return row or (0, 0)

  def _check(self, key: Key, searches: int, tokens: int) -> None:
    """Raises RequestError if a request may exceed a quota of its key."""
    used_searches, used_tokens = self.usage_today(key)
    now = self._now(datetime.UTC)
    seconds_to_midnight = (
      _SECONDS_A_DAY - (now.hour * 60 + now.minute) * 60 - now.second
    )
    for unit, used, needed, quota in (
      ("searches", used_searches, searches, key.searches_a_day),
      ("tokens", used_tokens, tokens, key.tokens_a_day),
    ):
      if used + needed > quota:
        # Running requests may refund a part of their reservation.
        soon = self._running[key.name] > 0 and needed <= quota
        raise openai_requests.RequestError(
          429,
          f"This key has used or reserved {used} of its {quota} {unit} of "
          f"today (UTC), and this request may need {needed}; ask for less, or "
          f"{'when a request has ended' if soon else 'tomorrow'}.",
          code="rate_limit_exceeded" if soon else "insufficient_quota",
          retry_after=1 if soon else seconds_to_midnight,
        )

  @contextlib.contextmanager
  def _written(self) -> Iterator[None]:
    """Commits the changes of the block, all of them or none."""
    try:
      with self._database:
        yield
    except sqlite3.Error as error:
      _log.error("What keys use today cannot be written: %s", error)
      raise openai_requests.RequestError(
        503,
        "The service cannot write what its keys use now; ask later.",
        retry_after=5,
      ) from error

  def _charge(self, key: Key, day: str, searches: int, tokens: int) -> None:
    with self._written():
      self._database.execute(
        "INSERT INTO used VALUES (?, ?, ?, ?) ON CONFLICT (key, day) DO UPDATE "
        "SET searches = searches + excluded.searches, "
        "tokens = tokens + excluded.tokens",
        (key.name, day, searches, tokens),
      )


def _version(file: pathlib.Path) -> tuple[int, ...] | None:
  """Returns values that differ after a change of a file; None if it is gone."""
  try:
    status = file.stat()
  except OSError:
    return None
  return status.st_mtime_ns, status.st_size, status.st_ino


def _hash(key: str) -> str:
  return hashlib.sha256(key.encode()).hexdigest()
