"""Replies of OpenAI's APIs over HTTP: errors and streams of events."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any

from starlette import exceptions, responses

# Clients ignore comments, but proxies close a connection that is silent.
HEARTBEAT = b": still working\n\n"
HEARTBEAT_SECONDS = 15.0
DONE = b"data: [DONE]\n\n"  # Ends a stream of chunks.
_EVENT_STREAM = "text/event-stream"
_STREAM_HEADERS = {"cache-control": "no-store", "x-accel-buffering": "no"}
_TYPES = {401: "authentication_error", 429: "rate_limit_error"}


def error_of(error: exceptions.HTTPException) -> dict[str, Any]:
  """Returns the JSON of an error in OpenAI's form."""
  status = error.status_code
  kind = "invalid_request_error" if status < 500 else "server_error"
  return {
    "message": error.detail,
    "type": _TYPES.get(status, kind),
    "param": getattr(error, "param", None),
    "code": getattr(error, "code", None),
  }


def frame(value: Mapping[str, Any]) -> bytes:
  """Returns a server-sent event, which is named by the `type` of its value.

  https://html.spec.whatwg.org/multipage/server-sent-events.html
  The JSON is ASCII, because some clients end lines at other characters than
  newlines too, such as U+2028.
  """
  name = f"event: {value['type']}\n" if "type" in value else ""
  return f"{name}data: {json.dumps(value)}\n\n".encode()


def events_response(content: bytes) -> responses.Response:
  """Returns a response of server-sent events that are written already."""
  return responses.Response(
    content, headers=_STREAM_HEADERS, media_type=_EVENT_STREAM
  )


def model_values(name: str) -> dict[str, Any]:
  """Returns the JSON of a model."""
  return {
    "id": name,
    "object": "model",
    "created": 0,
    "owned_by": "anysearch",
  }


class EventStream(responses.StreamingResponse):
  """Sends chunks until they end or the client leaves, and calls `on_end`."""

  def __init__(
    self,
    chunks: AsyncGenerator[bytes],
    *,
    on_end: Callable[[], None] = lambda: None,
  ):
    super().__init__(chunks, headers=_STREAM_HEADERS, media_type=_EVENT_STREAM)
    self._chunks = chunks
    self._on_end = on_end

  async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
    try:
      async with contextlib.aclosing(self._chunks):
        await super().__call__(scope, receive, send)
    finally:
      self._on_end()
