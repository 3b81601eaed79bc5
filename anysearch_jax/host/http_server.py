"""Listens for an HTTP service until a signal arrives; bounds its requests.

Ctrl-C, SIGTERM or SIGHUP stop the server: it answers open requests within the
grace and returns. A second signal ends it at once.

uvicorn waits without limit for the rest of a request's headers and for a client
to read its answer. A few hundred connections with half a request could use up
all file descriptors of the process and so keep other clients out. `Guard` gives
each wait a deadline, and limits the connections. `OwnPages` keeps the pages
of others out. `body`, `unless_gone` and `json_response` are for the service
itself: a body in its limits, work that ends when its client leaves, a response.

No other server of ASGI apps does both: granian (2.8) has a deadline for headers
and stops accepting beyond its `backpressure`, so half-open connections keep
other clients out until that deadline, and a client that reads nothing has no
deadline; hypercorn (0.18) has no limit on connections, and its deadline for
reading also ends clients that wait for a slow answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import ipaddress
import json
import os
import re
import resource
import socket
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import uvicorn
from starlette import datastructures, exceptions, requests, responses
from uvicorn.protocols.http import httptools_impl

T = TypeVar("T")
# Has two functions called with the numbers of the first and of later signals.
Signals = Callable[
  [Callable[[int], None], Callable[[int], None]],
  contextlib.AbstractContextManager[None],
]

# Seconds. Longer than clients keep idle connections; otherwise a client may
# write into a connection that the server has just closed.
_KEEP_ALIVE_SECONDS = 75
_BACKLOG = 2048
# Connections that asyncio accepts in one iteration of the event loop. It
# accepts up to its backlog before the first connection is handled, so with a
# large backlog a burst would use up all file descriptors despite our limit:
# https://github.com/python/cpython/blob/3.11/Lib/asyncio/selector_events.py#L159
_ACCEPT_BATCH = 8
# Bytes of a body that are read, and dropped, before it is refused.
_DRAINED_BYTES = 2**28
# Seconds within which a client must read its answer.
_READ_SECONDS = 60
_HOST = re.compile(r"(?:\[([0-9a-f:.]+)\]|([a-z0-9._-]+))(?::[0-9]*)?")
# Descriptors reserved for files opened later and connections just accepted.
_SPARE_FILES = 32
_FEWEST_CONNECTIONS = 8
_FULL_RESPONSE = (
  b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\n"
  b"connection: close\r\nretry-after: 1\r\ncontent-length: %d\r\n\r\n%b"
)
_FULL_BODY = b'{"detail":"Every connection of this server is busy; try later."}'


class Server(uvicorn.Server):
  """A uvicorn server that exits normally on signals and drains the service."""

  def __init__(
    self,
    config: uvicorn.Config,
    service: Any,
    *,
    grace: float,
    greeting: str,
    signals: Signals,
  ):
    super().__init__(config)
    self.service = service
    self._grace = grace
    self._greeting = greeting
    self._signals = signals

  async def startup(self, sockets=None) -> None:
    await super().startup(sockets)
    for listener in sockets or ():
      listener.listen(_BACKLOG)
    # Printed only now, because signals are handled from here on.
    print(self._greeting, flush=True)

  @contextlib.contextmanager
  def capture_signals(self) -> Iterator[None]:
    def end(number: int) -> None:
      self.should_exit = True

    def end_now(number: int) -> None:
      self.force_exit = True

    with self._signals(end, end_now):
      yield

  async def shutdown(self, sockets=None) -> None:
    for server in self.servers:
      server.close()
    seconds = self._grace
    if (drained := self.service.drain(self._grace)) is not None:
      await drained
      seconds = 0.0
    self.config.timeout_graceful_shutdown = int(seconds) + 2
    await super().shutdown(sockets)


class InnerServer(uvicorn.Server):
  """A uvicorn server in a running event loop, without signals and output."""

  async def open(self, listener: socket.socket) -> None:
    """Begins to accept connections of a listening socket."""
    self.config.load()
    self.lifespan = self.config.lifespan_class(self.config)
    await self.startup([listener])
    listener.listen(_BACKLOG)
    self._ticking = asyncio.create_task(self.main_loop())

  async def close(self) -> None:
    """Closes the socket, waits for requests under way, then cancels them."""
    self.should_exit = True
    await self._ticking
    await self.shutdown()


@dataclasses.dataclass(kw_only=True)
class Guard:
  """The shared state of a server's connections; makes their protocols.

  Attributes:
    max_connections: limit on the connections at a time. A further one replaces
      the connection that has waited longest without a complete request; if
      there is none, the new connection is refused.
    headers: seconds from a request's first byte, or from connecting, to the end
      of its headers.
    request: seconds from the end of its headers until its answer has been read.
    on_closed: called with the reason for each connection that is closed early:
      "headers", "request", "replaced" or "full".
    waiting: connections that wait for a complete request, in the order they
      began to.
  """

  max_connections: int
  headers: float
  request: float
  on_closed: Callable[[str], None]
  waiting: dict[_Protocol, None] = dataclasses.field(default_factory=dict)

  def protocol(self, **server: Any) -> asyncio.Protocol:
    """Returns the protocol of a connection, for `uvicorn.Config(http=...)`."""
    return _Protocol(self, **server)

  def config(self, app: Any) -> uvicorn.Config:
    """Returns the configuration of a server of an ASGI app."""
    return uvicorn.Config(
      app,
      http=self.protocol,  # type: ignore[arg-type]  # uvicorn only calls it.
      ws="none",
      backlog=_ACCEPT_BATCH,
      log_config=None,
      access_log=False,
      server_header=False,
      timeout_keep_alive=_KEEP_ALIVE_SECONDS,
    )


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
    if len(self.connections) > guard.max_connections:
      longest = next(iter(guard.waiting), None)
      if longest is None:
        guard.on_closed("full")
        transport.write(_FULL_RESPONSE % (len(_FULL_BODY), _FULL_BODY))
        transport.close()
        return
      longest.end("replaced")
    guard.waiting[self] = None
    self._set_deadline(guard.headers, "headers")

  def connection_lost(self, exc: Exception | None) -> None:
    self._guard.waiting.pop(self, None)
    self._cancel_deadline()
    super().connection_lost(exc)

  def data_received(self, data: bytes) -> None:
    if self._deadline is None:  # The first byte of a new request.
      self._set_deadline(self._guard.headers, "headers")
    super().data_received(data)

  def on_headers_complete(self) -> None:
    self._set_deadline(self._guard.request, "request")
    super().on_headers_complete()
    if self.expect_100_continue:
      # A client that is answered before its body sends none, but perhaps a next
      # request, which would be read as the body.
      self.cycle.keep_alive = False

  def on_message_complete(self) -> None:
    super().on_message_complete()
    if not self.cycle.response_complete:
      self._guard.waiting.pop(self, None)

  def on_response_complete(self) -> None:
    super().on_response_complete()
    if self.timeout_keep_alive_task is None:
      return  # The connection closes, or a pipelined request is next.
    self._guard.waiting[self] = None
    # uvicorn considers an answer sent even if the client has not begun to read
    # it, and drops the rest of a body that was answered before its end. Our
    # deadline stays until both are over. After that, uvicorn's keep-alive
    # timeout applies until the next request.
    if not (self.cycle.more_body or self.transport.get_write_buffer_size()):
      self._cancel_deadline()

  def end(self, reason: str) -> None:
    """Aborts the connection; unsent data is lost."""
    self._guard.waiting.pop(self, None)
    self._cancel_deadline()
    self._guard.on_closed(reason)
    self.transport.abort()

  def _set_deadline(self, seconds: float, reason: str) -> None:
    self._cancel_deadline()
    if not self.transport.is_closing():
      self._deadline = self.loop.call_later(seconds, self.end, reason)

  def _cancel_deadline(self) -> None:
    if self._deadline is not None:
      self._deadline.cancel()
      self._deadline = None


class OwnPages:
  """Refuses the requests that web pages of others can have a browser send.

  Such a request has the page's Origin, or, after DNS rebinding, the page's name
  as its Host. A service that needs a key needs no such check.

  Args:
    app: answers all other requests.
    host: the address that the server listens at. Unless it is a loopback one,
      Host may be any address or name without a dot, which no page of the
      internet can rebind.
    names: further names of the server; pages there may ask it.

  Raises:
    ValueError: one of the names cannot be the name of a server.
  """

  def __init__(self, app: Any, host: str, names: Sequence[str] = ()):
    self._app = app
    self._given_names = {_host_name(name) for name in names}
    if "" in self._given_names:
      raise ValueError(
        f"--hosts: found {','.join(names)!r}, expected names such as "
        "search.example.com, without http://, separated by commas."
      )
    self._own_names = {host.lower(), *self._given_names}
    self._is_reachable = not is_loopback(host)
    if self._is_reachable:
      self._own_names |= {
        socket.gethostname().lower(),
        socket.getfqdn().lower(),
      }

  async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
    app = self._app
    if scope["type"] == "http" and (refusal := self._refusal(scope)):
      status, sentence = refusal
      # Clients of the retriever read `detail`, those of OpenAI's APIs `error`.
      error = {"message": sentence, "type": "invalid_request_error"}
      app = responses.JSONResponse({"detail": sentence, "error": error}, status)
    await app(scope, receive, send)

  def _refusal(self, scope: Any) -> tuple[int, str] | None:
    headers = datastructures.Headers(scope=scope)
    hosts = headers.getlist("host")
    origins = headers.getlist("origin")
    host = ",".join(hosts).lower()
    # Browsers always send one; health checks in HTTP/1.0 need not.
    if (hosts or scope["http_version"] != "1.0") and not self._is_own(host):
      return 421, _foreign_sentence("Host", host, _host_name(host))
    for origin in origins:
      page = origin.lower().partition("://")[2]
      name = _host_name(page)
      if (not page or page != host) and name not in self._given_names:
        return 403, _foreign_sentence("Origin", origin, name)
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    by_page = origins or "site" in headers.get("sec-fetch-site", "").lower()
    if by_page and scope["method"] == "POST" and kind != "application/json":
      return 415, f"Content-Type: found {kind!r}, expected application/json."
    return None

  def _is_own(self, host: str) -> bool:
    name = _host_name(host)
    is_outer = "." not in name or name.replace(".", "").isdigit()
    is_own_name = name in self._own_names or is_loopback(name)
    return bool(name) and (is_own_name or self._is_reachable and is_outer)


def _host_name(host: str) -> str:
  """Returns the name or address in a Host header, "" if it has none."""
  match = _HOST.fullmatch(host.lower())
  return match[1] or match[2].removesuffix(".") if match else ""


def _foreign_sentence(header: str, value: str, name: str) -> str:
  return (
    f"{header}: found {value[:80]!r}, expected an address of this service. If "
    f"it is one, start the service with --hosts={name or 'NAME'}."
  )


async def body(
  request: requests.Request, *, limit: int, seconds: float
) -> bytes:
  """Returns a request's body.

  A longer body is read and dropped: many clients send all of it before they
  read, and a close with unread bytes destroys the answer.

  Args:
    request: a request whose body has not been read.
    limit: bytes that a body may have.
    seconds: time in which the body has to arrive.

  Raises:
    HTTPException: 413 beyond `limit` bytes, 408 after `seconds`, 499 if the
      client left.
  """
  too_large = exceptions.HTTPException(
    413, f"The request has more than {limit} bytes; send less."
  )
  length = request.headers.get("content-length", "")
  # As a float, because Python limits the digits of an int that it parses.
  is_long = length.isdecimal() and float(length) > limit
  if is_long and "expect" in request.headers:
    raise too_large  # Its client waits before it sends the body.
  content = bytearray()
  size = 0
  try:
    async with asyncio.timeout(seconds):
      async for chunk in request.stream():
        size += len(chunk)
        if size <= limit:
          content += chunk
        elif size > _DRAINED_BYTES:
          raise too_large
  except TimeoutError as error:
    raise exceptions.HTTPException(
      408, f"The body took more than {seconds:g} seconds."
    ) from error
  except requests.ClientDisconnect as error:
    raise exceptions.HTTPException(499) from error
  if size > limit:
    raise too_large
  return bytes(content)


async def unless_gone(
  receive: Callable[[], Awaitable[Mapping[str, Any]]], work: Awaitable[T]
) -> T:
  """Returns the result of `work`, which is cancelled if the client leaves.

  Call it after the body was read. If the client leaves, it raises HTTPException
  499.
  """

  async def departed() -> None:
    while (await receive())["type"] != "http.disconnect":
      pass

  working = asyncio.ensure_future(work)
  gone = asyncio.ensure_future(departed())
  gone.add_done_callback(lambda _: working.cancel())
  try:
    return await working
  except asyncio.CancelledError:
    if gone.done() and not gone.cancelled():
      raise exceptions.HTTPException(499) from None
    raise
  finally:
    gone.cancel()


def json_response(
  value: Any, status: int = 200, headers: Mapping[str, str] | None = None
) -> responses.Response:
  """Returns a response of JSON, in ASCII, which can hold a lone surrogate.

  Args:
    value: what the response contains.
    status: HTTP status.
    headers: further headers.
  """
  body = json.dumps(value)
  return responses.Response(body, status, headers, "application/json")


def connection_limit(wanted_connections: int) -> tuple[int, int]:
  """Returns how many connections this process can hold, and its file limit.

  The number is at most `wanted_connections`. The soft limit (`ulimit -n`) is
  raised as far as needed and allowed.

  Raises:
    ValueError: fewer than 8 connections are possible.
  """
  used_files = len(os.listdir("/dev/fd")) + _SPARE_FILES
  soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
  needed_files = used_files + wanted_connections
  allowed_files = needed_files
  if hard != resource.RLIM_INFINITY:
    allowed_files = min(hard, needed_files)
  limit = max(soft, allowed_files)
  if limit != soft:
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
  if limit - used_files < _FEWEST_CONNECTIONS:
    raise ValueError(
      f"This process may open {limit} files and uses {used_files} of them, "
      f"which leaves {max(limit - used_files, 0)} connections; expected "
      f"{_FEWEST_CONNECTIONS} or more. Raise the limit (ulimit -n 4096)."
    )
  return min(wanted_connections, limit - used_files), limit


def serve(
  app: Any,
  service: Any,
  *,
  title: str,
  port: int,
  connections: int,
  headers: float,
  request: float,
  signals: Signals,
  host: str = "127.0.0.1",
  grace: float = 30.0,
  hosts: Sequence[str] = (),
  path: str = "",
) -> None:
  """Serves an app until a signal arrives; see the module.

  Args:
    app: the ASGI app.
    service: the service behind the app: `drain(seconds)` refuses new requests
      from now on and ends within `seconds`, or, if clients keep streams open,
      returns an awaitable for the requests under way; `on_closed(reason)`
      counts a connection that was closed early; `locked` says whether every
      client needs a key.
    title: noun phrase for what is served, for the first line of output.
    port: TCP port to listen at; 0 takes any free one.
    connections: limit on the connections at a time; it is lower if the process
      may open fewer files.
    headers: seconds for the headers of a request, see `Guard`.
    request: seconds for the rest of a request, see `Guard`.
    signals: `launch.stopping.on_signals`.
    host: address to listen at.
    grace: seconds for requests that are open when the server stops.
    hosts: further names of the server, see `OwnPages`.
    path: path of the service, in the address that the output names.

  Raises:
    ValueError: the server cannot listen at the address, one of `hosts` cannot
      be the name of a server, or this process may open too few files.
  """
  max_connections, descriptors = connection_limit(connections)
  guard = Guard(
    max_connections=max_connections,
    headers=headers,
    request=request + _READ_SECONDS,
    on_closed=service.on_closed,
  )
  config = guard.config(app if service.locked else OwnPages(app, host, hosts))
  with listening(host, port) as listener:
    # Without this a full collection visits all that was loaded: with a policy
    # it takes a fifth of a second, in which nobody is answered. See
    # https://docs.python.org/3/library/gc.html#gc.freeze
    gc.collect()
    gc.freeze()
    Server(
      config,
      service,
      grace=grace,
      signals=signals,
      greeting=f"serving {title} at {address(listener)}{path}\n"
      f"at most {max_connections} connections at a time; the process may open "
      f"{descriptors} files (ulimit -n)",
    ).run(sockets=[listener])


def listening(host: str, port: int) -> socket.socket:
  """Returns a listening socket; port 0 takes any free one.

  Raises ValueError if the process cannot listen at the address.
  """
  family = socket.AF_INET6 if ":" in host else socket.AF_INET
  try:
    return socket.create_server((host, port), family=family, backlog=_BACKLOG)
  except OSError as error:
    raise ValueError(
      f"cannot listen at {host}:{port} ({error}); name another --port or "
      "--host."
    ) from error


def address(listener: socket.socket) -> str:
  """Returns the URL of a listening socket."""
  host, port, *_ = listener.getsockname()
  return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def is_loopback(host: str) -> bool:
  """Returns whether only this machine reaches an address."""
  try:
    return ipaddress.ip_address(host).is_loopback
  except ValueError:
    return host == "localhost"
