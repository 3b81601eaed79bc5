"""OpenAI's Responses API: `max_tool_calls` is the search budget.

Item types and event names are those of
https://platform.openai.com/docs/api-reference/responses and -streaming.
"""

from __future__ import annotations

import itertools
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

import pydantic

from anysearch_jax import types
from anysearch_jax.agent import events
from anysearch_jax.environment import citations
from anysearch_jax.serving import fields

Item = dict[str, Any]
# Items that clients send back with the message of an earlier response.
_OTHER_ITEMS = ("reasoning", "web_search_call")


class _StreamOptions(fields.StreamOptions):
  include_draft: bool = False


class _Text(pydantic.BaseModel):
  format: fields.Form = fields.Form()


def _messages(content: Any) -> Any:
  """Returns an input as messages."""
  if isinstance(content, str):
    return [{"role": "user", "content": content}]
  if not isinstance(content, list):
    raise ValueError("a text or a list of messages")
  return [
    item
    for item in content
    if not isinstance(item, Mapping) or item.get("type") not in _OTHER_ITEMS
  ]


class Request(fields.Request):
  """The body of `POST /v1/responses`."""

  search_tools = ("web_search", "web_search_2025_08_26", "web_search_preview")

  input: Annotated[fields.Messages, pydantic.BeforeValidator(_messages)]
  instructions: fields.Texts | None = None
  max_output_tokens: fields.Tokens | None = None
  background: fields.Off = False
  stream_options: _StreamOptions = _StreamOptions()
  text: _Text = _Text()

  def turns(self) -> list[tuple[str, str]]:
    messages = fields.role_texts(self.input)
    if self.instructions is None:
      return messages
    return [("instructions", fields.text_of(self.instructions)), *messages]

  def include_draft(self) -> bool:
    return self.stream_options.include_draft

  def token_limits(self) -> list[int | None]:
    return [self.max_output_tokens]


