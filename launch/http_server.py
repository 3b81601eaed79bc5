"""Listens for an HTTP service until a signal arrives.

Ctrl-C, SIGTERM or SIGHUP stop the server: it answers open requests within the
grace and returns. Until then it still listens, so that the service can tell new
clients that it stops. A second signal ends it at once.

uvicorn waits without limit for the rest of a request's headers and for a client
to read its answer. A few hundred connections with half a request could use up
all file descriptors of the process and so keep other clients out. `Guard` gives
each wait a deadline, and limits the connections.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import ipaddress
import os
import resource
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn
from uvicorn.protocols.http import httptools_impl

from launch import stopping

# Seconds. Longer than clients keep idle connections; otherwise a client may
# write into a connection that the server has just closed.
_KEEP_ALIVE = 75
_BACKLOG = 2048
# Connections that asyncio accepts in one iteration of the event loop. It
# accepts up to its backlog before the first connection is handled, so with a
# large backlog a burst would use up all file descriptors despite our limit:
# https://github.com/python/cpython/blob/3.11/Lib/asyncio/selector_events.py#L159
_ACCEPTED = 8
_POLL = 0.05
# Seconds within which a client must read its answer.
_READING = 60
# Descriptors reserved for files opened later and connections just accepted.
_SPARE = 32
_FEWEST = 8
_FULL = (
  b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\n"
  b"connection: close\r\nretry-after: 1\r\ncontent-length: %d\r\n\r\n%b"
)
_SENTENCE = b'{"detail":"Every connection of this server is busy; try later."}'


class Server(uvicorn.Server):
  """A uvicorn server that exits normally on signals and drains the service."""

  def __init__(
    self,
    config: uvicorn.Config,
    service: Any,
    *,
    grace: float,
    greeting: str,
  ):
    super().__init__(config)
    self.service, self.grace = service, grace
    self._greeting = greeting

  async def startup(self, sockets=None) -> None:
    await super().startup(sockets)
    for each in sockets or ():
      each.listen(_BACKLOG)
    # Printed only now, because signals are handled from here on.
    print(self._greeting, flush=True)

  @contextlib.contextmanager
  def capture_signals(self) -> Iterator[None]:
    def end(number: int) -> None:
      self.should_exit = True

    def end_now(number: int) -> None:
      self.force_exit = True

    with stopping.heard(end, end_now):
      yield

  async def answered(self, end: float) -> None:
    """Returns when the open requests are answered, or at time `end`."""
    self.service.drain(self.grace)
    open_now = [
      connection.cycle
      for connection in self.server_state.connections
      if isinstance(connection, httptools_impl.HttpToolsProtocol)
      and connection.cycle is not None
    ]
    while not self.force_exit and time.monotonic() < end:
      if all(each.response_complete or each.disconnected for each in open_now):
        break
      await asyncio.sleep(_POLL)

  async def shutdown(self, sockets=None) -> None:
    end = time.monotonic() + self.grace
    await self.answered(end)
    # The service has answered; the rest is for slow readers.
    left = max(0.0, end - time.monotonic())
    self.config.timeout_graceful_shutdown = int(left) + 2
    await super().shutdown(sockets)


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


def serve(
  app: Any,
  service: Any,
  *,
  named: str,
  host: str,
  port: int,
  connections: int,
  headers: float,
  request: float,
  grace: float,
) -> None:
  """Serves until a signal arrives; see the module.

  Args:
    app: the ASGI app.
    service: what it serves: `drain(seconds)` refuses new requests from now on
      and ends within `seconds`; `on_closed(reason)` counts a connection that
      was closed early.
    named: what the first line of output says is served.
    host, port: the address to listen at; port 0 takes any free port.
    connections: the most at a time; fewer if the process may open fewer files.
    headers: seconds that a request's headers may take.
    request: seconds that a request may take after them.
    grace: seconds for requests that are open when the server stops.

  Raises:
    ValueError: the server cannot listen at the address, or the limit of open
      files of this process is too low.
  """
  most, descriptors = room(connections)
  guard = Guard(
    most,
    headers=headers,
    request=request + _READING,
    on_closed=service.on_closed,
  )
  config = uvicorn.Config(
    app,
    http=guard.protocol,  # type: ignore[arg-type]  # uvicorn only calls it.
    ws="none",
    backlog=_ACCEPTED,
    log_config=None,
    access_log=False,
    server_header=False,
    timeout_keep_alive=_KEEP_ALIVE,
  )
  with listening(host, port) as opened:
    # Without this a full collection visits all that was loaded: with a policy
    # it takes a fifth of a second, in which nobody is answered. See
    # https://docs.python.org/3/library/gc.html#gc.freeze
    gc.collect()
    gc.freeze()
    Server(
      config,
      service,
      grace=grace,
      greeting=f"serving {named} at {address(opened)}\n"
      f"at most {most} connections at a time; the process may open "
      f"{descriptors} files (ulimit -n)",
    ).run(sockets=[opened])


def listening(host: str, port: int) -> socket.socket:
  """Returns a listening socket; port 0 takes any free one.

  Raises:
    ValueError: the process cannot listen at the address.
  """
  family = socket.AF_INET6 if ":" in host else socket.AF_INET
  try:
    return socket.create_server((host, port), family=family, backlog=_BACKLOG)
  except OSError as error:
    raise ValueError(
      f"cannot listen at {host}:{port} ({error}); name another --port or "
      "--host."
    ) from error


def address(opened: socket.socket) -> str:
  """Returns the URL of a listening socket."""
  host, port, *_ = opened.getsockname()
  return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def is_loopback(host: str) -> bool:
  """Returns whether only this machine reaches an address."""
  try:
    return ipaddress.ip_address(host).is_loopback
  except ValueError:
    return host == "localhost"
