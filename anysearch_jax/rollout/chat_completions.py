"""The engine over any server with OpenAI's chat completions.

For chat models that run elsewhere: Ollama, llama.cpp, vLLM, SGLang, a hosted
one. An episode is a conversation there: its prompt is the first message, each
turn a message of the model, and what the environment adds the next message.
Two modes:

* `tools`: the tool `search` is offered. A call of it becomes the turn
  `<search>QUERY</search>`, and a message without a call the turn
  `<answer>TEXT</answer>`, so episodes, budgets and records are as always.
* `tags`: the model writes the tags itself, as its prompt says.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from anysearch_jax import config as config_lib
from anysearch_jax import types
from anysearch_jax.environment import protocol
from anysearch_jax.host import http_calls
from anysearch_jax.rollout import completions, written_calls

_log = logging.getLogger(__name__)

TOOLS = "tools"
TAGS = "tags"
# Statuses of a server without this route, and of one that refuses tools.
MISSING = (404, 405, 501)
_NO_TOOLS = (400, 422, 500)

_EXPECTED = "a message at choices[0].message, and its finish_reason"
_OFFER: dict[str, Any] = {
  "tools": [
    {
      "type": "function",
      "function": {
        "name": protocol.SEARCH,
        "description": "Searches the documents; returns the best passages.",
        "parameters": {
          "type": "object",
          "properties": {"query": {"type": "string"}},
          "required": ["query"],
        },
      },
    }
  ],
  "parallel_tool_calls": False,
}
_OFFER_CHARACTERS = len(json.dumps(_OFFER))
_CHOICE = "tool_choice"
# Asks for facts that no model knows, so a model with the tool calls it.
_PROBE = "Use the tool `search` to find out when the lease of flat 7 ends."
_PROBE_MESSAGES = [{"role": "user", "content": _PROBE}]
# Enough to call; a model that thinks for longer is asked by tags.
_PROBE_TOKENS = 256
# Names that servers give the field with a model's reasoning.
_REASONING = ("reasoning_content", "reasoning")
_OPENS = "<think>"
_CLOSES = "</think>"
# Characters of a token of any prose are fewer on average.
_MOST_CHARACTERS = 12
# Of calls that models write as text.
_BEGINS_CALL = ("{", "[", "<", "`")
_LONGEST_TAG = len("</information>")
# Stands for a message without text or calls: servers refuse to read an empty
# one, and with it every later turn of the conversation.
_NOTHING = "(nothing)"


class _Message(NamedTuple):
  """A message of a model.

  Attributes:
    thought: the reasoning that the server separates; "" if there is none.
    content: the text of the message.
    call: the first call of a tool, as the model wrote it, also in its text; ""
      without one.
    query: the query of that call; "" if it is no valid search.
    call_start: offset of the call in `content`; None if it is no part of it.
    message: the message as later requests repeat it: with the reasoning, which
      some models need, and only the first of several calls, as valid JSON.
    finish, matched: as of `completions.Completion`.
  """

  thought: str
  content: str
  call: str
  query: str
  call_start: int | None
  message: dict[str, Any]
  finish: str
  matched: str | None


class ChatEngine(completions.CompletionsEngine):
  """`types.Engine` over a server; it can be used from any event loop.

  Args:
    url, codec, settings: as of `completions.CompletionsEngine`. The codec
      renders a prompt as its content alone, as `plain_text.PlainText` does.
    mode: `tools` or `tags`; "": `probe` decides.

  Attributes:
    mode: how the model is asked; "" until `probe` decides.
    why: the reason for the mode, a clause.
  """

  route = "/chat/completions"

  def __init__(
    self, url: str, codec: completions.Codec, *, mode: str = "", **settings: Any
  ):
    super().__init__(url, codec, **settings)
    self.mode = mode
    self.why = ""
    # The conversation that led to each context, by episode. A context is a
    # text to the episode, but a list of messages to the server.
    self._conversations: dict[types.Address, _Conversations] = {}
    # Those of the episode that was released last.
    self._released: _Conversations = {}
    # Of the last request of each episode: characters sent, tokens read.
    self._read: dict[types.Address, tuple[int, int]] = {}

  async def probe(self) -> str:
    """Asks a question, which shows that address, key and model are right.

    Without a mode it offers the tool, and the mode is `tools` if the model
    calls it.

    Returns:
      The mode.

    Raises:
      types.RetrievalError: the server cannot be used; an
        `http_calls.StatusError` of `MISSING` if it has no such route, or does
        not know the model.
    """
    sampling = dataclasses.replace(self._sampling, temperature=0.0)
    if not self.mode:
      await self._choose_mode(sampling)
    else:
      fields = {"messages": _PROBE_MESSAGES, "max_tokens": 1}
      await self._ask(fields, sampling, _read_message, _EXPECTED)
    return self.mode

  async def _choose_mode(self, sampling: config_lib.SamplingConfig) -> None:
    """Decides by one question whether the model calls tools; raises as `probe`.

    A model that does not end in time is asked by tags.
    """
    fields = {"messages": _PROBE_MESSAGES, "max_tokens": _PROBE_TOKENS}
    self.mode = TAGS
    try:
      reply, _ = await self._ask(
        fields | _OFFER, sampling, _read_message, _EXPECTED
      )
    except http_calls.StatusError as error:
      if error.status not in _NO_TOOLS:
        self.mode = ""
        raise
      self.why = f"the server takes no tools: {error}"
    except http_calls.LateError as error:
      self.why = f"its reply to a question did not come in time: {error}"
    else:
      # A policy of this project writes its tags, also if a tool is offered.
      writes_tags = reply.call.startswith(f"<{protocol.SEARCH}>")
      calls_tool = bool(reply.query) and not writes_tags
      self.mode = TOOLS if calls_tool else TAGS
      self.why = f"it {'called' if calls_tool else 'did not call'} the tool"
      return
    try:
      fields["max_tokens"] = 1
      await self._ask(fields, sampling, _read_message, _EXPECTED)
    except types.RetrievalError:
      self.mode = ""
      raise

  async def generate(self, request: types.GenerateRequest) -> types.Generation:
    """See `types.Engine`."""
    # A generative retriever asks for a text, which stops at no search.
    tools = self.mode == TOOLS and protocol.STOPS[0] in request.stop
    messages = self._messages(request)
    fields: dict[str, Any] = {
      "messages": messages,
      "max_tokens": request.max_tokens,
      "seed": completions.seed(request.address, request.turn),
    }
    if not tools:
      fields["stop"] = list(request.stop)
    elif request.may_search:
      fields |= _OFFER
    elif _CHOICE not in self.refused:
      fields |= _OFFER
      fields[_CHOICE] = "none"
    # Streams, so that the deadline is one between tokens.
    fields |= {"stream": True, "stream_options": {"include_usage": True}}
    tell: Callable[[Mapping[str, Any]], None] = completions.ignore
    if request.on_tokens is not None:
      tell = _streamer(request.on_tokens, self._codec, tools=tools)
    sampling = self._sampling.for_request(request)
    with completions.engine_errors():
      reply, usage = await self._ask(
        fields, sampling, _read_message, _EXPECTED, tell
      )
      characters = sum(len(message["content"]) for message in messages)
      if "tools" in fields:
        characters += _OFFER_CHARACTERS
      self._check_read(request.address, characters, usage.prompt)
      if reply.call and _CHOICE in fields:
        self._leave_out(_CHOICE, "The model called a tool against tool_choice.")
        no_tools = (*_OFFER, _CHOICE)
        fields = {k: v for k, v in fields.items() if k not in no_tools}
        reply, _ = await self._ask(
          fields, sampling, _read_message, _EXPECTED, tell
        )
    turn = _turn_of_message(reply, request, self._codec, tools=tools)
    message = reply.message
    if not tools:  # Later requests repeat it with its stop text.
      text = turn.text.removeprefix(_thought_text(reply.thought, ended=True))
      message = {**message, "content": text}
      message.pop("tool_calls", None)
    if not message["content"].strip() and "tool_calls" not in message:
      message = {**message, "content": _NOTHING}
    context = (*request.token_ids, *turn.token_ids)
    conversations = self._conversations.setdefault(request.address, {})
    conversations[context] = [*messages, message]
    return turn

  def release(self, address: types.Address) -> None:
    """Forgets an episode's conversations, except those released last.

    A turn that is discarded is sampled again under another address, right after
    its own is released, and continues the same conversation.
    """
    self._released = self._conversations.pop(address, {})
    self._read.pop(address, None)

  def _check_read(
    self,
    address: types.Address,
    characters: int,
    prompt_tokens: int,
  ) -> None:
    """Warns once if the server seems to cut the front of prompts.

    Some servers do it without a word, so that the model never sees the
    question: Ollama at its `num_ctx`, which is 4,096 by default.

    Args:
      address: the episode.
      characters: what was sent, with the tools that were offered.
      prompt_tokens: what the server read by its own count; 0: it does not say.
    """
    known_characters, known_tokens = self._read.get(address, (0, 0))
    self._read[address] = characters, prompt_tokens
    expected = (characters - known_characters) / _MOST_CHARACTERS
    is_cut = prompt_tokens - known_tokens < expected and expected > 1
    if not prompt_tokens or not is_cut:
      return
    self.counters["cut_prompts"] += 1
    if self.counters["cut_prompts"] == 1:
      _log.warning(
        "The server says that it read %d tokens of a prompt of %d characters, "
        "after %d of %d. It seems to cut prompts at its context: raise that "
        "(Ollama: OLLAMA_CONTEXT_LENGTH or num_ctx; llama.cpp: --ctx-size), or "
        "lower --config.episode.max_context.",
        prompt_tokens,
        characters,
        known_tokens,
        known_characters,
      )

  def _messages(self, request: types.GenerateRequest) -> list[dict[str, Any]]:
    """Returns a context as messages.

    They are the longest conversation that the context continues, and the rest
    of the context as a new message.
    """
    ids = request.token_ids
    conversations: _Conversations = {
      (): [],
      **self._released,
      **self._conversations.get(request.address, {}),
    }
    prefixes = (key for key in conversations if key == ids[: len(key)])
    prefix = max(prefixes, key=len)
    text = self._codec.transcript(ids[len(prefix) :])
    earlier = conversations[prefix]
    if not earlier:
      return [{"role": "user", "content": text}]
    if calls := earlier[-1].get("tool_calls"):
      result = {
        "role": "tool",
        "tool_call_id": calls[0]["id"],
        "content": text.strip(),
      }
      return [*earlier, result]
    return [*earlier, {"role": "user", "content": text.strip()}]


# The messages of a context, by its token ids.
_Conversations = dict[tuple[int, ...], list[dict[str, Any]]]


def _read_message(choice: Any) -> _Message | None:
  """Reads a choice; None if it has another shape."""
  message = choice["message"]
  finish = choice.get("finish_reason") or "stop"
  content = _content(message.get("content"))
  if content is None or finish == "content_filter":
    return None
  repeated: dict[str, Any] = {"role": "assistant", "content": content}
  thought = ""
  for name in _REASONING:
    text = http_calls.text_of(message.get(name))
    if text:
      thought = text
      repeated[name] = text
      break
  call = _structured_call(message) or _written_call(content, thought)
  if call is not None:
    repeated["content"] = content[: call.start]
    function = {"name": call.name, "arguments": json.dumps(call.arguments)}
    repeated["tool_calls"] = [
      {"id": call.id, "type": "function", "function": function}
    ]
  return _Message(
    thought=thought,
    content=content,
    call="" if call is None else call.text,
    query="" if call is None else call.query,
    call_start=None if call is None else call.start,
    message=repeated,
    finish=finish,
    matched=completions.matched(choice),
  )


class _Call(NamedTuple):
  """A call of a tool.

  Attributes:
    id: its name in the conversation.
    name, arguments: the tool, and its arguments.
    text: the call as the model wrote it.
    start: offset of the call in the message's content; None if it is no part
      of it.
  """

  id: str
  name: str
  arguments: Mapping[str, Any]
  text: str
  start: int | None = None

  @property
  def query(self) -> str:
    """The query of a search; "" of any other call."""
    if self.name != protocol.SEARCH:
      return ""
    return (http_calls.text_of(self.arguments.get("query")) or "").strip()


def _content(value: Any) -> str | None:
  """Returns the text of a message's content; None if it has another shape.

  Some servers send a list of parts.
  """
  if isinstance(value, list):
    value = "".join(part.get("text") or "" for part in value)
  return http_calls.text_of(value or "")


def _structured_call(message: Mapping[str, Any]) -> _Call | None:
  """Returns the first call among a message's fields; None without one."""
  tool_calls = message.get("tool_calls") or ()
  if not tool_calls and message.get("function_call"):  # OpenAI's older field.
    tool_calls = [{"function": message["function_call"]}]
  if not tool_calls:
    return None
  call = tool_calls[0]
  name = str(call["function"].get("name"))
  arguments = call["function"].get("arguments")
  # Some servers parse the arguments, and models may write them badly.
  if not isinstance(arguments, str):
    arguments = json.dumps(arguments)
  try:
    fields = json.loads(arguments)
  except (ValueError, RecursionError):
    fields = {}
  return _Call(
    id=str(call.get("id") or "call"),
    name=name,
    arguments=fields if isinstance(fields, dict) else {},
    text=f"{name}({http_calls.text_of(arguments)})",
  )


