"""Connections to MCP servers with a limit on the size of a message.

The SDK's own transport over a process collects a line of any length, and its
HTTP client an answer of any length.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import anyio
import httpx2
import mcp_types
from mcp.client import stdio, streamable_http
from mcp.shared.message import SessionMessage

# Seconds that a server has to end after its input is closed, and after SIGTERM.
_END_SECONDS = 2.0
_POLL_SECONDS = 0.01
_CONNECT_SECONDS = 10.0
# An idle stream of notifications is opened again after this time.
_IDLE_SECONDS = 300.0
_STDERR_LINES, _STDERR_LINE = 5, 300


class Process:
  """A server as a child process that talks over its input and output.

  Args:
    command: the program and its arguments; no shell reads them.
    variables: environment variables besides the few that the SDK passes on.
    largest: the most bytes of a message.
    start: seconds that it has to start.

  Attributes:
    said: the last lines of the server's standard error.
    why: why the connection ended, if it was this side that ended it.
  """

  def __init__(
    self,
    command: Sequence[str],
    variables: Mapping[str, str],
    largest: int,
    start: float = 60.0,
  ):
    self._command, self.start = list(command), start
    self._environment = stdio.get_default_environment() | dict(variables)
    self._largest = largest
    self.said: collections.deque[str] = collections.deque(maxlen=_STDERR_LINES)
    self.why = ""

  @contextlib.asynccontextmanager
  async def connect(self) -> AsyncIterator[Any]:
    """Starts the server; yields the streams that the SDK's client takes.

    Raises:
      OSError: the program cannot be started.
    """
    process = await asyncio.create_subprocess_exec(
      *self._command,
      stdin=asyncio.subprocess.PIPE,
      stdout=asyncio.subprocess.PIPE,
      stderr=asyncio.subprocess.PIPE,
      env=self._environment,
      limit=self._largest,
      start_new_session=True,  # It is ended with all of its children.
    )
    into, read = anyio.create_memory_object_stream[Any](0)
    write, out_of = anyio.create_memory_object_stream[Any](0)
    try:
      async with anyio.create_task_group() as group:
        group.start_soon(self._read, process, into)
        group.start_soon(self._write, process, out_of, into)
        group.start_soon(self._hear, process)
        try:
          yield read, write
        finally:
          group.cancel_scope.cancel()
    finally:
      for stream in (into, read, write, out_of):
        stream.close()
      with anyio.CancelScope(shield=True):
        await _end(process)

  async def _read(self, process: asyncio.subprocess.Process, into: Any) -> None:
    """Passes the server's messages on, until one is too long or none comes."""
    assert process.stdout is not None
    async with into:
      with contextlib.suppress(anyio.BrokenResourceError):
        while True:
          try:
            line = await process.stdout.readuntil(b"\n")
          except asyncio.IncompleteReadError:
            return
          except asyncio.LimitOverrunError:
            self.why = f"found a message of more than {self._largest} bytes."
            return
          if line.strip():
            await into.send(_message(line))

  async def _write(
    self, process: asyncio.subprocess.Process, out_of: Any, into: Any
  ) -> None:
    assert process.stdin is not None
    try:
      async for sent in out_of:
        text = sent.message.model_dump_json(by_alias=True, exclude_unset=True)
        process.stdin.write(text.encode() + b"\n")
        await process.stdin.drain()
    except ConnectionError:
      # The server reads no more; its calls end with the stream of answers.
      into.close()

  async def _hear(self, process: asyncio.subprocess.Process) -> None:
    """Keeps the last lines of standard error, so that the pipe never fills."""
    assert process.stderr is not None
    left = b""
    while data := await process.stderr.read(1 << 16):
      *lines, left = (left + data).split(b"\n")
      left = left[-_STDERR_LINE:]
      for line in lines:
        if text := line[-_STDERR_LINE:].decode(errors="replace").strip():
          self.said.append(text)


