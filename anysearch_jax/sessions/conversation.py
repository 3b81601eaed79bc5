"""Links the turns of a session without encoding what the policy wrote.

A program sends its whole conversation with each request. Its messages that the
session returned are turns whose sampled ids are known, so a conversation is
read as pieces: texts between them, and turns. If the pieces begin with those of
a segment, the request continues that segment: the ids stay as they are, and
only the texts that follow are encoded. A program that rewrote its history
begins a new segment instead, which the policy reads from its first token. So
every token that is trained on was sampled in the context that it is trained in.

A turn stands in the template as the policy wrote it, also where the template
would drop or trim the text of an earlier message.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os.path
import re
from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, cast, runtime_checkable

from anysearch_jax import types
from anysearch_jax.environment import protocol, spec
from anysearch_jax.rollout import episode_state
from anysearch_jax.sessions import turns

# In a rendered conversation, a turn is its number between these characters of
# Unicode's private use area, which no message may contain.
_OPENS = "\ue000"
_CLOSES = "\ue001"
_PLACE = re.compile(f"{_OPENS}(\\d+){_CLOSES}")
_RESERVED = re.compile(f"[{_OPENS}{_CLOSES}]")
_REPLACEMENT = "\ufffd"


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


class SampledTurn(NamedTuple):
  """A turn of the policy in a conversation, by its number in the session."""

  number: int


class Line(NamedTuple):
  """A text that the session adds as the user, unseen by the program."""

  text: str


# What a message stands for that the session returned: turns of the policy, and
# what the program did not see between them.
Written = Sequence[SampledTurn | Line]
Entry = SampledTurn | turns.Message
Piece = str | SampledTurn


@dataclasses.dataclass(frozen=True)
class Conversation:
  """A conversation as the policy reads it.

  Attributes:
    pieces: a text, then texts and turns in order.
    prompt_ids: the ids of the first text.
  """

  pieces: tuple[Piece, ...]
  prompt_ids: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Segment:
  """Tokens that extend each other: a context of its own.

  Attributes:
    episode: the tokens with their authors, and what they cost.
    pieces: what a conversation begins with if it continues this segment.
    landed: whether the policy was asked for its answer here.
    asked: the pieces of the request that the last reply answered.
    earlier: the segment before that request; None if the request began it.
  """

  episode: episode_state.Episode
  pieces: tuple[Piece, ...] = ()
  landed: bool = False
  asked: tuple[Piece, ...] = ()
  earlier: Segment | None = None

  def continuation(self, pieces: Sequence[Piece]) -> list[str] | None:
    """Returns the texts that pieces add to the segment.

    None if they do not continue it, or if they add turns.
    """
    added = list(pieces[len(self.pieces) :])
    if tuple(pieces[: len(self.pieces)]) != self.pieces:
      return None
    texts = [piece for piece in added if isinstance(piece, str)]
    return texts if len(texts) == len(added) else None


def key_of(message: turns.Message) -> turns.Message:
  """Returns a message as one that was returned is recognised by.

  Frameworks write the arguments of calls anew, with other spaces or escapes.
  """
  if not message.calls and not message.reasoning:
    return message
  calls = tuple(
    dataclasses.replace(call, arguments=_canonical(call.arguments))
    for call in message.calls
  )
  return dataclasses.replace(message, calls=calls, reasoning="")


def _canonical(arguments: str) -> str:
  """Returns a JSON text in one spelling; another text as it is."""
  try:
    return json.dumps(json.loads(arguments), sort_keys=True)
  except (ValueError, RecursionError):
    return arguments


def read(
  entries: Sequence[Entry],
  tools: Sequence[Mapping[str, Any]],
  codec: Codec,
) -> Conversation:
  """Returns a conversation in the policy's chat template.

  Args:
    entries: the conversation, see `resolved`.
    tools: the functions that the policy may call.
    codec: renders the conversation.

  Raises:
    ValueError: the template takes no such conversation.
  """
  rendered: list[dict[str, Any]] = []
  for entry in entries:
    if isinstance(entry, SampledTurn):
      place = f"{_OPENS}{entry.number}{_CLOSES}"
      rendered.append({"role": "assistant", "content": place})
    else:
      rendered.append(_template_message(entry, codec.control_tokens))
  functions = [
    {
      "type": "function",
      "function": _safe_values(dict(tool), codec.control_tokens),
    }
    for tool in tools
  ]
  text = codec.render_messages(rendered, functions)
  # Codecs are hashed by their identity.
  earlier_header, header = _headers(cast(Hashable, codec))
  parts = _PLACE.split(text)  # Texts alternate with the numbers of turns.
  pieces: list[Piece] = []
  for before_turn, number in zip(parts[::2], parts[1::2]):
    # A turn was sampled after the header of a new message.
    before_turn = before_turn.removesuffix(earlier_header) + header
    pieces += [before_turn, SampledTurn(int(number))]
  pieces.append(parts[-1])
  prompt = pieces[0]
  assert isinstance(prompt, str)
  return Conversation(tuple(pieces), tuple(codec.encode_prompt(prompt)))


@functools.lru_cache(maxsize=8)
def _headers(codec: Any) -> tuple[str, str]:
  """Returns how the template begins an earlier turn, and the next one.

  They may differ: a template may end in `<think>`, and drop it from earlier
  messages. Both are "" if they do not.
  """
  user = {"role": "user", "content": "x"}
  place = {"role": "assistant", "content": f"{_OPENS}0{_CLOSES}"}
  try:
    prompt = codec.render_messages([user])
    longer = codec.render_messages([user, place, user])
  except ValueError:
    return "", ""
  earlier_prompt = _PLACE.split(longer)[0]
  common = os.path.commonprefix([prompt, earlier_prompt])
  return earlier_prompt[len(common) :], prompt[len(common) :]


def read_in_tags(
  entries: Sequence[Entry],
  environment: spec.Environment,
  codec: Codec,
) -> Conversation:
  """Returns a conversation in the layout of the project's own episodes.

  The first user message is the prompt. All that follows, also what the program
  says, is text of the one turn that the policy continues, as in the paper.

  Args:
    entries: the conversation, see `resolved`.
    environment: says how the prompt is rendered.
    codec: renders the prompt.
  """
  system = ""
  first = entries[0] if entries else None
  if isinstance(first, turns.Message) and first.role == "system":
    system = _safe(first.content, codec.control_tokens)
    entries = entries[1:]
  prompt = ""
  if entries and isinstance(entries[0], turns.Message):
    prompt = _safe(entries[0].content, codec.control_tokens)
    entries = entries[1:]
  text, ids = codec.render(
    prompt, system, environment.prefill, environment.chat
  )
  opened = "" if environment.prefill else protocol.opened_reasoning(text)
  if opened:
    # As in `rollout.episode`, it follows what stands before the first turn.
    special_count = len(ids) - len(codec.encode(text))
    text = text.removesuffix(opened)
    ids = [*ids[:special_count], *codec.encode(text)]
  pieces: list[Piece] = [text]
  for entry in entries:
    if isinstance(entry, SampledTurn):
      pieces.append(entry)
    elif len(pieces) > 1 and isinstance(pieces[-1], str):
      pieces[-1] += _safe(entry.content, codec.control_tokens)
    else:
      pieces.append(_safe(entry.content, codec.control_tokens))
  if opened:
    is_turn = [isinstance(piece, SampledTurn) for piece in pieces]
    first_turn = is_turn.index(True) if any(is_turn) else len(pieces)
    pieces.insert(first_turn, opened)
  return Conversation(tuple(pieces), tuple(ids))


def resolved(
  messages: Sequence[turns.Message],
  written: Mapping[turns.Message, Sequence[Written]],
  hidden: Written = (),
  own_turns: Collection[Piece] | None = None,
) -> list[Entry]:
  """Returns messages, with the turns that the session returned in their place.

  A line follows a message of the user as another paragraph, because templates
  may refuse two messages of a user in a row.

  Args:
    messages: the program's conversation.
    written: for each message that the session returned, by `key_of`, what it
      stands for, at each time that it was returned.
    hidden: what follows the conversation, unseen by the program.
    own_turns: the turns that a message stands for if it was returned several
      times; None: these times in order.
  """
  parts: list[Entry | Line] = []
  occurrences: dict[turns.Message, int] = {}
  for message in messages:
    key = key_of(message)
    times = written.get(key)
    if times is None:
      parts.append(message)
      continue
    if own_turns is not None:
      own_times = [time for time in times if time[-1] in own_turns]
      times = own_times or times
    occurrence = occurrences.get(key, 0)
    occurrences[key] = occurrence + 1
    parts += times[min(occurrence, len(times) - 1)]
  entries: list[Entry] = []
  for part in [*parts, *hidden]:
    last = entries[-1] if entries else None
    if not isinstance(part, Line):
      entries.append(part)
    elif isinstance(last, turns.Message) and last.role == "user":
      content = f"{last.content}\n\n{part.text}"
      entries[-1] = dataclasses.replace(last, content=content)
    else:
      entries.append(turns.Message("user", part.text))
  return entries


def _safe(text: str, control_tokens: Sequence[str]) -> str:
  """Returns a program's text without control tokens and places of turns."""
  text = _RESERVED.sub(_REPLACEMENT, text)
  return protocol.break_control_tokens(text, control_tokens)


