"""Connections to one database of PostgreSQL, each use with a deadline."""

from __future__ import annotations

import contextlib
import math
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import psycopg
from psycopg import conninfo

from anysearch_jax import types
from anysearch_jax.host.http import redaction

T = TypeVar("T")
Connection = psycopg.Connection[tuple[Any, ...]]

# Seconds that the client waits longer than the server, which ends its
# statements itself.
_GRACE = 5.0
# Seconds between attempts to connect again.
_PAUSE = 0.2


class Server:
  """A database; usable from any thread.

  Args:
    address: libpq's address without a password, such as
      `postgresql://user@host:5432/database` or `host=h dbname=d user=u`.
    password: the password; "": libpq's own ways (PGPASSWORD, a .pgpass file).
    timeout: seconds that a use of a connection may take, and seconds that
      connecting may.
    connections: the most open connections.

  Raises:
    ValueError: the address is invalid or has a password in it.

  `counters` has the `reconnects`.
  """

  def __init__(
    self,
    address: str,
    *,
    password: str = "",
    timeout: float = 30.0,
    connections: int = 4,
  ):
    self._options = _options(address, timeout) | {"password": password or None}
    self._quote = redaction.Redactor(password).quote
    self.timeout, self.connections = timeout, connections
    self._allowed = threading.BoundedSemaphore(connections)
    self._idle: list[Connection] = []
    self._reached = False
    self._prepare: Callable[[Connection], None] = lambda connection: None
    self.counters: Counter[str] = Counter()

  @property
  def name(self) -> str:
    """The host and the database, for messages."""
    where = self._options.get("host") or self._options.get("hostaddr")
    return f"{where or 'localhost'}/{self._options.get('dbname') or ''}"

  def prepare_with(self, prepare: Callable[[Connection], None]) -> None:
    """Sets what each new connection begins with; closes those that are idle."""
    self._prepare = prepare
    self.close()

  def run(
    self, work: Callable[[Connection], T], seconds: float | None = None
  ) -> T:
    """Returns what `work` returns, called with a connection (autocommit).

    A connection that was lost since its last use, as when the server was
    restarted, is replaced and `work` called again, within these seconds.

    Args:
      work: uses the connection; repeatable.
      seconds: limit on the whole, with the waits for a connection and for the
        server; None: `timeout`.

    Raises:
      psycopg.Error: a statement failed.
      types.RetrievalError: the server cannot be reached.
    """
    seconds = self.timeout if seconds is None else seconds
    end = time.monotonic() + seconds
    if not self._allowed.acquire(timeout=seconds):
      raise types.RetrievalError(
        f"PostgreSQL at {self.name}: all {self.connections} connections were "
        f"busy for {seconds:g} s."
      )
    try:
      while (connection := self._free()) is not None:
        try:
          return self._use(connection, work, end)
        except psycopg.OperationalError:
          if not connection.closed or time.monotonic() >= end:
            raise
          self.counters["reconnects"] += 1
      return self._use(self._connected(end), work, end)
    finally:
      self._allowed.release()

  def said(self, error: Exception) -> str:
    """Returns an error's words in one line, without the password."""
    text = " ".join(str(error).split()) or type(error).__name__
    return self._quote(text, 300)

  def close(self) -> None:
    """Closes the idle connections."""
    while (connection := self._free()) is not None:
      connection.close()

  def _free(self) -> Connection | None:
    """Takes an idle connection."""
    try:
      return self._idle.pop()
    except IndexError:
      return None

  def _use(
    self, connection: Connection, work: Callable[[Connection], T], end: float
  ) -> T:
    try:
      with _limited(connection, end):
        return work(connection)
    finally:
      idle = psycopg.pq.TransactionStatus.IDLE
      if connection.info.transaction_status == idle:
        self._idle.append(connection)
      else:
        connection.close()

  def _connected(self, end: float) -> Connection:
    """Connects; again and again if the server was reached before."""
    end = min(end, time.monotonic() + self.timeout)
    while True:
      try:
        connection: Connection = psycopg.connect(
          **self._options, autocommit=True, prepare_threshold=None
        )
        break
      except psycopg.Error as error:
        if not self._reached or time.monotonic() + _PAUSE > end:
          raise types.RetrievalError(
            f"PostgreSQL at {self.name} cannot be reached ({self.said(error)})"
          ) from None
        time.sleep(_PAUSE)
    try:
      with _limited(connection, end):
        self._prepare(connection)
    except BaseException:
      connection.close()
      raise
    self._reached = True
    return connection


def _options(address: str, timeout: float) -> dict[str, Any]:
  """Returns the address as libpq's options, with timeouts."""
  expected = (
    "expected an address such as postgresql://user@host:5432/database or "
    "host=127.0.0.1 dbname=database"
  )
  try:
    values = conninfo.conninfo_to_dict(address)
  except psycopg.ProgrammingError:
    # libpq's message may quote a password.
    raise ValueError(
      f"postgres: found one that libpq cannot read, which is not shown; "
      f"{expected}."
    ) from None
  if not values:
    raise ValueError(f"postgres: found {address!r}, {expected}.")
  # A password with a slash in it ends up in the name of the database.
  slashed = "@" in str(values.get("dbname", ""))
  if slashed or values.keys() & {"password", "sslpassword"}:
    raise ValueError(
      "postgres: found an address with a password, which is not shown; "
      "expected one without. Put the password into an environment variable and "
      "name it by key_variable, or into libpq's own password file."
    )
  milliseconds = str(int((timeout + _GRACE) * 1000))
  return {
    "application_name": "anysearch_jax",
    "client_encoding": "utf8",
    "connect_timeout": str(max(2, int(timeout))),
    "keepalives_idle": "10",
    "keepalives_interval": "5",
    "keepalives_count": "3",
    "tcp_user_timeout": milliseconds,
  } | values


def limit(connection: Connection, end: float, least: float = 1e-3) -> None:
  """Limits each further statement to `end` (of `time.monotonic`).

  Args:
    connection: in use.
    end: when a statement that starts now is ended.
    least: seconds that it has even if that is sooner.
  """
  left = max(end - time.monotonic(), least)
  connection.execute(
    "SELECT set_config('statement_timeout', %s, false)",
    [f"{math.ceil(left * 1000)}ms"],
  )


@contextlib.contextmanager
def _limited(connection: Connection, end: float) -> Iterator[None]:
  """Ends statements at `end` (of `time.monotonic`), and then the connection."""
  left = max(end - time.monotonic(), 1e-3)
  # A server that hangs does not end its statements, so the client hangs up.
  watchdog = threading.Timer(left + _GRACE, _hang_up, [connection])
  watchdog.daemon = True
  watchdog.start()
  try:
    limit(connection, end)
    yield
  finally:
    watchdog.cancel()


def _hang_up(connection: Connection) -> None:
  """Ends the wait of the thread that uses a connection."""
  with contextlib.suppress(psycopg.Error, OSError):
    with socket.socket(fileno=os.dup(connection.fileno())) as duplicate:
      duplicate.shutdown(socket.SHUT_RDWR)