def _written_call(content: str, thought: str) -> _Call | None:
  """Returns the first call that a message's text writes; None without one."""
  text = content if thought else _split_thought(content)[1]
  call = written_calls.find(text, (protocol.SEARCH,))
  if call is None:
    return None
  return _Call(
    id="call",
    name=call.name,
    arguments=call.arguments,
    text=text[call.start :],
    start=len(content) - len(text) + call.start,
  )


def _split_thought(content: str) -> tuple[str, str]:
  """Splits off the reasoning that some servers leave in a message's content.

  The chat templates of some models open it, so that only its end is there.
  """
  stripped = content.lstrip()
  if not stripped.startswith(_OPENS) and _CLOSES not in stripped:
    return "", content
  thought, _, answer = stripped.removeprefix(_OPENS).partition(_CLOSES)
  return thought, answer


def _thought_text(thought: str, *, ended: bool) -> str:
  """Returns reasoning as the beginning of a turn."""
  if not thought:
    return ""
  end = f"{_CLOSES}\n" if ended else ""
  return _OPENS + protocol.neutralise(thought) + end


def _turn_of_message(
  reply: _Message,
  request: types.GenerateRequest,
  codec: completions.Codec,
  *,
  tools: bool,
) -> types.Generation:
  """Returns a message as a turn; a model with tools cannot act by tags."""
  thought = reply.thought
  text = reply.content
  matched = reply.matched
  is_cut = reply.finish == "length"
  if tools:
    text = text[: reply.call_start]
    if not thought:
      thought, text = _split_thought(text)
    tagged_answer = protocol.last_content(text, "answer")
    text = protocol.neutralise(tagged_answer or text).strip()
    matched = ""
    if reply.query:
      text += f"<search>{protocol.neutralise(reply.query)}</search>"
    elif reply.call:
      text += protocol.neutralise(reply.call)
    elif text and not is_cut and not written_calls.is_call(text):
      text = f"<answer>{text}</answer>"
  text = _thought_text(thought, ended=True) + text
  # A model may spend all of its tokens on reasoning that the server hides. The
  # turn is then the end-of-turn token alone, because it must have a token.
  finish = "length" if is_cut and text else "stop"
  turn = completions.generation(
    completions.Completion(text, finish, matched), request, codec
  )
  if is_cut and not text:
    return dataclasses.replace(turn, finish=types.Finish.LENGTH)
  return turn


