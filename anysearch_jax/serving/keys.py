"""Keys of clients, and what each may cost.

A file lists the keys by their SHA-256, so that reading it gives no access:

    {"alice": {"sha256": "...", "requests": 4, "searches_a_day": 1000,
               "tokens_a_day": 1000000, "max_budget": 5}}

A request is charged its whole budget and token limit when it is admitted, and
what it did not use is given back at its end: no timing lets a key exceed its
day. A server counts by itself, from its start.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import hashlib
import hmac
import os
import pathlib
import re
import secrets
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from anysearch_jax import budgets
from anysearch_jax.config import settings
from anysearch_jax.host import json_files
from anysearch_jax.serving import fields

_NAME = settings.Range(
  "letters, digits, '.', '_' and '-'",
  re.compile(r"[A-Za-z0-9._-]{1,64}").fullmatch,  # type: ignore[arg-type]
)
_PREFIX = "sk-anysearch-"


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

  Raises ValueError if the name is taken or cannot be one, or if the file is
  damaged.
  """
  settings.check(Key(name), "--new_key")
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
  """Admits the requests of known keys within their limits, in one event loop.

  Args:
    keys: the known keys.
    now: returns the time in a time zone.
  """

  def __init__(
    self,
    keys: tuple[Key, ...],
    *,
    now: Callable[..., datetime.datetime] = datetime.datetime.now,
  ):
    self.keys = keys
    self._now = now
    self._running: Counter[str] = Counter()
    # By name of the key and day.
    self._searches: Counter[tuple[str, str]] = Counter()
    self._tokens: Counter[tuple[str, str]] = Counter()

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
        day; 400, its requests may not have such a budget.
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
    day = self._day(key)
    self._check(key, "searches", self._searches[day], searches)
    self._check(key, "tokens", self._tokens[day], tokens)
    self._searches[day] += searches
    self._tokens[day] += tokens
    self._running[key.name] += 1
    try:
      yield
    finally:
      self._running[key.name] -= 1
      used_searches, used_tokens = used()
      self._searches[day] -= max(searches - used_searches, 0)
      self._tokens[day] -= max(tokens - used_tokens, 0)

  def used(self, key: Key) -> tuple[int, int]:
    """Returns the searches and tokens that a key was charged today."""
    day = self._day(key)
    return self._searches[day], self._tokens[day]

  def _day(self, key: Key) -> tuple[str, str]:
    return key.name, self._now(datetime.UTC).date().isoformat()

  def _check(self, key: Key, unit: str, charged: int, wanted: int) -> None:
    """Refuses a request that may need more of a unit than its day has left."""
    limit = getattr(key, f"{unit}_a_day")
    if charged + wanted <= limit:
      return
    now = self._now(datetime.UTC)
    seconds = 86_400 - (now.hour * 60 + now.minute) * 60 - now.second
    # What is under way may give back what it reserved.
    soon = self._running[key.name] > 0 and wanted <= limit
    raise fields.RequestError(
      429,
      f"This key has used or reserved {charged} of its {limit} {unit} of "
      f"today (UTC), and this request may need {wanted}; ask for less, or "
      f"{'when a request has ended' if soon else 'tomorrow'}.",
      code="rate_limit_exceeded" if soon else "insufficient_quota",
      retry_after=1 if soon else seconds,
    )


def _hash(key: str) -> str:
  return hashlib.sha256(key.encode()).hexdigest()
