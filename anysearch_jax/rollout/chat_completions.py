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
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from anysearch_jax import types
from anysearch_jax.environment import protocol
from anysearch_jax.host import http_calls
from anysearch_jax.rollout import completions

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
_CHOICE = "tool_choice"
_PROBE = "Use the tool `search` to find out when the lease of flat 7 ends."
_PROBE_TOKENS = 2048  # Some models think before they call.
# Names that servers give the field with a model's reasoning.
_REASONING = ("reasoning_content", "reasoning")
_OPENS = "<think>"
_CLOSES = "</think>"
_LONGEST_TAG = len("</information>")
# What some models write if they call a tool that is not offered.
_WRITTEN_CALL = "<tool_call>"


class _Said(NamedTuple):
  """A message of a model.

  thought: the reasoning that the server separates; "" if there is none.
  call: the first call of a tool, as the model wrote it; "" without one.
  query: what that searches for; "" if it is no valid search.
  message: what later requests repeat: the reasoning as it came, which some
    models need, and of several calls the first, with valid JSON.
  finish, matched: as of `completions.Completion`.
  """

  thought: str
  content: str
  call: str
  query: str
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
    mode: how the model is asked.
    why: what `probe` met, a clause.
  """

  route = "/chat/completions"

  def __init__(
    self, url: str, codec: completions.Codec, *, mode: str = "", **settings: Any
  ):
    super().__init__(url, codec, **settings)
    self.mode = mode
    self.why = ""
    # The messages of contexts, by episode and by the context's tokens.
    self._known: dict[types.Address, _Contexts] = {}
    self._released: _Contexts = {}

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
    asked = {
      "messages": [{"role": "user", "content": _PROBE}],
      "max_tokens": _PROBE_TOKENS,
    }
    sampling = dataclasses.replace(self._sampling, temperature=0.0)
    if self.mode != TAGS:
      try:
        said = await self._ask(asked | _OFFER, sampling, _said, _EXPECTED)
      except http_calls.StatusError as error:
        if self.mode or error.status not in _NO_TOOLS:
          raise
        self.why = f"the server takes no tools: {error}"
      else:
        self.mode = self.mode or (TOOLS if said.query else TAGS)
        self.why = f"it {'called' if said.query else 'did not call'} the tool"
        return self.mode
    await self._ask(asked, sampling, _said, _EXPECTED)
    self.mode = TAGS
    self.why = self.why or "as the environment's prompt says"
    return self.mode

  async def generate(self, request: types.GenerateRequest) -> types.Generation:
    """See `types.Engine`."""
    # A generative retriever asks for a text, which stops at no search.
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
    elif _CHOICE not in self.refused:
      asked |= {**_OFFER, _CHOICE: "none"}
    tell = None
    if request.on_tokens is not None:
      tell = _teller(request.on_tokens, self._codec, tools=tools)
      asked |= {"stream": True, "stream_options": {"include_usage": True}}
    sampling = self._sampling.asked(request)
    with completions.engine_errors():
      said = await self._ask(asked, sampling, _said, _EXPECTED, tell)
      if said.call and _CHOICE in asked:
        self._leave_out(_CHOICE, "The model called a tool against tool_choice.")
        asked = {k: v for k, v in asked.items() if k not in (*_OFFER, _CHOICE)}
        said = await self._ask(asked, sampling, _said, _EXPECTED, tell)
    turn = _turn(said, request, self._codec, tools=tools)
    message = said.message
    if not tools:  # It is repeated with its stop text.
      text = turn.text.removeprefix(_thinking(said.thought, ended=True))
      message = {**message, "content": text}
    context = (*request.token_ids, *turn.token_ids)
    known = self._known.setdefault(request.address, {})
    known[context] = [*messages, message]
    return turn

  def release(self, address: types.Address) -> None:
    """Forgets an episode's messages.

    Those that were released last are kept: a turn that is discarded is sampled
    again under another address, right after its own is released.
    """
    self._released = self._known.pop(address, {})

  def _messages(self, request: types.GenerateRequest) -> list[dict[str, Any]]:
    """Returns the messages of a context: those known, and what came since."""
    ids = request.token_ids
    known = {(): [], **self._released, **self._known.get(request.address, {})}
    longest = max((k for k in known if k == ids[: len(k)]), key=len)
    text = self._codec.transcript(ids[len(longest) :])
    before = known[longest]
    if not before:
      return [{"role": "user", "content": text}]
    if calls := before[-1].get("tool_calls"):
      answers = {"role": "tool", "tool_call_id": calls[0]["id"]}
      return [*before, {**answers, "content": text.strip()}]
    return [*before, {"role": "user", "content": text.strip()}]


_Contexts = dict[tuple[int, ...], list[dict[str, Any]]]


def _said(choice: Any) -> _Said | None:
  """Reads a choice; None if it has another shape."""
  message = choice["message"]
  finish = choice["finish_reason"]
  content = http_calls.text_of(message.get("content") or "")
  if content is None or finish in (None, "content_filter"):
    return None
  texts = ((n, http_calls.text_of(message.get(n))) for n in _REASONING)
  reasoning = next(({name: text} for name, text in texts if text), {})
  kept: dict[str, Any] = {"role": "assistant", "content": content, **reasoning}
  written = query = ""
  for call in (message.get("tool_calls") or ())[:1]:
    asked = call["function"]
    name = asked.get("name")
    given = asked.get("arguments")
    # Some servers parse the arguments, and models may write them badly.
    given = given if isinstance(given, str) else json.dumps(given)
    try:
      fields = json.loads(given)
    except (ValueError, RecursionError):
      fields = {}
    fields = fields if isinstance(fields, dict) else {}
    written = f"{name}({http_calls.text_of(given)})"
    if name == protocol.SEARCH:
      query = (http_calls.text_of(fields.get("query")) or "").strip()
    function = {"name": str(name), "arguments": json.dumps(fields)}
    made = {"id": call.get("id") or "call", "type": "function"}
    kept["tool_calls"] = [{**made, "function": function}]
  thought = "".join(reasoning.values())
  matched = completions.matched(choice)
  return _Said(thought, content, written, query, kept, finish, matched)


def _split(content: str) -> tuple[str, str]:
  """Splits off the reasoning that some servers leave in a message's content.

  The chat templates of some models open it, so that only its end is there.
  """
  stripped = content.lstrip()
  if not stripped.startswith(_OPENS) and _CLOSES not in stripped:
    return "", content
  thought, _, rest = stripped.removeprefix(_OPENS).partition(_CLOSES)
  return thought, rest


def _thinking(thought: str, *, ended: bool) -> str:
  """Returns reasoning as the beginning of a turn."""
  if not thought:
    return ""
  end = f"{_CLOSES}\n" if ended else ""
  return _OPENS + protocol.neutralise(thought) + end


def _turn(
  said: _Said,
  request: types.GenerateRequest,
  codec: completions.Codec,
  *,
  tools: bool,
) -> types.Generation:
  """Returns a message as a turn; a model with tools cannot act by tags."""
  thought = said.thought
  text = said.content
  matched = said.matched
  cut = said.finish == "length"
  if tools:
    if not thought:
      thought, text = _split(text)
    text = protocol.neutralise(text).strip()
    matched = ""
    if said.query:
      text += f"<search>{protocol.neutralise(said.query)}</search>"
    elif said.call:
      text += protocol.neutralise(said.call)
    elif text and not cut and _WRITTEN_CALL not in text:
      text = f"<answer>{text}</answer>"
  text = _thinking(thought, ended=True) + text
  # A model may think all of its tokens where nobody sees them.
  finish = "length" if cut and text else "stop"
  turn = completions.generation(
    completions.Completion(text, finish, matched), request, codec
  )
  if cut and not text:
    return dataclasses.replace(turn, finish=types.Finish.LENGTH)
  return turn


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
    tag = thought.rfind("<", -_LONGEST_TAG)
    if tag >= 0 and not content and ">" not in thought[tag:]:
      thought = thought[:tag]  # It may be a tag that has only begun.
    text = _thinking(thought, ended=bool(content)) + ("" if tools else content)
    if len(text) > told:
      on_tokens(codec.encode(text[told:]))
      told = len(text)

  return tell