def _streamer(
  on_tokens: Callable[[Sequence[int]], None],
  codec: completions.Codec,
  *,
  tools: bool,
) -> Callable[[Mapping[str, Any]], None]:
  """Returns a function that passes on a turn while its message arrives.

  It is called with the message so far. If the model has tools, what follows the
  reasoning is passed on as an answer, unless it begins like a call. Text that
  was passed on cannot be taken back: when a stream begins anew, the function
  waits until it is longer.
  """
  sent_characters = 0

  def tell(message: Mapping[str, Any]) -> None:
    nonlocal sent_characters
    content = message.get("content", "")
    thought = next((message[n] for n in _REASONING if message.get(n)), "")
    if tools and not thought and content.lstrip().startswith(_OPENS):
      thought, content = _split_thought(content)
    tag = thought.rfind("<", -_LONGEST_TAG)
    if tag >= 0 and not content and ">" not in thought[tag:]:
      thought = thought[:tag]  # A tag may have begun, which is neutralised.
    text = _thought_text(thought, ended=bool(content))
    if not tools:
      text += content
    elif content.strip() and not content.lstrip().startswith(_BEGINS_CALL):
      text += f"<answer>{content}"
    if len(text) > sent_characters:
      on_tokens(codec.encode(text[sent_characters:]))
      sent_characters = len(text)

  return tell
