"""Links the turns of a session by the exact text of the tokens sampled.

A program sends its whole conversation with each request. The conversation,
rendered by the chat template, continues a segment if it begins with the
segment's text. Then the sampled ids stay as they are, and only the rest is
encoded. A program that rewrote its history (it summarised, cut or reordered
it, or its template drops old reasoning) begins a new segment instead, which the
policy reads from its first token. So every token that is trained on was sampled
in the context that it is trained in.

Calls of tools are parsed from the text for the program, and sent back in its
own spelling of JSON. An assistant's message that a session returned is
therefore rendered from the text that the policy wrote.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from anysearch_jax import types
from anysearch_jax.environment import protocol
from anysearch_jax.rollout import episode_state
from anysearch_jax.sessions import turns


@runtime_checkable
class Codec(types.TextCodec, Protocol):
  """A codec that renders conversations; see `policy.tokenizer.Tokenizer`."""

  def render_messages(
    self,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] = (),
  ) -> str:
    """Applies the chat template to a conversation, with generation prompt."""

  def encode_prompt(self, text: str) -> list[int]:
    """Returns the ids of a rendered prompt."""

  def transcript(self, ids: Sequence[int]) -> str:
    """Returns the text of ids with control tokens."""


@dataclasses.dataclass(frozen=True)
class Segment:
  """Tokens that extend each other: a context of its own.

  Attributes:
    episode: the tokens with their authors, and what they cost.
    text: the text of the tokens, as the chat template writes it.
    end: text of the token by which the policy ended its last turn; "" if it
      ended otherwise. Templates write it too.
  """

  episode: episode_state.Episode
  text: str = ""
  end: str = ""

  def continuation(self, conversation: str) -> str | None:
    """Returns what a rendered conversation adds; None if it is another."""
    if not conversation.startswith(self.text):
      return None
    return conversation[len(self.text) :].removeprefix(self.end)


def longest(segments: Sequence[Segment], conversation: str) -> int | None:
  """Returns the index of the longest segment that a conversation continues.

  Args:
    segments: the segments of a session.
    conversation: the rendered conversation.
  """
  lengths = [
    -1 if segment.continuation(conversation) is None else len(segment.text)
    for segment in segments
  ]
  best = max(lengths, default=-1)
  return None if best < 0 else lengths.index(best)


def template_messages(
  messages: Sequence[turns.Message],
  written: Mapping[turns.Message, Sequence[turns.Message]],
  control_tokens: Sequence[str],
) -> list[dict[str, Any]]:
  """Returns messages as chat templates take them.

  Args:
    messages: the program's conversation.
    written: for each message that the session returned, the messages that it
      stands for, in the policy's own text.
    control_tokens: texts that the program's messages must not contain.
  """
  rendered: list[dict[str, Any]] = []
  for message in messages:
    parts = written.get(message)
    if parts is not None:
      rendered += [{"role": p.role, "content": p.content} for p in parts]
      continue
    values: dict[str, Any] = {
      "role": message.role,
      "content": protocol.break_control_tokens(message.content, control_tokens),
    }
    if message.calls:
      values["tool_calls"] = [_template_call(call) for call in message.calls]
    if message.call_id:
      values["tool_call_id"] = message.call_id
    rendered.append(values)
  return rendered


def _template_call(call: turns.Call) -> dict[str, Any]:
  """Returns a call as chat templates take it, its arguments as an object."""
  try:
    arguments = json.loads(call.arguments)
  except (ValueError, RecursionError):
    arguments = call.arguments  # Templates print a text as it is.
  function = {"name": call.name, "arguments": arguments}
  return {"id": call.id, "type": "function", "function": function}
