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

from anysearch_jax import types
from anysearch_jax.environment import protocol
from anysearch_jax.host import http_calls
from anysearch_jax.rollout import completions

TOOLS, TAGS = "tools", "tags"
_log = logging.getLogger(__name__)

_EXPECTED = "a message at choices[0].message, and its finish_reason"
_SEARCH = {
  "type": "function",
  "function": {
    "name": protocol.SEARCH,
    "description": "Searches the documents and returns the best passages.",
    "parameters": {
      "type": "object",
      "properties": {
        "query": {"type": "string", "description": "What to search for."}
      },
      "required": ["query"],
    },
  },
}
_OFFER = {"tools": [_SEARCH], "parallel_tool_calls": False}
_PROBE = "Use the tool `search` to find out when the lease of flat 7 ends."
_PROBE_TOKENS = 2048  # Some models think before they call.
# Names that servers give the field with a model's reasoning.
_REASONING = ("reasoning_content", "reasoning")
# Statuses of a server that has no such route.
MISSING = (404, 405, 501)
# Statuses that say nothing about tools: of keys, routes and busy servers.
_OTHERWISE = (401, 403, *MISSING, *http_calls.BUSY)
_OPENS, _CLOSES = "<think>", "</think>"
_LONGEST_TAG = len("</information>")


class _Call(NamedTuple):
  """A call of a tool.

  query: what it searches for; "" if it is no valid search.
  message: the call as it is sent back to the server, with valid JSON.
  written: what the model wrote.
  """

  query: str
  message: dict[str, Any]
  written: str


class _Said(NamedTuple):
  """A message of a model.

  reasoning: the field of the message with its reasoning, {} without one.
  call: the first call of a tool.
  finish, matched: as of `completions.Completion`.
  """

  content: str
  reasoning: dict[str, str]
  call: _Call | None
  finish: str
  matched: str | None


class _Known(NamedTuple):
  """The messages that a context stands for."""

  token_ids: tuple[int, ...] = ()
  messages: tuple[dict[str, Any], ...] = ()


