"""OpenAI's Responses API, as a program that is trained uses it.

It is stateless: the program sends the whole conversation with each request. The
items of one reply, its reasoning, message and calls, are one message again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

import pydantic

from anysearch_jax.host import openai_requests, response_events
from anysearch_jax.sessions import fields, turns

LAST = b""


class _Message(pydantic.BaseModel):
  role: Literal["system", "developer", "user", "assistant"]
  content: openai_requests.Texts

  def turn_message(self) -> turns.Message:
    role = fields.role_of(self.role)
    return turns.Message(role, openai_requests.text_of(self.content))


class _Call(pydantic.BaseModel):
  call_id: str
  name: str
  arguments: str

  def turn_message(self) -> turns.Message:
    call = turns.Call(self.call_id, self.name, self.arguments)
    return turns.Message("assistant", "", calls=(call,))


class _Output(pydantic.BaseModel):
  call_id: Annotated[str, pydantic.Field(min_length=1)]
  output: openai_requests.Texts

  def turn_message(self) -> turns.Message:
    text = openai_requests.text_of(self.output)
    return turns.Message("tool", text, call_id=self.call_id)


class _Thought(pydantic.BaseModel):
  text: str


class _Reasoning(pydantic.BaseModel):
  content: list[_Thought] | None = None
  summary: list[_Thought] = []

  def turn_message(self) -> turns.Message:
    thoughts = self.content or self.summary
    text = "\n".join(thought.text for thought in thoughts)
    return turns.Message("assistant", "", reasoning=text)


def _kind(item: Any) -> str:
  """Returns the type of an item; a message may have none."""
  kind = item.get("type") if isinstance(item, dict) else None
  return "message" if kind is None else str(kind)


_Item = Annotated[
  Annotated[_Message, pydantic.Tag("message")]
  | Annotated[_Call, pydantic.Tag("function_call")]
  | Annotated[_Output, pydantic.Tag("function_call_output")]
  | Annotated[_Reasoning, pydantic.Tag("reasoning")],
  pydantic.Discriminator(
    _kind,
    custom_error_type="item",
    custom_error_message="an item of type message, function_call, "
    "function_call_output or reasoning",
  ),
]


def _items(content: Any) -> Any:
  """Returns an input as items."""
  if isinstance(content, str):
    return [{"role": "user", "content": content}]
  return content


class Request(fields.Request, openai_requests.ResponsesRequest):
  """The body of `POST responses`."""

  input: Annotated[
    list[_Item],
    pydantic.Field(min_length=1, fail_fast=True),
    pydantic.BeforeValidator(_items),
  ]
  tools: Annotated[list[fields.Function], pydantic.Field(fail_fast=True)] = []
  truncation: Literal["disabled"] = "disabled"
  previous_response_id: Annotated[
    None,
    fields.unserved(
      "the whole conversation in `input`: this endpoint stores no responses"
    ),
  ] = None
  max_tool_calls: Annotated[
    None,
    fields.unserved("no such field: the training assigns the budget"),
  ] = None

  def turn_messages(self) -> Sequence[turns.Message]:
    messages = []
    if self.instructions is not None:
      text = openai_requests.text_of(self.instructions)
      messages.append(turns.Message("system", text))
    for item in self.input:
      message = item.turn_message()
      if messages and _continues(messages[-1], message):
        messages[-1] = _joined(messages[-1], message)
      else:
        messages.append(message)
    return messages

  def functions(self) -> Sequence[fields.Function]:
    return self.tools


def _continues(last: turns.Message, message: turns.Message) -> bool:
  """Returns whether a message is a further part of the reply before it."""
  if (last.role, message.role) != ("assistant", "assistant"):
    return False
  if message.calls:
    return True
  # A reply has its reasoning first and its calls last.
  return not (message.reasoning or last.content or last.calls)


def _joined(last: turns.Message, message: turns.Message) -> turns.Message:
  return dataclasses.replace(
    last,
    content=last.content or message.content,
    calls=last.calls + message.calls,
  )


def collected(request: Request, reply: turns.TurnReply) -> response_events.Item:
  """Returns the response of a turn."""
  *_, last = streamed(request, reply)
  return last["response"]


def streamed(
  request: Request, reply: turns.TurnReply
) -> Iterator[response_events.Item]:
  """Yields the events of a turn."""
  writer = response_events.Writer()
  settings = {
    "model": request.model or "",
    "tool_choice": request.tool_choice,
    "tools": [
      {"type": "function", "strict": False, **tool.tool()}
      for tool in request.tools
    ],
    "temperature": request.temperature,
    "top_p": request.top_p,
    "max_output_tokens": request.max_output_tokens,
  }
  response = writer.values("in_progress", usage=None, **settings)
  for name in ("created", "in_progress"):
    yield writer.event(f"response.{name}", response=response)
  message = reply.message
  if message.reasoning:
    part = {"type": "reasoning_text", "text": ""}
    yield from writer.begin_item("rs", "reasoning", part, summary=[])
    yield from _text_events(writer, part, message.reasoning)
  if message.content or not message.calls:
    part = response_events.message_part()
    yield from writer.begin_item("msg", "message", part, role="assistant")
    yield from _text_events(writer, part, message.content, logprobs=[])
  for call in message.calls:
    yield from _call_events(writer, call)
  status = "incomplete" if reply.is_cut else "completed"
  details = {"reason": "max_output_tokens"} if reply.is_cut else None
  usage = response_events.usage(
    reply.prompt_tokens, reply.written_tokens, reply.cached_tokens
  )
  response = writer.values(status, usage=usage, **settings)
  response["incomplete_details"] = details
  yield writer.event(f"response.{status}", response=response)


def _text_events(
  writer: response_events.Writer,
  part: response_events.Item,
  text: str,
  **values: Any,
) -> Iterator[response_events.Item]:
  kind = part["type"]
  part["text"] = text
  yield writer.part_event(f"response.{kind}.delta", delta=text, **values)
  yield from writer.end_item(kind, **values)


def _call_events(
  writer: response_events.Writer, call: turns.Call
) -> Iterator[response_events.Item]:
  names = {"call_id": call.id, "name": call.name}
  item = writer.add_item("fc", "function_call", arguments="", **names)
  yield writer.item_event("response.output_item.added", {**item})
  item["arguments"] = call.arguments
  kind = "response.function_call_arguments"
  yield writer.part_event(f"{kind}.delta", indexed=False, delta=call.arguments)
  yield writer.part_event(
    f"{kind}.done", indexed=False, name=call.name, arguments=call.arguments
  )
  yield writer.complete_item()


def refused(error: Mapping[str, Any]) -> response_events.Item:
  """Returns the event of an error after the beginning of a stream."""
  return response_events.Writer().error_event(error)
