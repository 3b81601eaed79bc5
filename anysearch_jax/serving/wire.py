"""What the service reads and writes: JSON, streams of events, citations.

https://html.spec.whatwg.org/multipage/server-sent-events.html
"""

from __future__ import annotations

import contextlib
import json
import re
import urllib.parse
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any

from starlette import requests, responses

from anysearch_jax import types
from anysearch_jax.agent import events
from anysearch_jax.environment import citations as citation_lib
from anysearch_jax.environment import records
from anysearch_jax.host import http_requests
from anysearch_jax.serving import fields

_MARK = re.compile(r"\[([0-9]+)\]")
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


def source(passage: types.Passage) -> str:
  """Returns the URL of a passage: its id, if that is one, or a URN."""
  if passage.id.startswith(("http://", "https://")):
    return passage.id
  return f"urn:passage:{urllib.parse.quote(passage.id, safe='/')}"


def citations(reply: events.Reply, cites: bool) -> list[dict[str, Any]]:
  """Returns the citations of an answer.

  With `cites` there is one for each mark such as `[2]`, with the number and the
  place in the document. Otherwise there is one for each passage that was shown:
  the policy has read it, which does not prove the answer.
  """
  text = reply.answer or ""
  if cites:
    known = dict(reply.citations)
    marks = ((mark.span(), int(mark[1])) for mark in _MARK.finditer(text))
    found = [(*at, known[n], {"number": n}) for at, n in marks if n in known]
  else:
    shown = {source(p): p for each in reply.documents for p in each}
    found = [(0, len(text), passage, {}) for passage in shown.values()]
  return [
    {
      "type": "url_citation",
      "url": source(passage),
      "title": citation_lib.title(passage),
      "start_index": start,
      "end_index": end,
      **number,
      **records.source(passage),
    }
    for start, end, passage, number in found
  ]


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