def _template_message(
  message: turns.Message, control_tokens: Sequence[str]
) -> dict[str, Any]:
  """Returns a message as chat templates take it."""
  values: dict[str, Any] = {
    "role": message.role,
    "content": _safe(message.content, control_tokens),
  }
  if message.reasoning:
    values["reasoning_content"] = _safe(message.reasoning, control_tokens)
  if message.calls:
    values["tool_calls"] = [
      _template_call(call, control_tokens) for call in message.calls
    ]
  if message.call_id:
    values["tool_call_id"] = message.call_id
  return values


def _template_call(
  call: turns.Call, control_tokens: Sequence[str]
) -> dict[str, Any]:
  """Returns a call as chat templates take it, its arguments as an object."""
  try:
    arguments = json.loads(call.arguments)
  except (ValueError, RecursionError):
    arguments = call.arguments  # Templates print a text as it is.
  function = {
    "name": _safe(call.name, control_tokens),
    "arguments": _safe_values(arguments, control_tokens),
  }
  return {"id": call.id, "type": "function", "function": function}


def _safe_values(values: Any, control_tokens: Sequence[str]) -> Any:
  """Returns JSON values whose texts are safe, see `_safe`."""
  if isinstance(values, str):
    return _safe(values, control_tokens)
  if isinstance(values, Mapping):
    return {
      _safe(str(name), control_tokens): _safe_values(value, control_tokens)
      for name, value in values.items()
    }
  if isinstance(values, list | tuple):
    return [_safe_values(value, control_tokens) for value in values]
  return values
