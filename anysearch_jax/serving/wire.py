"""What the service reads and writes over HTTP: JSON, and streams of events.

https://html.spec.whatwg.org/multipage/server-sent-events.html
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any

from starlette import requests, responses

from anysearch_jax.host import http_requests
from anysearch_jax.serving import fields

_BODY = 2**20  # Bytes of a request.
_BODY_SECONDS = 30.0
DONE = b"data: [DONE]\n\n"
# Clients ignore comments; proxies cut a connection that is silent for long.
HEARTBEAT = b": still working\n\n"


async def read(request: requests.Request) -> bytes:
  """Returns the body of a request."""
  return await http_requests.body(
    request, most=_BODY, seconds=_BODY_SECONDS, refuse=fields.RequestError
  )


def respond(
  value: Any, status: int = 200, headers: Mapping[str, str] | None = None
) -> responses.Response:
  """Returns a response of JSON; in ASCII, so half a surrogate is no error."""
  body = json.dumps(value)
  return responses.Response(body, status, headers, "application/json")


def data(value: Mapping[str, Any]) -> bytes:
  """Returns an event with data only.

  Its JSON is ASCII, because some clients also end lines at other characters
  than newlines, such as U+2028.
  """
  return b"data: %b\n\n" % json.dumps(value).encode()


def named(value: Mapping[str, Any]) -> bytes:
  """Returns an event that has the name of its `type`."""
  return b"event: %b\n%b" % (value["type"].encode(), data(value))


class EventStream(responses.StreamingResponse):
  """Sends chunks until they end or the client leaves, and closes them.

  `on_end` is called once, with whether all were sent.
  """

  def __init__(
    self, chunks: AsyncGenerator[bytes], *, on_end: Callable[[bool], None]
  ):
    super().__init__(
      chunks,
      headers={"cache-control": "no-store", "x-accel-buffering": "no"},
      media_type="text/event-stream",
    )
    self._chunks, self._on_end = chunks, on_end

  async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
    complete = False
    try:
      sending = self._send(send)
      await http_requests.unless_gone(receive, sending, fields.RequestError)
      complete = True
    except fields.RequestError:
      pass  # The client left; nobody reads an error.
    finally:
      self._on_end(complete)

  async def _send(self, send: Any) -> None:
    async with contextlib.aclosing(self._chunks):
      await self.stream_response(send)
