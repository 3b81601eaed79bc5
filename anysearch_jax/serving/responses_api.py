"""OpenAI's Responses API: `max_tool_calls` is the search budget.

Item types and event names are those of
https://platform.openai.com/docs/api-reference/responses and -streaming.
"""

from __future__ import annotations

import time
import urllib.parse
import uuid
from collections.abc import Iterator, Mapping
from typing import Any

from anysearch_jax import types
from anysearch_jax.agent import events
from anysearch_jax.serving import errors, fields

_TOOLS = ("web_search", "web_search_2025_08_26", "web_search_preview")
_TEXTS = ("input_text", "output_text", "text")


def read(values: Any, served: fields.Served) -> fields.Asked:
  """Reads the body of `POST /v1/responses`.

  Raises:
    errors.RequestError: a field cannot be honoured.
  """
  body = fields.Body(values)
  turns = _turns(body.take("input"))
  instructions = body.take("instructions")
  if instructions is not None:
    text = fields.text_of(instructions, "instructions", _TEXTS)
    turns = [("instructions", text), *turns]
  fields.tools(body, _TOOLS)
  for name in ("previous_response_id", "conversation", "prompt"):
    if (found := body.take(name)) is not None:
      raise errors.refuse(
        name,
        found,
        "no such field, because this service stores nothing; send the earlier "
        "messages in `input`",
      )
  body.same("background", False)
  body.same("truncation", "auto", "disabled")
  body.take("reasoning")
  body.take("include")
  body.take("stream_options")
  _plain_text(body)
  return fields.asked(
    body,
    served,
    question=fields.conversation(turns),
    tokens=("max_output_tokens",),
  )


def _turns(found: Any) -> list[tuple[str, str]]:
  """Returns role and text of each message of `input`."""
  if found is None:
    raise errors.RequestError(
      400, "input: found nothing, expected a question.", param="input"
    )
  if isinstance(found, str):
    return [("user", found)]
  if not isinstance(found, list):
    raise errors.refuse("input", found, "a text or a list of messages")
  turns = []
  for item in found:
    kind = item.get("type", "message") if isinstance(item, Mapping) else None
    if kind in ("reasoning", "web_search_call"):
      continue  # Of an earlier response, sent back with its message.
    if kind != "message" or item.get("role") not in (
      *("user", "assistant", "system", "developer"),
    ):
      raise errors.refuse("input", item, "messages with a role and a text")
    text = fields.text_of(item.get("content"), "input", _TEXTS)
    turns.append((item["role"], text))
  return turns


def _plain_text(body: fields.Body) -> None:
  found = body.take("text")
  if found is None:
    return
  form = found.get("format") if isinstance(found, Mapping) else found
  kind = form.get("type") if isinstance(form, Mapping) else form
  if kind not in (None, "text"):
    raise errors.refuse("text.format", kind, "'text': answers are plain text")


