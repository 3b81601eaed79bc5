"""Server-sent events, and what ends them: the last one, or a client that left.

https://html.spec.whatwg.org/multipage/server-sent-events.html
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import (
  AsyncGenerator,
  Awaitable,
  Callable,
  Coroutine,
  Iterable,
  Mapping,
)
from typing import Any, Protocol, TypeVar

from starlette import responses

from anysearch_jax.agent import events
from anysearch_jax.serving import errors

_T = TypeVar("_T")
DONE = b"data: [DONE]\n\n"
# Clients ignore comments; proxies cut a connection that is silent for long.
HEARTBEAT = b": still working\n\n"
HEARTBEAT_SECONDS = 15.0


def data(value: Mapping[str, Any]) -> bytes:
  """Returns an event with data only.

  Its JSON is ASCII, because some clients also end lines at other characters
  than newlines, such as U+2028.
  """
  return b"data: %b\n\n" % json.dumps(value).encode()


def named(value: Mapping[str, Any]) -> bytes:
  """Returns an event that has the name of its `type`."""
  return b"event: %b\n%b" % (value["type"].encode(), data(value))


class Writer(Protocol):
  """Turns an agent's events into the values of an API's stream.

  last: sent after the last value; empty for none.
  """

  last: bytes

  def framed(self, value: Mapping[str, Any]) -> bytes:
    """Returns a value as an event."""
    ...

  def begin(self) -> Iterable[Mapping[str, Any]]:
    """Yields the values before the first event."""
    ...

  def write(
    self, index: int, event: events.Event
  ) -> Iterable[Mapping[str, Any]]:
    """Yields the values of an event of the answer with this index."""
    ...

  def end(self) -> Iterable[Mapping[str, Any]]:
    """Yields the values after the last event."""
    ...

  def refused(self, error: errors.RequestError) -> Mapping[str, Any]:
    """Returns the value of an error that ends the stream."""
    ...


class EventStream(responses.Response):
  """Sends chunks as they come, until they end or the client leaves.

  Args:
    chunks: are closed in both cases.
    on_end: called once, with whether all chunks were sent.
  """

  def __init__(
    self, chunks: AsyncGenerator[bytes], *, on_end: Callable[[bool], None]
  ):
    super().__init__(
      headers={"cache-control": "no-store", "x-accel-buffering": "no"},
      media_type="text/event-stream",
    )
    del self.headers["content-length"]
    self._chunks, self._on_end = chunks, on_end

  async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
    complete = False
    try:
      await unless_gone(receive, self._send(send))
      complete = True
    except errors.RequestError:
      pass  # The client left; nobody reads an error.
    finally:
      self._on_end(complete)

  async def _send(self, send: Any) -> None:
    await send(
      {
        "type": "http.response.start",
        "status": self.status_code,
        "headers": self.raw_headers,
      }
    )
    async with contextlib.aclosing(self._chunks) as chunks:
      async for chunk in chunks:
        await send(
          {"type": "http.response.body", "body": chunk, "more_body": True}
        )
    await send({"type": "http.response.body", "body": b""})


async def unless_gone(
  receive: Callable[[], Awaitable[Mapping[str, Any]]],
  work: Coroutine[Any, Any, _T],
) -> _T:
  """Runs `work`, and cancels it if the client leaves.

  Raises:
    errors.RequestError: 499, the client left.
  """
  working = asyncio.ensure_future(work)
  gone = asyncio.ensure_future(_departed(receive))
  gone.add_done_callback(lambda _: working.cancel())
  try:
    return await working
  except asyncio.CancelledError:
    if gone.done() and not gone.cancelled():
      raise errors.RequestError(499, "The client left.") from None
    raise
  finally:
    gone.cancel()


async def _departed(
  receive: Callable[[], Awaitable[Mapping[str, Any]]],
) -> None:
  """Waits until the client has disconnected."""
  while (await receive())["type"] != "http.disconnect":
    pass
