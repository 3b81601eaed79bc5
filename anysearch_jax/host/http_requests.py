"""What HTTP services do with a request: read its body, see its client leave."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

from starlette import requests

T = TypeVar("T")
# Makes an error of an HTTP status and a sentence for the client.
Refuse = Callable[[int, str], Exception]
# Bytes of a body that are read before it is refused.
_DROPPED = 2**28
_GONE = 499, "The client left."  # No client reads it.


async def body(
  request: requests.Request, *, most: int, seconds: float, refuse: Refuse
) -> bytes:
  """Returns a request's body.

  A longer body is read and dropped: many clients send all of it before they
  read, and a close with unread bytes destroys the answer.

  Args:
    request: whose body has not been read.
    most: bytes that a body may have.
    seconds: in which it is due.
    refuse: makes what is raised: 413 beyond `most` bytes, 408 after `seconds`,
      499 if the client left.
  """
  too_large = refuse(413, f"The request has more than {most} bytes; send less.")
  length = request.headers.get("content-length", "")
  # As a float, because Python limits the digits of an int that it parses.
  is_long = length.isdecimal() and float(length) > most
  if is_long and "expect" in request.headers:
    raise too_large  # Its client waits before it sends the body.
  content = bytearray()
  size = 0
  try:
    async with asyncio.timeout(seconds):
      async for part in request.stream():
        size += len(part)
        if size <= most:
          content += part
        elif size > _DROPPED:
          raise too_large
  except TimeoutError as error:
    late = f"The body took more than {seconds:g} seconds."
    raise refuse(408, late) from error
  except requests.ClientDisconnect as error:
    raise refuse(*_GONE) from error
  if size > most:
    raise too_large
  return bytes(content)


async def unless_gone(
  receive: Callable[[], Awaitable[Mapping[str, Any]]],
  work: Awaitable[T],
  refuse: Refuse,
) -> T:
  """Returns the result of `work`, which is cancelled if the client leaves.

  Call it after the body was read. Raises what `refuse` makes of 499 then.
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
      raise refuse(*_GONE) from None
    raise
  finally:
    gone.cancel()
