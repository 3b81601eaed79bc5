"""OpenAI's Chat Completions API, for clients without the Responses API.

Reasoning and searches are sent as `reasoning_content`, which SGLang and vLLM
stream too: https://docs.vllm.ai/en/latest/features/reasoning_outputs.html
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from anysearch_jax import types
from anysearch_jax.agent import events
from anysearch_jax.environment import citations
from anysearch_jax.host import openai_replies, openai_requests
from anysearch_jax.serving import fields


class Request(fields.Request, openai_requests.ChatRequest):
  """The body of `POST /v1/chat/completions`."""

  messages: fields.Messages

  def turns(self) -> list[tuple[str, str]]:
    return fields.role_texts(self.messages)


class Writer:
  """Turns an agent's events into chunks, or into a completion."""

  last = openai_replies.DONE

  def __init__(self, request: fields.ParsedRequest, served: fields.Served):
    self._served = served
    self._id = f"chatcmpl-{uuid.uuid4().hex}"
    self._created = int(time.time())
    self._request = request
    self._reply: events.Reply | None = None

  def begin(self) -> Iterator[dict[str, Any]]:
    """Yields the chunk before the first event."""
    yield self._chunk({"role": "assistant", "content": ""})

  def write(self, event: events.Event) -> Iterator[dict[str, Any]]:
    """Yields the chunks of an event."""
    if isinstance(event, events.Answer):
      self._reply = event.reply
      delta = _message(event.reply, self._served)
      del delta["role"]  # Clients join the roles of all chunks.
      yield self._chunk(delta)
      last = self._chunk({}, finish=_finish(event.reply))
      yield last | {"anysearch": event.reply.record()}
    elif text := _reasoning(event):
      yield self._chunk({"reasoning_content": text})

  def end(self) -> Iterator[dict[str, Any]]:
    """Yields the chunks after the last event."""
    if self._request.usage and self._reply is not None:
      chunk = self._chunk({})
      yield chunk | {"choices": [], "usage": _usage(self._reply)}

  def refused(self, error: openai_requests.RequestError) -> dict[str, Any]:
    """Returns the chunk of an error that occurs after the first chunk."""
    return {"error": openai_replies.error_of(error)}

  def collected(self, answer_events: Sequence[events.Event]) -> dict[str, Any]:
    """Returns the completion of all events of a question."""
    *_, last = answer_events
    assert isinstance(last, events.Answer)  # Every question ends with it.
    reply = last.reply
    message = _message(reply, self._served)
    message["reasoning_content"] = "".join(map(_reasoning, answer_events))
    choice: dict[str, Any] = {"message": message, "anysearch": reply.record()}
    completion = self._values("chat.completion", choice, _finish(reply))
    return completion | {"usage": _usage(reply)}

  def _chunk(
    self, delta: Mapping[str, Any], finish: str | None = None
  ) -> dict[str, Any]:
    return self._values("chat.completion.chunk", {"delta": delta}, finish)

  def _values(
    self, kind: str, choice: dict[str, Any], finish: str | None
  ) -> dict[str, Any]:
    described = {"index": 0, "finish_reason": finish, "logprobs": None}
    return {
      "id": self._id,
      "object": kind,
      "created": self._created,
      "model": self._request.model,
      "choices": [described | choice],
    }


def _reasoning(event: events.Event) -> str:
  """Returns the `reasoning_content` of an event."""
  match event:
    case events.Thinking(text):
      return text
    case events.Searching(number, query):
      return f"\n\nsearch {number}: {query}\n"
    case events.Found(_, passages):
      titles = "; ".join(map(citations.title, passages))
      return f"found: {titles or 'nothing'}\n\n"
  return ""


def _message(reply: events.Reply, served: fields.Served) -> dict[str, Any]:
  citations = fields.url_citations(reply, served)
  return {
    "role": "assistant",
    "content": reply.answer,
    "refusal": reply.reason if reply.answer is None else None,
    # In this API the type is beside the citation, not a field of it.
    "annotations": [
      {"type": citation.pop("type"), "url_citation": citation}
      for citation in citations
    ],
  }


def _finish(reply: events.Reply) -> str:
  cut = reply.outcome is types.Outcome.TRUNCATED and reply.answer is None
  return "length" if cut else "stop"


def _usage(reply: events.Reply) -> dict[str, Any]:
  prompt_tokens = len(reply.trajectory.token_ids) - reply.tokens
  return {
    "prompt_tokens": prompt_tokens,
    "completion_tokens": reply.tokens,
    "total_tokens": prompt_tokens + reply.tokens,
    "searches": reply.searches,
  }
