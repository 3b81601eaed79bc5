"""OpenAI's Responses API: `max_tool_calls` is the search budget."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

import pydantic

from anysearch_jax import types
from anysearch_jax.agent import events
from anysearch_jax.environment import citations
from anysearch_jax.host import openai_replies, openai_requests, response_events
from anysearch_jax.serving import fields

# Items that clients send back with the message of an earlier response.
_OTHER_ITEMS = ("reasoning", "web_search_call")


class _StreamOptions(openai_requests.StreamOptions, frozen=True):
  include_draft: bool = False


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


class Request(fields.Request, openai_requests.ResponsesRequest):
  """The body of `POST /v1/responses`."""

  search_tools = ("web_search", "web_search_2025_08_26", "web_search_preview")

  input: Annotated[fields.Messages, pydantic.BeforeValidator(_messages)]
  stream_options: _StreamOptions = _StreamOptions()

  def turns(self) -> list[tuple[str, str]]:
    messages = fields.role_texts(self.input)
    if self.instructions is None:
      return messages
    instructions = openai_requests.text_of(self.instructions)
    return [("instructions", instructions), *messages]

  def include_draft(self) -> bool:
    return self.stream_options.include_draft


class Writer(response_events.Writer):
  """Turns an agent's events into the API's; the last one has the response."""

  last = b""

  def __init__(self, request: fields.ParsedRequest, served: fields.Served):
    super().__init__()
    self._request = request
    self._served = served

  def collected(
    self, answer_events: Sequence[events.Event]
  ) -> response_events.Item:
    """Returns the response of all events of a question."""
    *_, last = itertools.chain.from_iterable(map(self.write, answer_events))
    return last["response"]

  def begin(self) -> Iterator[response_events.Item]:
    """Yields the events before the first one of the agent."""
    response = self._response("in_progress")
    for name in ("created", "in_progress"):
      yield self.event(f"response.{name}", response=response)

  def write(self, event: events.Event) -> Iterator[response_events.Item]:
    """Yields the API's events for one of the agent's."""
    if not isinstance(event, events.Thinking) and self._is_reasoning():
      yield from self.end_item("reasoning_text")
    match event:
      case events.Thinking(text):
        yield from self._reason(text)
      case events.Drafting(text):
        yield self.event("anysearch.draft.delta", delta=text)
      case events.Searching(_, query):
        yield from self._search(query)
      case events.Found():
        yield from self._found(event)
      case events.Answer(reply):
        yield from self._answer(reply)

  def end(self) -> Sequence[response_events.Item]:
    """Returns nothing: the answer's event is the last one."""
    return ()

  def refused(
    self, error: openai_requests.RequestError
  ) -> response_events.Item:
    """Returns the event of an error that occurs after the first event."""
    return self.error_event(openai_replies.error_of(error))

  def _is_reasoning(self) -> bool:
    """Returns whether the last item of the output is reasoning."""
    return bool(self.items) and self.items[-1]["type"] == "reasoning"

  def _reason(self, text: str) -> Iterator[response_events.Item]:
    if not self._is_reasoning():
      part = {"type": "reasoning_text", "text": ""}
      yield from self.begin_item("rs", "reasoning", part, summary=[])
    self.items[-1]["content"][0]["text"] += text
    yield self.part_event("response.reasoning_text.delta", delta=text)

  def _search(self, query: str) -> Iterator[response_events.Item]:
    action = {"type": "search", "query": query, "queries": [query]}
    item = self.add_item("ws", "web_search_call", action=action)
    yield self.item_event("response.output_item.added", {**item})
    item["status"] = "searching"
    for name in ("in_progress", "searching"):
      yield self.part_event(f"response.web_search_call.{name}", indexed=False)

  def _found(self, event: events.Found) -> Iterator[response_events.Item]:
    item = self.items[-1]
    urls = [self._served.url_of(passage) for passage in event.passages]
    item["action"]["sources"] = [{"type": "url", "url": url} for url in urls]
    # OpenAI's own item has no texts; clients ignore fields they do not know.
    item["results"] = citations.passage_values(event.passages)
    for result, url in zip(item["results"], urls, strict=True):
      result["url"] = url
    for result, number in zip(item["results"], event.numbers, strict=False):
      result["number"] = number
    yield self.part_event("response.web_search_call.completed", indexed=False)
    yield self.complete_item()

  def _answer(self, reply: events.Reply) -> Iterator[response_events.Item]:
    if self.items and self.items[-1]["status"] == "searching":
      self.items[-1]["status"] = "failed"  # The search was not answered.
      yield self.item_event("response.output_item.done", self.items[-1])
    if reply.answer is not None:
      yield from self._message(reply.answer, reply)
    response = self._response("", reply)
    status = response["status"]
    yield self.event(f"response.{status}", response=response)

  def _message(
    self, text: str, reply: events.Reply
  ) -> Iterator[response_events.Item]:
    part = response_events.message_part()
    yield from self.begin_item("msg", "message", part, role="assistant")
    part["text"] = text
    part["annotations"] = fields.url_citations(reply, self._served)
    yield self.part_event("response.output_text.delta", delta=text, logprobs=[])
    for index, annotation in enumerate(part["annotations"]):
      yield self.part_event(
        "response.output_text.annotation.added",
        annotation=annotation,
        annotation_index=index,
      )
    yield from self.end_item("output_text", logprobs=[])

  def _response(
    self, status: str, reply: events.Reply | None = None
  ) -> dict[str, Any]:
    request = self._request
    sampling = request.sampling or self._served.sampling
    return self.values(
      status,
      model=request.model,
      tools=[{"type": "web_search"}],
      temperature=sampling.temperature,
      top_p=sampling.top_p,
      max_tool_calls=request.budget.searches,
      max_output_tokens=request.max_tokens,
      usage=reply and _usage(reply),
      anysearch=reply and reply.record(),
    ) | (_ending(reply) if reply else {})


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
  prompt_tokens = len(reply.trajectory.token_ids) - reply.tokens
  usage = response_events.usage(prompt_tokens, reply.tokens, cached_tokens=0)
  return usage | {"searches": reply.searches}
