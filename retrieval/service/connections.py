"""Connections of a uvicorn server that end, and are never too many.

uvicorn waits for the rest of a request's headers, and for a client to read its
answer, without end. So a few hundred connections that send half a request keep
everybody else out once the process has no file descriptor left.
"""

from __future__ import annotations

import asyncio
import os
import resource
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http import httptools_impl

# Descriptors for files that are opened later, and connections just accepted.
_SPARE = 32
_FEWEST = 8
_FULL = (
  b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\n"
  b"connection: close\r\nretry-after: 1\r\ncontent-length: %d\r\n\r\n%b"
)
_SENTENCE = b'{"detail":"Every connection of this server is busy; try later."}'


class Guard:
  """What the connections of one server share; makes their protocols.

  Args:
    most: connections at a time. One more takes the place of the one that has
      waited longest without a whole request, and is refused where none waits.
    headers: seconds from a request's first byte, or from connecting, to the end
      of its headers.
    request: seconds from there until its answer has been read.
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
    # In the order in which they began to wait.
    self.waiting: dict[_Protocol, None] = {}

  def protocol(self, **server: Any) -> asyncio.Protocol:
    """The protocol of a connection, as `uvicorn.Config(http=...)` wants it."""
    return _Protocol(self, **server)


class _Protocol(httptools_impl.HttpToolsProtocol):
  """uvicorn's protocol with a deadline for whatever it waits for."""

  def __init__(self, guard: Guard, **server: Any):
    super().__init__(**server)
    self._guard = guard
    self._deadline: asyncio.TimerHandle | None = None

  def connection_made(self, transport: asyncio.Transport) -> None:
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
    if self._deadline is None:  # The first of another request.
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
      return  # It closes, or goes on with a request that has come already.
    self._guard.waiting[self] = None
    # uvicorn counts an answer as sent that the client has not begun to read,
    # and a transport that is closed waits for it. Without one, uvicorn's own
    # deadline counts until the next request.
    if not self.transport.get_write_buffer_size():
      self._stop()

  def end(self, reason: str) -> None:
    """Closes the connection; what was not sent by then is lost."""
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
  """Connections that this process may hold, and its limit of descriptors.

  The soft limit (`ulimit -n`) is raised as far as it helps and is allowed.

  Args:
    wanted: connections; the result is not larger.

  Raises:
    ValueError: there is room for hardly any.
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
      f"This process may open {limit} files and needs {used} of them, which "
      f"leaves {max(limit - used, 0)} connections; expected {_FEWEST} or more. "
      "Raise the limit (ulimit -n 4096)."
    )
  return min(wanted, limit - used), limit