class ChatEngine(completions.CompletionsEngine):
  """`types.Engine` over a server; it can be used from any event loop.

  Args:
    url, codec, settings: as of `completions.CompletionsEngine`. The codec
      renders a prompt as its content alone, as `completions.PlainText` does.
    mode: `tools` or `tags`; "": `probe` decides.

  Attributes:
    mode: how the model is asked.
    why: what `probe` met, a clause.
  """

  route = "/chat/completions"

  def __init__(
    self, url: str, codec: completions.Codec, *, mode: str = "", **settings: Any
  ):
    super().__init__(url, codec, **settings)
    self.mode, self.why = mode, ""
    self._known: dict[types.Address, list[_Known]] = {}
    self._released: list[_Known] = []

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
    refusal = ""
    if self.mode != TAGS:
      try:
        said = await self._probe(_OFFER)
      except http_calls.StatusError as error:
        if self.mode or error.status in _OTHERWISE:
          raise
        refusal = str(error)
      else:
        calls = said.call is not None and said.call.query
        self.mode = self.mode or (TOOLS if calls else TAGS)
        self.why = f"it {'called' if calls else 'did not call'} the tool"
        return self.mode
    await self._probe({})
    self.mode = TAGS
    self.why = (
      f"the server takes no tools: {refusal}" if refusal else "it replied"
    )
    return self.mode

  async def _probe(self, offer: Mapping[str, Any]) -> _Said:
    asked = {
      "messages": [{"role": "user", "content": _PROBE}],
      "max_tokens": _PROBE_TOKENS,
      **offer,
    }
    sampling = dataclasses.replace(self._sampling, temperature=0.0)
    return await self._ask(asked, sampling, _said, _EXPECTED)

  async def generate(self, request: types.GenerateRequest) -> types.Generation:
    """See `types.Engine`."""
    # Who asks for a text without searches, such as a generative retriever,
    # wants the text itself.
    tools = self.mode == TOOLS and protocol.STOPS[0] in request.stop
    messages = self._messages(request)
    asked: dict[str, Any] = {
      "messages": messages,
      "max_tokens": request.max_tokens,
      "seed": completions.seed(request.address, request.turn),
    }
    if not tools:
      asked["stop"] = list(request.stop)
    elif request.may_search:
      asked |= _OFFER
    elif "tool_choice" not in self.refused:
      asked |= {**_OFFER, "tool_choice": "none"}
    tell = None
    if request.on_tokens is not None:
      tell = _teller(request.on_tokens, self._codec, tools=tools)
      asked |= {"stream": True, "stream_options": {"include_usage": True}}
    sampling = self._sampling.asked(request)
    with completions.engine_errors():
      said = await self._ask(asked, sampling, _said, _EXPECTED, tell)
      if said.call and "tool_choice" in asked:
        self._offers_nothing()
        asked = {k: v for k, v in asked.items() if k not in _NO_CALL}
        said = await self._ask(asked, sampling, _said, _EXPECTED, tell)
    turn = _turn(said, request, self._codec, tools=tools)
    context = (*request.token_ids, *turn.token_ids)
    made = _message(said, turn.text, tools=tools)
    known = self._known.setdefault(request.address, [])
    known.append(_Known(context, (*messages, made)))
    return turn

  def release(self, address: types.Address) -> None:
    """Forgets an episode's messages.

    Those that were released last are kept: a turn that is discarded is sampled
    again under another address, right after its own is released.
    """
    self._released = self._known.pop(address, [])

  def _messages(self, request: types.GenerateRequest) -> list[dict[str, Any]]:
    """Returns the messages of a context: those known, and what came since."""
    ids = request.token_ids
    known = (*self._known.get(request.address, ()), *self._released, _Known())
    fitting = (k for k in known if k.token_ids == ids[: len(k.token_ids)])
    longest = max(fitting, key=lambda k: len(k.token_ids))
    text = self._codec.transcript(ids[len(longest.token_ids) :])
    messages = list(longest.messages)
    calls = messages[-1].get("tool_calls") if messages else None
    if calls:
      answers = {"role": "tool", "tool_call_id": calls[0]["id"]}
      return [*messages, {**answers, "content": text.strip()}]
    content = text.strip() if messages else text
    return [*messages, {"role": "user", "content": content}]

  def _offers_nothing(self) -> None:
    """Notes that the server lets models call tools against `tool_choice`."""
    if "tool_choice" not in self.refused:
      self.refused.add("tool_choice")
      _log.warning(
        "The model called a tool although tool_choice was 'none'; where no "
        "search is left, requests offer no tool from now on."
      )


_NO_CALL = (*_OFFER, "tool_choice")


def _said(choice: Any) -> _Said | None:
  """Reads a choice; None if it has another shape."""
  message, finish = choice["message"], choice["finish_reason"]
  content = http_calls.text_of(message.get("content") or "")
  if content is None or not isinstance(finish, str):
    return None
  if finish == "content_filter":
    return None
  texts = ((n, http_calls.text_of(message.get(n))) for n in _REASONING)
  reasoning = next(({name: text} for name, text in texts if text), {})
  calls = message.get("tool_calls") or ()
  call = _call(calls[0]) if calls else None
  return _Said(content, reasoning, call, finish, completions.matched(choice))


def _call(call: Mapping[str, Any]) -> _Call:
  """Reads a call of a tool, which a model may have written badly."""
  asked = call["function"]
  name, written = asked.get("name"), asked.get("arguments")
  if not isinstance(written, str):  # Some servers parse the arguments.
    written = json.dumps(written)
  try:
    arguments = json.loads(written)
  except (ValueError, RecursionError):
    arguments = None
  fields = arguments if isinstance(arguments, dict) else {}
  query = http_calls.text_of(fields.get("query")) or ""
  name = name if isinstance(name, str) and name else protocol.SEARCH
  function = {"name": name, "arguments": json.dumps(fields)}
  return _Call(
    query.strip() if name == protocol.SEARCH else "",
    {"id": call.get("id") or "call", "type": "function", "function": function},
    f"{name}({http_calls.text_of(written)})",
  )


