"""OpenAI's Chat Completions API, for clients that know nothing else.

The reasoning and the searches are `reasoning_content`, as SGLang and vLLM
stream it: https://docs.vllm.ai/en/latest/features/reasoning_outputs.html
"""

from __future__ import annotations

import itertools
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from anysearch_jax import types
from anysearch_jax.agent import events
from anysearch_jax.serving import answers, fields, responses_api

_ROLES = ("system", "developer", "user", "assistant")


def read(values: Any, served: fields.Served) -> tuple[fields.Asked, bool]:
  """Reads the body of `POST /v1/chat/completions`.

  Returns:
    The request, and whether a stream ends with the usage.

  Raises:
    fields.RequestError: a field cannot be honoured.
  """
  body = fields.Body(values)
  question = fields.conversation(_turns(body.take("messages")))
  fields.tools(body, ())
  body.take("web_search_options")
  body.take("reasoning_effort")
  form = body.take("response_format")
  kind = form.get("type") if isinstance(form, Mapping) else form
  if kind not in (None, "text"):
    raise fields.refuse("response_format", kind, "'text'")
  options = body.take("stream_options") or {}
  if not isinstance(options, Mapping):
    raise fields.refuse("stream_options", options, "an object")
  asked = fields.asked(
    body,
    served,
    question=question,
    tokens=("max_completion_tokens", "max_tokens"),
    choices=True,
  )
  return asked, bool(options.get("include_usage"))


def _turns(found: Any) -> list[tuple[str, str]]:
  """Returns role and text of each message."""
  if not isinstance(found, list) or not found:
    raise fields.refuse("messages", found, "a list with a question")
  turns = []
  for message in found:
    role = message.get("role") if isinstance(message, Mapping) else None
    if role not in _ROLES:
      raise fields.refuse("messages", message, f"a role of {', '.join(_ROLES)}")
    text = fields.text_of(message.get("content"), "messages", ("text",))
    turns.append((role, text))
  return turns


class Writer:
  """Turns an agent's events into chunks, and replies into a completion.

  Args:
    asked: the request.
    usage: whether a stream ends with a chunk of the usage.
  """

  framed = staticmethod(answers.data)
  last = answers.DONE

  def __init__(self, asked: fields.Asked, *, usage: bool = False):
    self._id = f"chatcmpl-{uuid.uuid4().hex}"
    self._created = int(time.time())
    self._asked, self._usage = asked, usage
    self._replies: list[events.Reply] = []

  def begin(self) -> Iterator[dict[str, Any]]:
    """Yields the chunks before the first event."""
    for index in range(self._asked.choices):
      yield self._chunk(index, {"role": "assistant", "content": ""})

  def write(self, index: int, event: events.Event) -> Iterator[dict[str, Any]]:
    """Yields the chunks of an event of one choice."""
    match event:
      case events.Answer(reply):
        self._replies.append(reply)
        message = _message(reply)
        delta = {k: v for k, v in message.items() if k != "reasoning_content"}
        yield self._chunk(index, delta)
        yield self._chunk(index, {}, finish=_finish(reply)) | {
          "anysearch": responses_api.told(reply)
        }
      case _:
        if text := _reasoning(event):
          yield self._chunk(index, {"reasoning_content": text})

  def end(self) -> Iterator[dict[str, Any]]:
    """Yields the chunks after the last event."""
    if self._usage:
      chunk = self._chunk(0, {})
      yield chunk | {"choices": [], "usage": _usage(self._replies)}

  def refused(self, error: fields.RequestError) -> dict[str, Any]:
    """Returns the chunk of an error after the first chunk was sent."""
    return error.body()

  def completion(
    self, told: Sequence[Sequence[events.Event]]
  ) -> dict[str, Any]:
    """Returns the completion of the events of all choices."""
    choices = []
    for index, each in enumerate(told):
      reply = reply_of(each)
      self._replies.append(reply)
      reasoning = "".join(map(_reasoning, each))
      choices.append(
        {
          "index": index,
          "message": {**_message(reply), "reasoning_content": reasoning},
          "finish_reason": _finish(reply),
          "logprobs": None,
          "anysearch": responses_api.told(reply),
        }
      )
    return {
      "id": self._id,
      "object": "chat.completion",
      "created": self._created,
      "model": self._asked.model,
      "choices": choices,
      "usage": _usage(self._replies),
    }

  def _chunk(
    self, index: int, delta: Mapping[str, Any], finish: str | None = None
  ) -> dict[str, Any]:
    choice = {
      "index": index,
      "delta": delta,
      "finish_reason": finish,
      "logprobs": None,
    }
    return {
      "id": self._id,
      "object": "chat.completion.chunk",
      "created": self._created,
      "model": self._asked.model,
      "choices": [choice],
    }


def reply_of(told: Sequence[events.Event]) -> events.Reply:
  """Returns the reply that ends the events of a question."""
  last = told[-1]
  assert isinstance(last, events.Answer)
  return last.reply


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
    case _:
      return ""


def _message(reply: events.Reply) -> dict[str, Any]:
  passages = itertools.chain.from_iterable(reply.documents)
  cited = responses_api.citations(
    reply.answer or "", {responses_api.source(p): p for p in passages}
  )
  return {
    "role": "assistant",
    "content": reply.answer,
    "refusal": reply.reason if reply.answer is None else None,
    "annotations": [
      {
        "type": "url_citation",
        "url_citation": {k: v for k, v in each.items() if k != "type"},
      }
      for each in cited
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
