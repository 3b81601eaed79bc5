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
  Mapping,
  Sequence,
)
from typing import Any, TypeVar

import fastapi

from anysearch_jax.serving import errors

_T = TypeVar("_T")
DONE = b"data: [DONE]\n\n"


def data(value: Mapping[str, Any]) -> bytes:
  """Returns an event with data only."""
  return b"data: %b\n\n" % json.dumps(value).encode()


def named(value: Mapping[str, Any]) -> bytes:
  """Returns an event that has the name of its `type`."""
  return b"event: %b\n%b" % (value["type"].encode(), data(value))


class EventStream(fastapi.Response):
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
  try:
    await asyncio.wait(
      (working, gone), return_when=asyncio.FIRST_COMPLETED, timeout=None
    )
    if working.done():
      return working.result()
    raise errors.RequestError(499, "The client left.")
  finally:
    gone.cancel()
    working.cancel()
    await asyncio.gather(working, gone, return_exceptions=True)


async def _departed(
  receive: Callable[[], Awaitable[Mapping[str, Any]]],
) -> None:
  """Waits until the client has disconnected."""
  while (await receive())["type"] != "http.disconnect":
    pass


async def merged(
  sources: Sequence[AsyncGenerator[_T]],
) -> AsyncGenerator[tuple[int, _T]]:
  """Yields the items of several iterators as they come, with their index.

  If one raises, the others are closed and the exception is raised. Closing the
  merged iterator closes all.
  """
  items: asyncio.Queue[tuple[int, _T | BaseException | None]] = asyncio.Queue()

  async def pump(index: int, source: AsyncGenerator[_T]) -> None:
    ended: BaseException | None = None
    try:
      async with contextlib.aclosing(source) as each:
        async for item in each:
          items.put_nowait((index, item))
    except Exception as error:
      ended = error
    items.put_nowait((index, ended))

  tasks = [asyncio.ensure_future(pump(*pair)) for pair in enumerate(sources)]
  try:
    left = len(tasks)
    while left:
      index, item = await items.get()
      if isinstance(item, BaseException):
        raise item
      if item is None:
        left -= 1
      else:
        yield index, item
  finally:
    for task in tasks:
      task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
