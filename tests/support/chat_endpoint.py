"""A server with OpenAI's chat completions: models of known behaviour.

It speaks the protocol over real HTTP: JSON and streams, tool calls, usage,
`/v1/models`, and the errors of known servers. `served` starts it:

    with chat_endpoint.served("tools", answer="In June 2027 [1].") as server:
      ask("--openai=" + server.url)
      server.asked  # The bodies of the questions, in order.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import threading
import time
import types
from collections.abc import Callable, Sequence
from typing import Any

import web_site

NAME = "scripted"
_FIELD = "Unsupported parameter: '{}' is not supported with this model."


@dataclasses.dataclass(frozen=True)
class Message:
  """What a model says; `calls` are pairs of a tool and JSON as text.

  `read` is the number of tokens that the server says it read; 0: what it did.
  """

  content: str | None = None
  calls: tuple[tuple[str, str], ...] = ()
  reasoning: str = ""
  read: int = 0


@dataclasses.dataclass(frozen=True)
class Fault:
  """What goes wrong with a question.

  status: of the reply instead of 200, with `retry_after` in its header.
  hang: the server closes the connection: "before" it answers, or in the
    "middle" of a stream; "silent": it says nothing until it is stopped;
    "stalls": nor does it after the middle of a stream.
  drip: seconds before each event of a stream.
  first: seconds before the first one, after the headers.
  """

  status: int = 0
  retry_after: str = ""
  hang: str = ""
  drip: float = 0.0
  first: float = 0.0


def search(query: str) -> tuple[str, str]:
  """Returns a well-formed call of the tool `search`."""
  return "search", json.dumps({"query": query})


@dataclasses.dataclass(frozen=True)
class _Turn:
  """What a model of known behaviour decides by.

  query: what to search for next; "" if it has searched enough.
  offered: whether it may call a tool.
  """

  number: int
  query: str
  answer: str
  offered: bool


def _tools(turn: _Turn, first: Sequence[tuple[str, str]] = ()) -> Message:
  """A good caller of tools, whose first calls may be others."""
  calls = tuple(first) if turn.number == 0 and first else (search(turn.query),)
  if turn.offered and turn.query:
    return Message("", calls)
  return Message(turn.answer)


def _tags(turn: _Turn) -> Message:
  act = f"<answer>{turn.answer}</answer>"
  if turn.query:
    act = f"<search>{turn.query}</search>"
  return Message(f"<think>look</think>{act}")


def _thinks(turn: _Turn) -> Message:
  said = _tools(turn)
  return dataclasses.replace(
    said, content=f"<think>I look it up.</think>\n{said.content}"
  )


_Behaviour = Callable[[_Turn], Message]
BEHAVIOURS: dict[str, _Behaviour] = {
  "tools": _tools,
  "tags": _tags,
  "prose": lambda turn: Message(turn.answer),
  # It calls the tool as long as it is offered; or always.
  "obedient": lambda turn: (
    Message(None, (search("again"),)) if turn.offered else Message(turn.answer)
  ),
  "forever": lambda turn: Message(None, (search("again"),)),
  "in vain": lambda turn: (
    _tools(turn) if turn.offered else Message("<tool_call>{}</tool_call>")
  ),
  "malformed": lambda turn: _tools(turn, [("search", '{"query": "lea')]),
  "no query": lambda turn: _tools(turn, [search(" ")]),
  "unknown tool": lambda turn: _tools(turn, [("lookup", '{"query": "a"}')]),
  "parallel": lambda turn: _tools(turn, [search("lease end"), search("rent")]),
  "empty": lambda turn: Message(""),
  "null": lambda turn: Message(None),
  # Its reasoning is a field of the message, or in the content.
  "reasoning": lambda turn: dataclasses.replace(
    _tools(turn), reasoning="I look <search>it</search> up."
  ),
  "thinking": _thinks,
}


def _model(
  behaviour: str, queries: Sequence[str], answer: Any
) -> Callable[[dict[str, Any]], Message]:
  def reply(body: dict[str, Any]) -> Message:
    messages = body.get("messages", ())
    number = sum(m["role"] == "assistant" for m in messages)
    query = queries[number] if number < len(queries) else ""
    text = answer(body) if callable(answer) else answer
    offered = "tools" in body and body.get("tool_choice") != "none"
    return BEHAVIOURS[behaviour](_Turn(number, query, text, offered))

  return reply


def _answered(server, handler) -> None:
  """Answers a question as `server` does, which plays some at a time."""
  with server.places:
    _answer(server, handler)


def _answer(server, handler) -> None:
  body = json.loads(handler.body)
  server.asked.append(body)
  fault = server.faults.pop(0) if server.faults else Fault()
  key = f"Bearer {server.key}" if server.key else None
  if fault.hang == "silent":
    server.site.stopped.wait()
  elif fault.hang == "before":
    pass
  elif fault.status:
    _refuse(handler, fault.status, "the server is busy", fault.retry_after)
  elif key and handler.headers["Authorization"] != key:
    _refuse(handler, 401, "Incorrect API key provided.")
  elif handler.path not in server.routes:
    _refuse(handler, 404, "Not Found")
  elif body["model"] not in server.models:
    _refuse(handler, 404, f"The model `{body['model']}` does not exist.")
  elif refused := next((f for f in server.refused if f in body), None):
    _refuse(handler, 400, _FIELD.format(refused))
  elif body.get("stream") and server.streams:
    events = [json.dumps(e) for e in _events(server.reply(body), body)]
    events.append("[DONE]")
    if fault.hang in ("middle", "stalls"):
      del events[len(events) // 2 :]
    handler.send_response(200)
    handler.send_header("Content-Type", "text/event-stream")
    handler.end_headers()
    handler.wfile.flush()
    time.sleep(fault.first)
    for event in events:
      time.sleep(fault.drip)
      handler.wfile.write(f"data: {event}\n\n".encode())
    if fault.hang == "stalls":
      server.site.stopped.wait()
  else:
    _json(200, _completion(server.reply(body), body))(handler)


def _refuse(handler, status, sentence, retry_after=""):
  error = {"message": sentence, "type": "error", "code": None}
  after = {"retry_after": retry_after} if retry_after else {}
  _json(status, {"error": error}, **after)(handler)


def _json(status, value, **headers):
  data = json.dumps(value).encode()
  return web_site.reply(status, data, "application/json", **headers)


def _parts(message: Message, body):
  """Returns the finish reason, the calls, the usage, and other fields."""
  calls = [
    {
      "id": f"call_{place}",
      "type": "function",
      "function": {"name": name, "arguments": arguments},
    }
    for place, (name, arguments) in enumerate(message.calls)
  ]
  read = message.read or len(json.dumps(body.get("messages"))) // 4
  usage = {"prompt_tokens": read, "completion_tokens": 7, "total_tokens": read}
  fields = {"id": "chatcmpl-1", "created": 1, "model": body["model"]}
  return "tool_calls" if calls else "stop", calls, usage, fields


def _completion(message: Message, body) -> dict[str, Any]:
  finish, calls, usage, fields = _parts(message, body)
  said: dict[str, Any] = {"role": "assistant", "content": message.content}
  if message.reasoning:
    said["reasoning_content"] = message.reasoning
  if calls:
    said["tool_calls"] = calls
  choice = {"index": 0, "message": said, "finish_reason": finish}
  # `text` makes it a text completion too.
  choices = [{**choice, "text": message.content}]
  return fields | {
    "object": "chat.completion",
    "choices": choices,
    "usage": usage,
  }


def _events(message: Message, body) -> list[dict[str, Any]]:
  """Returns the events of a stream: texts and arguments come in pieces."""
  finish, calls, usage, fields = _parts(message, body)
  fields |= {"object": "chat.completion.chunk"}
  deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
  deltas += [{"reasoning_content": p} for p in _pieces(message.reasoning)]
  deltas += [{"content": piece} for piece in _pieces(message.content or "")]
  for place, call in enumerate(calls):
    named = {**call["function"], "arguments": ""}
    deltas.append({"tool_calls": [{**call, "index": place, "function": named}]})
    deltas += [
      {"tool_calls": [{"index": place, "function": {"arguments": piece}}]}
      for piece in _pieces(call["function"]["arguments"])
    ]
  choices = [{"index": 0, "delta": d, "finish_reason": None} for d in deltas]
  choices.append({"index": 0, "delta": {}, "finish_reason": finish})
  events = [{**fields, "choices": [choice]} for choice in choices]
  if body.get("stream_options", {}).get("include_usage"):
    events.append({**fields, "choices": [], "usage": usage})
  return events


def _pieces(text: str, size: int = 5) -> list[str]:
  return [text[at : at + size] for at in range(0, len(text), size)]


@contextlib.contextmanager
def served(
  behaviour: str | Callable[[dict[str, Any]], Message] = "tools",
  *,
  queries: Sequence[str] = ("lease end",),
  answer: str | Callable[[dict[str, Any]], str] = "In June 2027 [1].",
  **settings: Any,
):
  """Runs a server; yields it.

  It has its address as `url`, the bodies of all questions as `asked`, the
  `faults` of the next ones, to which a test may add, and a function `tell` of
  a path and what is there.

  Args:
    behaviour: a key of `BEHAVIOURS`, or a function of a question's body.
    queries: what it searches for, one after the other, before it answers.
    answer: its answer, or a function of the question's body.
    settings: `faults` of the first questions; `models` that it has; its
      `routes`; fields that are `refused` with 400; whether it `streams`; the
      `key` that it expects; the `facts` of its models beside their names; the
      `props` that it tells of itself; how many questions it `plays` at a time;
      its `port`.
  """
  defaults = {"models": (NAME,), "refused": (), "streams": True, "key": ""}
  defaults |= {"routes": ("/v1/chat/completions",), "faults": ()}
  defaults |= {"facts": {}, "props": None, "plays": 100, "port": 0}
  server = types.SimpleNamespace(**(defaults | settings), asked=[])
  server.faults, server.reply = list(server.faults), behaviour
  if isinstance(behaviour, str):
    server.reply = _model(behaviour, queries, answer)
  server.places = threading.Semaphore(server.plays)
  listed = [
    {"id": name, "object": "model", **server.facts} for name in server.models
  ]
  with web_site.Site("127.0.0.1", server.port) as site:
    server.site, server.url = site, f"{site.origin}/v1"
    models = _json(200, {"object": "list", "data": listed})
    site.pages["/v1/models"] = models
    server.tell = lambda path, value: site.pages.update(
      {path: _json(200, value)}
    )
    if server.props is not None:
      server.tell("/props", server.props)
    site.post = functools.partial(_answered, server)
    yield server