class Writer:
  """Turns an agent's events into the API's; the last one has the response."""

  last = b""

  def __init__(self, request: fields.ParsedRequest, served: fields.Served):
    self._request = request
    self._served = served
    self._name = uuid.uuid4().hex
    self._created = int(time.time())
    self._number = 0
    self._items: list[Item] = []  # The output so far, in order.

  def collected(self, answer_events: Sequence[events.Event]) -> Item:
    """Returns the response of all events of a question."""
    *_, last = itertools.chain.from_iterable(map(self.write, answer_events))
    return last["response"]

  def begin(self) -> Iterator[Item]:
    """Yields the events before the first one of the agent."""
    response = self._response("in_progress")
    for name in ("created", "in_progress"):
      yield self._event(f"response.{name}", response=response)

  def write(self, event: events.Event) -> Iterator[Item]:
    """Yields the API's events for one of the agent's."""
    if not isinstance(event, events.Thinking) and self._is_reasoning():
      yield from self._end("reasoning_text")
    match event:
      case events.Thinking(text):
        yield from self._reason(text)
      case events.Drafting(text):
        yield self._event("anysearch.draft.delta", delta=text)
      case events.Searching(_, query):
        yield from self._search(query)
      case events.Found():
        yield from self._found(event)
      case events.Answer(reply):
        yield from self._answer(reply)

  def end(self) -> Sequence[Item]:
    """Returns nothing: the answer's event is the last one."""
    return ()

  def refused(self, error: fields.RequestError) -> Item:
    """Returns the event of an error that occurs after the first event."""
    values = fields.error_of(error)
    return self._event(
      "error",
      code=values["code"] or values["type"],
      message=values["message"],
      param=values["param"],
    )

  def _add(self, prefix: str, kind: str, **values: Any) -> Item:
    name = f"{prefix}_{self._name}{len(self._items):02x}"
    item = {"id": name, "type": kind, "status": "in_progress", **values}
    self._items.append(item)
    return item

  def _begin(
    self, prefix: str, kind: str, part: Item, **values: Any
  ) -> Iterator[Item]:
    """Adds an item with one part whose text is still empty."""
    item = self._add(prefix, kind, content=[part], **values)
    yield self._item("response.output_item.added", {**item, "content": []})
    yield self._part("response.content_part.added", part={**part})

  def _end(self, kind: str, **values: Any) -> Iterator[Item]:
    """Ends the last item, whose part has all of its text of this kind."""
    item = self._items[-1]
    (part,) = item["content"]
    yield self._part(f"response.{kind}.done", text=part["text"], **values)
    yield self._part("response.content_part.done", part=part)
    item["status"] = "completed"
    yield self._item("response.output_item.done", item)

  def _is_reasoning(self) -> bool:
    """Returns whether the last item of the output is reasoning."""
    return bool(self._items) and self._items[-1]["type"] == "reasoning"

  def _reason(self, text: str) -> Iterator[Item]:
    if not self._is_reasoning():
      part = {"type": "reasoning_text", "text": ""}
      yield from self._begin("rs", "reasoning", part, summary=[])
    self._items[-1]["content"][0]["text"] += text
    yield self._part("response.reasoning_text.delta", delta=text)

  def _search(self, query: str) -> Iterator[Item]:
    action = {"type": "search", "query": query, "queries": [query]}
    item = self._add("ws", "web_search_call", action=action)
    yield self._item("response.output_item.added", {**item})
    item["status"] = "searching"
    for name in ("in_progress", "searching"):
      yield self._part(f"response.web_search_call.{name}", indexed=False)

  def _found(self, event: events.Found) -> Iterator[Item]:
    item = self._items[-1]
    item["status"] = "completed"
    urls = [self._served.url_of(passage) for passage in event.passages]
    item["action"]["sources"] = [{"type": "url", "url": url} for url in urls]
    # OpenAI's own item has no texts; clients ignore fields they do not know.
    item["results"] = citations.passage_values(event.passages)
    for result, url in zip(item["results"], urls, strict=True):
      result["url"] = url
    for result, number in zip(item["results"], event.numbers, strict=False):
      result["number"] = number
    yield self._part("response.web_search_call.completed", indexed=False)
    yield self._item("response.output_item.done", item)

  def _answer(self, reply: events.Reply) -> Iterator[Item]:
    if self._items and self._items[-1]["status"] == "searching":
      self._items[-1]["status"] = "failed"  # The search was not answered.
      yield self._item("response.output_item.done", self._items[-1])
    if reply.answer is not None:
      yield from self._message(reply.answer, reply)
    response = self._response("", reply)
    status = response["status"]
    yield self._event(f"response.{status}", response=response)

  def _message(self, text: str, reply: events.Reply) -> Iterator[Item]:
    part: Item = {
      "type": "output_text",
      "text": "",
      "annotations": [],
      "logprobs": [],
    }
    yield from self._begin("msg", "message", part, role="assistant")
    part["text"] = text
    part["annotations"] = fields.url_citations(reply, self._served)
    yield self._part("response.output_text.delta", delta=text, logprobs=[])
    for index, annotation in enumerate(part["annotations"]):
      yield self._part(
        "response.output_text.annotation.added",
        annotation=annotation,
        annotation_index=index,
      )
    yield from self._end("output_text", logprobs=[])

  def _item(self, name: str, item: Mapping[str, Any]) -> Item:
    return self._event(name, item=item, output_index=len(self._items) - 1)

  def _part(
    self, name: str, *, indexed: bool = True, **values: Any
  ) -> dict[str, Any]:
    """Returns an event of the last item; if `indexed`, of its only part."""
    if indexed:
      values["content_index"] = 0
    return self._event(
      name,
      item_id=self._items[-1]["id"],
      output_index=len(self._items) - 1,
      **values,
    )

  def _event(self, name: str, **values: Any) -> dict[str, Any]:
    event = {"type": name, "sequence_number": self._number, **values}
    self._number += 1
    return event

  def _response(
    self, status: str, reply: events.Reply | None = None
  ) -> dict[str, Any]:
    request = self._request
    sampling = request.sampling or self._served.sampling
    return {
      "id": f"resp_{self._name}",
      "object": "response",
      "created_at": self._created,
      "status": status,
      "model": request.model,
      "output": list(self._items),
      "error": None,
      "incomplete_details": None,
      "instructions": None,
      "metadata": {},
      "parallel_tool_calls": False,
      "tool_choice": "auto",
      "tools": [{"type": "web_search"}],
      "temperature": sampling.temperature,
      "top_p": sampling.top_p,
      "max_tool_calls": request.budget.searches,
      "max_output_tokens": request.max_tokens,
      "usage": reply and _usage(reply),
      "anysearch": reply and reply.record(),
    } | (_ending(reply) if reply else {})


def _ending(reply: events.Reply) -> dict[str, Any]:
  """Returns the status of a response that has ended, and what explains it."""
  if reply.answer is not None:
    return {"status": "completed"}
  if reply.outcome is types.Outcome.TRUNCATED:
    # The API has no reason for a deadline; `anysearch.reason` says it.
    details = {"reason": "max_output_tokens"}
    return {"status": "incomplete", "incomplete_details": details}
  error = {"code": "server_error", "message": reply.reason}
  return {"status": "failed", "error": error}


def _usage(reply: events.Reply) -> dict[str, Any]:
  output_tokens = reply.tokens
  prompt_tokens = len(reply.trajectory.token_ids) - output_tokens
  return {
    "input_tokens": prompt_tokens,
    "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
    "output_tokens": output_tokens,
    "output_tokens_details": {"reasoning_tokens": 0},
    "total_tokens": prompt_tokens + output_tokens,
    "searches": reply.searches,
  }
