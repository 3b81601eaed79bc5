"""A light HTTP/1.1 client, for loads that share the server's cores.

httpx2 takes about a millisecond of CPU for a request, more than a server does.
"""

from __future__ import annotations

import asyncio
import json
import urllib.parse
from typing import Any

import httptools

_SECONDS = 120.0


class Connection(asyncio.Protocol):
  """A connection that is kept alive; one request at a time."""

  def __init__(self, host: str) -> None:
    self._host = host
    self._body = bytearray()
    self._done: asyncio.Future[int] | None = None

  def connection_made(  # type: ignore[override]  # A socket's transport.
    self, transport: asyncio.Transport
  ) -> None:
    self._transport = transport

  def data_received(self, data: bytes) -> None:
    self._parser.feed_data(data)

  def on_body(self, body: bytes) -> None:
    self._body += body

  def on_message_complete(self) -> None:
    if self._done is not None and not self._done.done():
      self._done.set_result(self._parser.get_status_code())

  def connection_lost(self, exc: Exception | None) -> None:
    if self._done is not None and not self._done.done():
      self._done.set_exception(exc or ConnectionError("The server hung up."))

  async def post(self, path: str, value: Any) -> bytes:
    """Posts JSON and returns the body of the answer.

    Raises:
      RuntimeError: its status is not 200.
      OSError: the connection is lost, or there is no answer.
    """
    self._parser = httptools.HttpResponseParser(self)
    self._body.clear()
    self._done = asyncio.get_running_loop().create_future()
    body = json.dumps(value).encode()
    self._transport.write(
      b"POST %b HTTP/1.1\r\nhost: %b\r\ncontent-type: application/json\r\n"
      b"content-length: %d\r\n\r\n%b"
      % (path.encode(), self._host.encode(), len(body), body)
    )
    async with asyncio.timeout(_SECONDS):
      status = await self._done
    if status != 200:
      raise RuntimeError(f"HTTP {status}: {bytes(self._body[:300])!r}")
    return bytes(self._body)

  def close(self) -> None:
    self._transport.close()


async def connect(url: str) -> Connection:
  """Connects to the server of an `http://` URL."""
  address = urllib.parse.urlsplit(url)
  _, connection = await asyncio.get_running_loop().create_connection(
    lambda: Connection(address.netloc),
    address.hostname or "",
    address.port or 80,
  )
  return connection
