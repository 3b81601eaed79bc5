"""OpenAI's Chat Completions API, for clients that know nothing else.

The reasoning and the searches are `reasoning_content`, as SGLang and vLLM
stream it: https://docs.vllm.ai/en/latest/features/reasoning_outputs.html
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

import pydantic

from anysearch_jax import types
from anysearch_jax.agent import events
from anysearch_jax.serving import fields, wire


class Request(fields.Request):
  """The body of `POST /v1/chat/completions`."""

  messages: fields.Messages
  max_completion_tokens: fields.Tokens | None = None
  max_tokens: fields.Tokens | None = None
  n: Annotated[int, pydantic.Field(ge=1, le=fields.MOST_CHOICES)] = 1
  response_format: fields.Form = fields.Form()
  web_search_options: Any = None
  reasoning_effort: Any = None

  def turns(self) -> list[tuple[str, str]]:
    return fields.said_by(self.messages)

  def token_limits(self) -> list[int | None]:
    return [self.max_completion_tokens, self.max_tokens]


class Writer:
  """Turns an agent's events into chunks, and replies into a completion."""

  framed = staticmethod(wire.data)
  last = wire.DONE

  def __init__(self, asked: fields.Asked, served: fields.Served):
    self._cites = served.cites
    self._id = f"chatcmpl-{uuid.uuid4().hex}"
    self._created = int(time.time())
    self._asked = asked
    self._replies: list[events.Reply] = []

  def begin(self) -> Iterator[dict[str, Any]]:
    """Yields the chunks before the first event."""
    for index in range(self._asked.choices):
      yield self._chunk(index, {"role": "assistant", "content": ""})

  def write(self, index: int, event: events.Event) -> Iterator[dict[str, Any]]:
    """Yields the chunks of an event of one choice."""
    if isinstance(event, events.Answer):
      reply = event.reply
      self._replies.append(reply)
      yield self._chunk(index, _message(reply, self._cites))
      last = self._chunk(index, {}, finish=_finish(reply))
      yield last | {"anysearch": reply.record()}
    elif text := _reasoning(event):
      yield self._chunk(index, {"reasoning_content": text})

  def end(self) -> Iterator[dict[str, Any]]:
    """Yields the chunks after the last event."""
    if self._asked.usage:
      chunk = self._chunk(0, {})
      yield chunk | {"choices": [], "usage": _usage(self._replies)}

  def refused(self, error: fields.RequestError) -> dict[str, Any]:
    """Returns the chunk of an error after the first chunk was sent."""
    return error.body()

  def collected(self, told: Sequence[Sequence[events.Event]]) -> dict[str, Any]:
    """Returns the completion of the events of all choices."""
    choices = []
    for index, each in enumerate(told):
      *_, last = each
      assert isinstance(last, events.Answer)  # It ends a question's events.
      self._replies.append(reply := last.reply)
      message = _message(reply, self._cites)
      message["reasoning_content"] = "".join(map(_reasoning, each))
      said = {"message": message, "anysearch": reply.record()}
      choices.append(_choice(index, _finish(reply)) | said)
    usage = _usage(self._replies)
    return self._values("chat.completion", choices) | {"usage": usage}

  def _chunk(
    self, index: int, delta: Mapping[str, Any], finish: str | None = None
  ) -> dict[str, Any]:
    choice = _choice(index, finish) | {"delta": delta}
    return self._values("chat.completion.chunk", [choice])

  def _values(self, kind: str, choices: list) -> dict[str, Any]:
    said = {"id": self._id, "object": kind, "created": self._created}
    return said | {"model": self._asked.model, "choices": choices}


def _choice(index: int, finish: str | None) -> dict[str, Any]:
  return {"index": index, "finish_reason": finish, "logprobs": None}


def _reasoning(event: events.Event) -> str:
  """Returns what `reasoning_content` says of an event."""
  match event:
    case events.Thinking(text):
      return text
    case events.Searching(number, query):
      return f"\n\nsearch {number}: {query}\n"
    case events.Found(_, passages):
      titles = "; ".join(passage.title for passage in passages)
      return f"found: {titles or 'nothing'}\n\n"
  return ""


def _message(reply: events.Reply, cites: bool) -> dict[str, Any]:
  cited = wire.citations(reply, cites)
  return {
    "role": "assistant",
    "content": reply.answer,
    "refusal": reply.reason if reply.answer is None else None,
    # Here the type is beside the citation, and not in it.
    "annotations": [
      {"type": each.pop("type"), "url_citation": each} for each in cited
    ],
  }


def _finish(reply: events.Reply) -> str:
  cut = reply.outcome is types.Outcome.TRUNCATED and reply.answer is None
  return "length" if cut else "stop"


def _usage(replies: Sequence[events.Reply]) -> dict[str, Any]:
  written = sum(reply.tokens for reply in replies)
  given = sum(len(r.trajectory.token_ids) - r.tokens for r in replies)
  return {
    "prompt_tokens": given,
    "completion_tokens": written,
    "total_tokens": given + written,
    "searches": sum(reply.searches for reply in replies),
  }