class Writer:
  """Turns an agent's events into those of the API, and into the response.

  Args:
    asked: the request.
    served: what the service offers.
  """

  def __init__(self, asked: fields.Asked, served: fields.Served):
    self._asked, self._served = asked, served
    self._id = f"resp_{uuid.uuid4().hex}"
    self._created = int(time.time())
    self._output: list[dict[str, Any]] = []
    self._open: dict[str, Any] | None = None  # The reasoning that grows.
    self._shown: list[types.Passage] = []
    self._number = 0
    self.response = self._response("in_progress")

  def begin(self) -> Iterator[dict[str, Any]]:
    """Yields the events before the first one of the agent."""
    for name in ("created", "in_progress"):
      yield self._event(f"response.{name}", response=self.response)

  def write(self, event: events.Event) -> Iterator[dict[str, Any]]:
    """Yields the API's events for one of the agent's."""
    if not isinstance(event, events.Thinking):
      yield from self._end_reasoning()
    match event:
      case events.Thinking(text):
        yield from self._reason(text)
      case events.Searching(_, query):
        yield from self._search(query)
      case events.Found(_, passages):
        yield from self._found(passages)
      case events.Answer(reply):
        yield from self._answer(reply)

  def refused(self, error: errors.RequestError) -> dict[str, Any]:
    """Returns the event of an error after the first event was sent."""
    told = error.body()["error"]
    return self._event(
      "error",
      code=told["code"] or told["type"],
      message=told["message"],
      param=told["param"],
    )

  def _reason(self, text: str) -> Iterator[dict[str, Any]]:
    if self._open is None:
      self._open = {
        "id": f"rs_{uuid.uuid4().hex}",
        "type": "reasoning",
        "status": "in_progress",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": ""}],
      }
      self._output.append(self._open)
      yield self._item(
        "response.output_item.added", {**self._open, "content": []}
      )
      part = {"type": "reasoning_text", "text": ""}
      yield self._part("response.content_part.added", part=part)
    self._open["content"][0]["text"] += text
    yield self._part("response.reasoning_text.delta", delta=text)

  def _end_reasoning(self) -> Iterator[dict[str, Any]]:
    if self._open is None:
      return
    part = self._open["content"][0]
    yield self._part("response.reasoning_text.done", text=part["text"])
    yield self._part("response.content_part.done", part=part)
    self._open["status"] = "completed"
    yield self._item("response.output_item.done", self._open)
    self._open = None

  def _search(self, query: str) -> Iterator[dict[str, Any]]:
    item = {
      "id": f"ws_{uuid.uuid4().hex}",
      "type": "web_search_call",
      "status": "in_progress",
      "action": {"type": "search", "query": query, "queries": [query]},
    }
    self._output.append(item)
    yield self._item("response.output_item.added", dict(item))
    for name in ("in_progress", "searching"):
      yield self._part(f"response.web_search_call.{name}", indexed=False)
    item["status"] = "searching"

  def _found(
    self, passages: tuple[types.Passage, ...]
  ) -> Iterator[dict[str, Any]]:
    item = self._output[-1]
    item["status"] = "completed"
    item["action"]["sources"] = [
      {"type": "url", "url": source(passage)} for passage in passages
    ]
    # OpenAI's own item has no texts; clients ignore what they do not know.
    item["results"] = [
      {"id": p.id, "title": p.title, "text": p.text} for p in passages
    ]
    self._shown += passages
    yield self._part("response.web_search_call.completed", indexed=False)
    yield self._item("response.output_item.done", item)

  def _answer(self, reply: events.Reply) -> Iterator[dict[str, Any]]:
    for item in self._output:
      if item["type"] == "web_search_call" and item["status"] != "completed":
        item["status"] = "failed"
        yield self._event(
          "response.output_item.done",
          item=item,
          output_index=self._output.index(item),
        )
    if reply.answer is not None:
      yield from self._message(reply.answer)
    status, more = _ending(reply)
    self.response = self._response(status, reply) | more
    yield self._event(f"response.{status}", response=self.response)

  def _message(self, text: str) -> Iterator[dict[str, Any]]:
    annotations = citations(text, self._shown)
    empty = {
      "type": "output_text",
      "text": "",
      "annotations": [],
      "logprobs": [],
    }
    part = {**empty, "text": text, "annotations": annotations}
    item = {
      "id": f"msg_{uuid.uuid4().hex}",
      "type": "message",
      "role": "assistant",
      "status": "completed",
      "content": [part],
    }
    self._output.append(item)
    started = {**item, "status": "in_progress", "content": []}
    yield self._item("response.output_item.added", started)
    yield self._part("response.content_part.added", part=empty)
    yield self._part("response.output_text.delta", delta=text, logprobs=[])
    for index, annotation in enumerate(annotations):
      yield self._part(
        "response.output_text.annotation.added",
        annotation=annotation,
        annotation_index=index,
      )
    yield self._part("response.output_text.done", text=text, logprobs=[])
    yield self._part("response.content_part.done", part=part)
    yield self._item("response.output_item.done", item)

  def _item(self, name: str, item: Mapping[str, Any]) -> dict[str, Any]:
    return self._event(name, item=item, output_index=len(self._output) - 1)

  def _part(
    self, name: str, *, indexed: bool = True, **values: Any
  ) -> dict[str, Any]:
    """Returns an event about the last item; `indexed`: about its one part."""
    if indexed:
      values["content_index"] = 0
    return self._event(
      name,
      item_id=self._output[-1]["id"],
      output_index=len(self._output) - 1,
      **values,
    )

  def _event(self, name: str, **values: Any) -> dict[str, Any]:
    event = {"type": name, "sequence_number": self._number, **values}
    self._number += 1
    return event

  def _response(
    self, status: str, reply: events.Reply | None = None
  ) -> dict[str, Any]:
    asked = self._asked
    return {
      "id": self._id,
      "object": "response",
      "created_at": self._created,
      "status": status,
      "model": asked.model,
      "output": list(self._output),
      "error": None,
      "incomplete_details": None,
      "instructions": None,
      "metadata": {},
      "parallel_tool_calls": False,
      "tool_choice": "auto",
      "tools": [{"type": "web_search"}],
      "temperature": self._served.temperature,
      "top_p": self._served.top_p,
      "max_tool_calls": asked.budget,
      "max_output_tokens": asked.max_tokens,
      "usage": None if reply is None else _usage(reply),
      "anysearch": None if reply is None else told(reply),
    }


def _ending(reply: events.Reply) -> tuple[str, dict[str, Any]]:
  """Returns the status of a response, and the fields that explain it."""
  if reply.answer is not None:
    return "completed", {}
  if reply.outcome is types.Outcome.TRUNCATED:
    # The API has no reason for a deadline; `anysearch.reason` says it.
    return "incomplete", {"incomplete_details": {"reason": "max_output_tokens"}}
  error = {"code": "server_error", "message": reply.reason}
  return "failed", {"error": error}


def _usage(reply: events.Reply) -> dict[str, Any]:
  written = reply.tokens
  given = len(reply.trajectory.token_ids) - written
  return {
    "input_tokens": given,
    "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
    "output_tokens": written,
    "output_tokens_details": {"reasoning_tokens": 0},
    "total_tokens": given + written,
    "searches": reply.searches,
  }


def told(reply: events.Reply) -> dict[str, Any]:
  """Returns what OpenAI's APIs have no field for."""
  return {
    "budget": reply.trajectory.budget,
    "searches": reply.searches,
    "outcome": str(reply.outcome),
    "reason": reply.reason,
    "seconds": round(reply.seconds, 3),
    "documents": [
      [{"id": p.id, "title": p.title, "text": p.text} for p in found]
      for found in reply.documents
    ],
  }


def source(passage: types.Passage) -> str:
  """Returns the URL of a passage: its id, if that is one, or a URN."""
  if passage.id.startswith(("http://", "https://")):
    return passage.id
  return f"urn:passage:{urllib.parse.quote(passage.id, safe='/')}"


def citations(answer: str, shown: list[types.Passage]) -> list[dict[str, Any]]:
  """Returns a citation of each passage that was shown, the first first.

  They say what the policy has read, not that a passage proves the answer.
  """
  return [
    {
      "type": "url_citation",
      "url": url,
      "title": passage.title,
      "start_index": 0,
      "end_index": len(answer),
    }
    for url, passage in {source(p): p for p in shown}.items()
  ]
