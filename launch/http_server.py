"""Listens for an HTTP service until a signal arrives.

Ctrl-C, SIGTERM or SIGHUP stop the server: it answers open requests within the
grace and returns. Until then it still listens, so that the service can tell new
clients that it stops. A second signal ends it at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import ipaddress
import socket
import time
from collections.abc import Iterator
from typing import Any, Protocol

import uvicorn
from uvicorn.protocols.http import httptools_impl

from launch import stopping
from retrieval.service import connections as connections_lib

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


class Draining(Protocol):
  """A service that can be told to stop."""

  def drain(self, seconds: float) -> None:
    """Refuses new requests from now on, and ends within `seconds`."""
    ...

  def on_closed(self, reason: str) -> None:
    """Counts a connection that was closed early, by its reason."""
    ...


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


def serve(
  app: Any,
  service: Draining,
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
    service: what it serves.
    named: what the first line of output says is served.
    host, port: the address to listen at; port 0 takes any free port.
    connections: the most at a time; fewer if the process may open fewer files.
    headers: seconds that a request's headers may take.
    request: seconds that a request may take after them.
    grace: seconds for requests that are open when the server stops.

  Raises:
    OSError: the server cannot listen at the address.
    ValueError: the limit of open files of this process is too low.
  """
  most, descriptors = connections_lib.room(connections)
  guard = connections_lib.Guard(
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
  # Without this a full collection visits all that was loaded: with a policy it
  # takes a fifth of a second, in which nobody is answered. See
  # https://docs.python.org/3/library/gc.html#gc.freeze
  gc.collect()
  gc.freeze()
  with listening(host, port) as opened:
    shown = f"[{host}]" if ":" in host else host
    port = opened.getsockname()[1]
    Server(
      config,
      service,
      grace=grace,
      greeting=f"serving {named} at http://{shown}:{port}\n"
      f"at most {most} connections at a time; the process may open "
      f"{descriptors} files (ulimit -n)",
    ).run(sockets=[opened])


def listening(host: str, port: int) -> socket.socket:
  """Returns a listening socket; port 0 takes any free one. Raises OSError."""
  family = socket.AF_INET6 if ":" in host else socket.AF_INET
  return socket.create_server((host, port), family=family, backlog=_BACKLOG)


def is_loopback(host: str) -> bool:
  """Returns whether only this machine reaches an address."""
  try:
    return ipaddress.ip_address(host).is_loopback
  except ValueError:
    return host == "localhost"