class Address:
  """A server at an address, over streamable HTTP.

  Args:
    url: the endpoint, such as `http://127.0.0.1:8000/mcp`.
    headers: sent with each request.
    largest: the most bytes of a message.
    start: seconds that a connection may take.

  Attributes: as of `Process`, where `said` stays empty, and `largest`.
  """

  def __init__(
    self,
    url: str,
    headers: Mapping[str, str],
    largest: int,
    start: float = 30.0,
  ):
    self.start = start
    self._url, self._headers, self.largest = url, dict(headers), largest
    self.said: collections.deque[str] = collections.deque(maxlen=1)
    self.why = ""

  def refuse(self) -> httpx2.StreamError:
    """Notes that a message is too long, and returns the error."""
    self.why = f"found a message of more than {self.largest} bytes."
    return httpx2.StreamError(self.why)

  @contextlib.asynccontextmanager
  async def connect(self) -> AsyncIterator[Any]:
    """Yields the streams that the SDK's client takes."""
    async with (
      httpx2.AsyncClient(
        headers={**self._headers, "Accept-Encoding": "identity"},
        transport=_Bounded(self),
        timeout=httpx2.Timeout(_IDLE_SECONDS, connect=_CONNECT_SECONDS),
      ) as client,
      streamable_http.streamable_http_client(
        self._url, http_client=client, max_sse_event_size=self.largest
      ) as streams,
    ):
      yield streams


class _Bounded(httpx2.AsyncBaseTransport):
  """Limits the answers to requests; streams of notifications have no end."""

  def __init__(self, server: Address):
    self._server = server
    self._transport = httpx2.AsyncHTTPTransport()

  async def handle_async_request(
    self, request: httpx2.Request
  ) -> httpx2.Response:
    response = await self._transport.handle_async_request(request)
    kind = response.headers.get("content-type", "")
    coding = response.headers.get("content-encoding", "identity")
    if coding != "identity":
      await response.aclose()
      raise httpx2.RemoteProtocolError(
        f"found an answer encoded as {coding[:40]!r}, expected a plain one."
      )
    if request.method == "GET" and kind.startswith("text/event-stream"):
      return response  # The SDK limits its events.
    return httpx2.Response(
      response.status_code,
      headers=response.headers,
      stream=_Limited(response, self._server),
      extensions=response.extensions,
    )

  async def aclose(self) -> None:
    await self._transport.aclose()


class _Limited(httpx2.AsyncByteStream):
  def __init__(self, response: httpx2.Response, server: Address):
    self._response, self._server = response, server
    self._left = server.largest

  async def __aiter__(self) -> AsyncIterator[bytes]:
    assert isinstance(self._response.stream, httpx2.AsyncByteStream)
    async for part in self._response.stream:
      self._left -= len(part)
      if self._left < 0:
        raise self._server.refuse()
      yield part

  async def aclose(self) -> None:
    await self._response.aclose()


def _message(line: bytes) -> SessionMessage | Exception:
  """Returns a message, or the error of what is none, as the SDK does."""
  try:
    return SessionMessage(
      mcp_types.jsonrpc_message_adapter.validate_json(line, by_name=False)
    )
  except ValueError as error:
    return error


async def _end(process: asyncio.subprocess.Process) -> None:
  """Ends a server as the protocol demands: its input closes, then signals."""
  assert process.stdin is not None
  process.stdin.close()
  try:
    for number in (None, signal.SIGTERM, signal.SIGKILL):
      if number is not None:
        with contextlib.suppress(ProcessLookupError):
          os.killpg(process.pid, number)
      # `process.wait` would also wait for children that hold the pipes.
      with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_END_SECONDS):
          while process.returncode is None:
            await asyncio.sleep(_POLL_SECONDS)
          break
  finally:  # Also if this was cancelled, which no scope of anyio prevents.
    # Children that it left behind hold its pipes.
    with contextlib.suppress(ProcessLookupError, PermissionError):
      os.killpg(process.pid, signal.SIGKILL)
    # Nothing public closes the pipes on this side.
    close = getattr(getattr(process, "_transport", None), "close", None)
    if callable(close):
      close()
