"""Deadlines and a limit for the connections of a uvicorn server.

uvicorn waits without limit for the rest of a request's headers and for a client
to read its answer. A few hundred connections with half a request could use up
all file descriptors of the process and so keep other clients out.
"""

from __future__ import annotations

import asyncio
import os
import resource
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http import httptools_impl

# Descriptors reserved for files opened later and connections just accepted.
_SPARE = 32
_FEWEST = 8
_FULL = (
  b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\n"
  b"connection: close\r\nretry-after: 1\r\ncontent-length: %d\r\n\r\n%b"
)
_SENTENCE = b'{"detail":"Every connection of this server is busy; try later."}'


class Guard:
  """The shared state of a server's connections; makes their protocols.

  Args:
    most: the most connections at a time. A further one replaces the connection
      that has waited longest without a complete request; if there is none, the
      new connection is refused.
    headers: seconds from a request's first byte, or from connecting, to the end
      of its headers.
    request: seconds from the end of its headers until its answer has been read.
    on_closed: called with the reason for each connection that is closed early:
      "headers", "request", "replaced" or "full".
  """

  def __init__(
    self,
    most: int,
    *,
    headers: float,
    request: float,
    on_closed: Callable[[str], None],
  ):
    self.most, self.headers, self.request = most, headers, request
    self.on_closed = on_closed
    # Connections that wait for a complete request, in the order they began to.
    self.waiting: dict[_Protocol, None] = {}

  def protocol(self, **server: Any) -> asyncio.Protocol:
    """Returns the protocol of a connection, for `uvicorn.Config(http=...)`."""
    return _Protocol(self, **server)


class _Protocol(httptools_impl.HttpToolsProtocol):
  """uvicorn's protocol with a deadline for each wait."""

  def __init__(self, guard: Guard, **server: Any):
    super().__init__(**server)
    self._guard = guard
    self._deadline: asyncio.TimerHandle | None = None

  def connection_made(  # type: ignore[override]  # As uvicorn declares it.
    self, transport: asyncio.Transport
  ) -> None:
    super().connection_made(transport)
    guard = self._guard
    if len(self.connections) > guard.most:
      longest = next(iter(guard.waiting), None)
      if longest is None:
        guard.on_closed("full")
        transport.write(_FULL % (len(_SENTENCE), _SENTENCE))
        transport.close()
        return
      longest.end("replaced")
    guard.waiting[self] = None
    self._end_after(guard.headers, "headers")

  def connection_lost(self, exc: Exception | None) -> None:
    self._guard.waiting.pop(self, None)
    self._stop()
    super().connection_lost(exc)

  def data_received(self, data: bytes) -> None:
    if self._deadline is None:  # The first byte of a new request.
      self._end_after(self._guard.headers, "headers")
    super().data_received(data)

  def on_headers_complete(self) -> None:
    self._end_after(self._guard.request, "request")
    super().on_headers_complete()

  def on_message_complete(self) -> None:
    self._guard.waiting.pop(self, None)
    super().on_message_complete()

  def on_response_complete(self) -> None:
    super().on_response_complete()
    if self.timeout_keep_alive_task is None:
      return  # The connection closes, or a pipelined request is next.
    self._guard.waiting[self] = None
    # uvicorn considers an answer sent even if the client has not begun to read
    # it, so our deadline stays until the write buffer is empty. After that,
    # uvicorn's keep-alive timeout applies until the next request.
    if not self.transport.get_write_buffer_size():
      self._stop()

  def end(self, reason: str) -> None:
    """Aborts the connection; unsent data is lost."""
    self._guard.waiting.pop(self, None)
    self._stop()
    self._guard.on_closed(reason)
    self.transport.abort()

  def _end_after(self, seconds: float, reason: str) -> None:
    self._stop()
    if not self.transport.is_closing():
      self._deadline = self.loop.call_later(seconds, self.end, reason)

  def _stop(self) -> None:
    if self._deadline is not None:
      self._deadline.cancel()
      self._deadline = None


def room(wanted: int) -> tuple[int, int]:
  """Returns how many connections this process can hold, and its file limit.

  The soft limit (`ulimit -n`) is raised as far as needed and allowed.

  Args:
    wanted: the number of connections wanted; the result is at most this.

  Raises:
    ValueError: fewer than 8 connections are possible.
  """
  used = len(os.listdir("/dev/fd")) + _SPARE
  soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
  limit = max(soft, min(hard, used + wanted))
  if hard == resource.RLIM_INFINITY:
    limit = max(soft, used + wanted)
  if limit != soft:
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
  if limit - used < _FEWEST:
    raise ValueError(
      f"This process may open {limit} files and uses {used} of them, which "
      f"leaves {max(limit - used, 0)} connections; expected {_FEWEST} or more. "
      "Raise the limit (ulimit -n 4096)."
    )
  return min(wanted, limit - used), limit