def _split(content: str) -> tuple[str, str]:
  """Splits the reasoning off that some servers leave in a message's content.

  The chat templates of some models open it, so that only its end is there.
  """
  stripped = content.lstrip()
  if not stripped.startswith(_OPENS) and _CLOSES not in stripped:
    return "", content
  thought, _, rest = stripped.removeprefix(_OPENS).partition(_CLOSES)
  return thought, rest


def _thought(text: str, *, ended: bool) -> str:
  """Returns reasoning as the beginning of a turn."""
  if not text:
    return ""
  return _OPENS + protocol.neutralise(text) + (f"{_CLOSES}\n" if ended else "")


def _turn(
  said: _Said,
  request: types.GenerateRequest,
  codec: completions.Codec,
  *,
  tools: bool,
) -> types.Generation:
  """Returns a message as a turn.

  A text of a model with tools cannot act by tags of its own. Of a message whose
  length was limited nothing is known to be whole but a call.
  """
  thought, content = "".join(said.reasoning.values()), said.content
  if tools and not thought:
    thought, content = _split(content)
  text, matched = content, said.matched
  if tools:
    text, matched = protocol.neutralise(content).strip(), ""
    if said.call is not None and said.call.query:
      text += f"<search>{protocol.neutralise(said.call.query)}</search>"
    elif said.call is not None:
      text += protocol.neutralise(said.call.written)
    elif text and said.finish != "length":
      text = f"<answer>{text}</answer>"
  cut = said.finish == "length"
  empty = cut and not (thought or text)
  turn = completions.generation(
    completions.Completion(
      _thought(thought, ended=True) + text,
      "length" if cut and not empty else "stop",
      matched,
    ),
    request,
    codec,
  )
  # A model may think all of its tokens where nobody sees them.
  finish = types.Finish.LENGTH if empty else turn.finish
  return dataclasses.replace(turn, finish=finish)


def _message(said: _Said, text: str, *, tools: bool) -> dict[str, Any]:
  """Returns a turn as the message that later requests repeat.

  It has the reasoning as it came, which some models need, and of several calls
  the one that was carried out.
  """
  content = said.content
  if not tools:  # With its stop text.
    thought = _thought("".join(said.reasoning.values()), ended=True)
    content = text.removeprefix(thought)
  message = {"role": "assistant", "content": content, **said.reasoning}
  if tools and said.call is not None:
    message["tool_calls"] = [said.call.message]
  return message


def _teller(
  on_tokens: Callable[[Sequence[int]], None],
  codec: completions.Codec,
  *,
  tools: bool,
) -> Callable[[Mapping[str, Any]], None]:
  """Returns a function that tells a turn while its message comes.

  Of a model with tools it tells the reasoning, because the rest may turn out to
  be the answer. What was told stays told: a stream that begins anew tells
  nothing until it is longer.
  """
  told = 0

  def tell(message: Mapping[str, Any]) -> None:
    nonlocal told
    content = message.get("content", "")
    thought = next((message[n] for n in _REASONING if message.get(n)), "")
    if tools and not thought and content.lstrip().startswith(_OPENS):
      thought, content = _split(content)
    begun = bool(content) or not thought
    tag = thought.rfind("<", -_LONGEST_TAG)
    if tag >= 0 and not begun and ">" not in thought[tag:]:
      thought = thought[:tag]  # It may be a tag that has only begun.
    text = _thought(thought, ended=begun) + ("" if tools else content)
    if len(text) > told:
      on_tokens(codec.encode(text[told:]))
      told = len(text)

  return tell
