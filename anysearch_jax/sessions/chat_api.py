"""OpenAI's Chat Completions API, as a program that is trained uses it.

Reasoning is `reasoning_content`, which SGLang and vLLM write too:
https://docs.vllm.ai/en/latest/features/reasoning_outputs.html
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

import pydantic

from anysearch_jax.host import openai_replies, openai_requests
from anysearch_jax.sessions import fields, turns

LAST = openai_replies.DONE


class _CalledFunction(pydantic.BaseModel):
  name: str
  arguments: str


class _Call(pydantic.BaseModel):
  id: str
  type: Literal["function"] = "function"
  function: _CalledFunction


class _Message(pydantic.BaseModel):
  role: Literal["system", "developer", "user", "assistant", "tool"]
  content: openai_requests.Texts | None = None
  tool_calls: Annotated[list[_Call] | None, pydantic.Field(fail_fast=True)] = (
    None
  )
  tool_call_id: str = ""
  reasoning_content: str | None = None
  refusal: str | None = None

  @pydantic.model_validator(mode="after")
  def _is_complete(self) -> _Message:
    if self.role == "tool" and not self.tool_call_id:
      raise ValueError("tool_call_id in a message of a tool")
    if self.content is None and self.role != "assistant":
      raise ValueError(f"content in a message of role {self.role!r}")
    return self

  def turn_message(self) -> turns.Message:
    calls = [
      turns.Call(call.id, call.function.name, call.function.arguments)
      for call in self.tool_calls or ()
    ]
    text = openai_requests.text_of(self.content or "")
    return turns.Message(
      fields.role_of(self.role),
      text or self.refusal or "",
      tuple(calls),
      self.tool_call_id,
      self.reasoning_content or "",
    )


class _Tool(pydantic.BaseModel):
  type: Literal["function"]
  function: fields.Function


class Request(fields.Request, openai_requests.ChatRequest):
  """The body of `POST chat/completions`."""

  messages: Annotated[
    list[_Message], pydantic.Field(min_length=1, fail_fast=True)
  ]
  tools: Annotated[list[_Tool], pydantic.Field(fail_fast=True)] = []

  def turn_messages(self) -> Sequence[turns.Message]:
    return [message.turn_message() for message in self.messages]

  def functions(self) -> Sequence[fields.Function]:
    return [tool.function for tool in self.tools]


def collected(request: Request, reply: turns.TurnReply) -> dict[str, Any]:
  """Returns the completion of a turn."""
  message = {"role": "assistant", "content": None, "refusal": None}
  message |= _delta(reply.message)
  choice = {"message": message, "finish_reason": _finish_reason(reply)}
  completion = _values(request, "chat.completion", choice)
  return completion | {"usage": _usage(reply)}


def streamed(
  request: Request, reply: turns.TurnReply
) -> Iterator[dict[str, Any]]:
  """Yields the chunks of a turn."""
  chunk = _values(request, "chat.completion.chunk", {"finish_reason": None})
  (empty_choice,) = chunk["choices"]

  def with_delta(delta: Mapping[str, Any], **values: Any) -> dict[str, Any]:
    return chunk | {"choices": [empty_choice | {"delta": delta} | values]}

  yield with_delta({"role": "assistant", "content": ""})
  for name, value in _delta(reply.message).items():
    pieces = [value]
    if name == "tool_calls":
      pieces = [[{"index": i, **call}] for i, call in enumerate(value)]
    for piece in pieces:
      yield with_delta({name: piece})
  yield with_delta({}, finish_reason=_finish_reason(reply))
  if request.stream_options.include_usage:
    yield chunk | {"choices": [], "usage": _usage(reply)}


def refused(error: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the chunk of an error after the beginning of a stream."""
  return {"error": error}


def _delta(message: turns.Message) -> dict[str, Any]:
  """Returns the parts of a message that are not empty."""
  parts: dict[str, Any] = {}
  if message.reasoning:
    parts["reasoning_content"] = message.reasoning
  if message.content or not message.calls:
    parts["content"] = message.content
  if message.calls:
    parts["tool_calls"] = [
      {
        "id": call.id,
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
      }
      for call in message.calls
    ]
  return parts


def _values(
  request: Request, kind: str, choice: Mapping[str, Any]
) -> dict[str, Any]:
  return {
    "id": f"chatcmpl-{uuid.uuid4().hex}",
    "object": kind,
    "created": int(time.time()),
    "model": request.model or "",
    "choices": [{"index": 0, "logprobs": None, **choice}],
  }


def _finish_reason(reply: turns.TurnReply) -> str:
  if reply.is_cut:
    return "length"
  return "tool_calls" if reply.message.calls else "stop"


def _usage(reply: turns.TurnReply) -> dict[str, Any]:
  return {
    "prompt_tokens": reply.prompt_tokens,
    "completion_tokens": reply.written_tokens,
    "total_tokens": reply.prompt_tokens + reply.written_tokens,
    "prompt_tokens_details": {"cached_tokens": reply.cached_tokens},
  }
