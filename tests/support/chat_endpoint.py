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
import http.server
import json
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

NAME = "scripted"


@dataclasses.dataclass(frozen=True)
class Message:
  """What a model says.

  calls: (name, arguments) of each call of a tool; arguments are JSON as text.
  """

  content: str | None = None
  calls: tuple[tuple[str, str], ...] = ()
  reasoning: str = ""
  finish: str = ""


@dataclasses.dataclass(frozen=True)
class Fault:
  """What goes wrong with a question.

  status: of the reply instead of 200, with `retry_after` in its header.
  hang: the server closes the connection: "before" it answers, or in the
    "middle" of a stream; "silent": it says nothing until it is stopped.
  drip: seconds before each event of a stream.
  """

  status: int = 0
  retry_after: str = ""
  hang: str = ""
  drip: float = 0.0


def search(query: str) -> tuple[str, str]:
  """Returns a well-formed call of the tool `search`."""
  return "search", json.dumps({"query": query})


def model(
  behaviour: str,
  queries: Sequence[str] = ("lease end",),
  answer: str | Callable[[dict[str, Any]], str] = "In June 2027 [1].",
) -> Callable[[dict[str, Any]], Message]:
  """Returns a model: a function of a question's body.

  Args:
    behaviour: a key of `BEHAVIOURS`.
    queries: what it searches for, one after the other, before it answers.
    answer: its answer, or a function of the question's body.
  """
  say = BEHAVIOURS[behaviour]

  def replies(body: dict[str, Any]) -> Message:
    text = answer if isinstance(answer, str) else answer(body)
    made = _searches(body.get("messages", ()))
    query = queries[min(made, len(queries) - 1)] if queries else ""
    left = made < len(queries)
    offered = body.get("tools") and body.get("tool_choice") != "none"
    return say(body, query if left else "", text, bool(offered), query)

  return replies


def _searches(messages: Sequence[dict[str, Any]]) -> int:
  """Returns how often the model has searched since the last question."""
  calls = [m for m in messages if m["role"] == "assistant"]
  return len(calls)


def _tools(body, query, answer, offered, again) -> Message:
  if query and offered:
    return Message("", (search(query),))
  return Message(answer)


def _tags(body, query, answer, offered, again) -> Message:
  text = f"<think>look</think><search>{query}</search>" if query else ""
  return Message(text or f"<think>known</think><answer>{answer}</answer>")


def _with(**changes) -> Callable[..., Message]:
  """Returns a good caller of tools with these changes of its messages."""

  def say(*asked) -> Message:
    return dataclasses.replace(_tools(*asked), **changes)

  return say


def _calls(*calls: tuple[str, str]) -> Callable[..., Message]:
  """Returns a model whose first turn makes these calls instead of its own."""

  def say(body, query, answer, offered, again) -> Message:
    first = _searches(body.get("messages", ())) == 0
    if first and offered:
      return Message(None, calls)
    return _tools(body, query, answer, offered, again)

  return say


BEHAVIOURS: dict[str, Callable[..., Message]] = {
  "tools": _tools,
  "tags": _tags,
  # It answers in prose at once, whatever it is offered.
  "prose": lambda body, query, answer, offered, again: Message(answer),
  # It calls the tool as long as it is offered, and where it is not.
  "forever": lambda body, query, answer, offered, again: Message(
    None, (search(again),)
  ),
  "obedient": lambda body, query, answer, offered, again: (
    Message(None, (search(again),)) if offered else Message(answer)
  ),
  "malformed": _calls(("search", '{"query": "lea')),
  "no query": _calls(("search", '{"query": " "}')),
  "unknown tool": _calls(("lookup", '{"query": "lease"}')),
  "parallel": _calls(search("lease end"), search("rent")),
  "empty": lambda *asked: Message(""),
  "null": lambda *asked: Message(None),
  "reasoning": _with(reasoning="I look <search>it</search> up."),
  "thinking": lambda body, query, answer, offered, again: (
    Message("<think>I look it up.</think>", (search(query),))
    if query and offered
    else Message(f"<think>I know.</think>\n{answer}")
  ),
}


class Server(http.server.ThreadingHTTPServer):
  """The server.

  Attributes:
    url: its address, with `/v1`.
    asked: the bodies of all questions, in order, refused ones too.
    headers: their headers.
    faults: those of the next questions, in order; a test may add to them.
  """

  daemon_threads = True

  def handle_error(self, request, client_address):
    pass  # A client that hangs up is no fault of the server's.


class _Handler(http.server.BaseHTTPRequestHandler):
  server: Server

  def do_GET(self):
    models = [{"id": name, "object": "model"} for name in self.server.models]
    if self.path == "/v1/models" and self._admitted():
      self._send(200, {"object": "list", "data": models})
    elif self.path != "/v1/models":
      self._send(404, _error("Not Found"))

  def do_POST(self):
    body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
    server = self.server
    server.asked.append(body)
    server.headers.append(dict(self.headers))
    fault = server.faults.pop(0) if server.faults else Fault()
    if fault.hang == "silent":
      server.stopped.wait()
    if fault.hang in ("before", "silent"):
      self.close_connection = True
      return
    if fault.status:
      after = fault.retry_after and [("Retry-After", fault.retry_after)]
      self._send(fault.status, _error("the server is busy"), after)
      return
    if not self._admitted():
      return
    if self.path not in server.routes:
      self._send(404, _error("Not Found"))
    elif body["model"] not in server.models:
      said = f"The model `{body['model']}` does not exist."
      self._send(404, _error(said))
    elif refused := next((f for f in server.refused if f in body), None):
      self._send(400, _error(_REFUSAL.format(refused)))
    elif self.path == "/v1/completions":
      self._send(200, _text_completion(server.reply(body)))
    elif body.get("stream") and server.streams:
      self._stream(server.reply(body), body, fault)
    else:
      self._send(200, _completion(server.reply(body), body))

  def _admitted(self) -> bool:
    key = self.server.key
    if not key or self.headers["Authorization"] == f"Bearer {key}":
      return True
    self._send(401, _error("Incorrect API key provided."))
    return False

  def _send(self, status, value, headers=()):
    data = json.dumps(value).encode()
    self.send_response(status)
    self.send_header("Content-Type", "application/json")
    self.send_header("Content-Length", str(len(data)))
    for name, text in headers:
      self.send_header(name, text)
    self.end_headers()
    self.wfile.write(data)

  def _stream(self, message: Message, body, fault: Fault):
    self.send_response(200)
    self.send_header("Content-Type", "text/event-stream")
    self.end_headers()
    events = _events(message, body)
    end = len(events) // 2 if fault.hang == "middle" else len(events)
    for event in events[:end]:
      time.sleep(fault.drip)
      self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
      self.wfile.flush()
    if end == len(events):
      self.wfile.write(b"data: [DONE]\n\n")
    self.close_connection = True

  def log_message(self, *args):
    pass


_REFUSAL = "Unsupported parameter: '{}' is not supported with this model."


def _error(sentence: str) -> dict[str, Any]:
  return {"error": {"message": sentence, "type": "error", "code": None}}


def _finish(message: Message) -> str:
  return message.finish or ("tool_calls" if message.calls else "stop")


def _tool_calls(message: Message) -> list[dict[str, Any]]:
  return [
    {
      "id": f"call_{place}",
      "type": "function",
      "function": {"name": name, "arguments": arguments},
    }
    for place, (name, arguments) in enumerate(message.calls)
  ]


def _usage(body) -> dict[str, int]:
  read = len(json.dumps(body["messages"])) // 4
  return {"prompt_tokens": read, "completion_tokens": 7, "total_tokens": read}


def _completion(message: Message, body) -> dict[str, Any]:
  said: dict[str, Any] = {"role": "assistant", "content": message.content}
  if message.reasoning:
    said["reasoning_content"] = message.reasoning
  if message.calls:
    said["tool_calls"] = _tool_calls(message)
  choice = {"index": 0, "message": said, "finish_reason": _finish(message)}
  return {
    "id": "chatcmpl-1",
    "object": "chat.completion",
    "created": 1,
    "model": body["model"],
    "choices": [choice],
    "usage": _usage(body),
  }


def _text_completion(message: Message) -> dict[str, Any]:
  choice = {"index": 0, "text": message.content or "", "finish_reason": "stop"}
  used = {"prompt_tokens": 9, "completion_tokens": 5, "total_tokens": 14}
  return {"object": "text_completion", "choices": [choice], "usage": used}


def _events(message: Message, body) -> list[dict[str, Any]]:
  """Returns the events of a stream: texts and arguments come in pieces."""
  deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
  deltas += [{"reasoning_content": p} for p in _pieces(message.reasoning)]
  deltas += [{"content": piece} for piece in _pieces(message.content or "")]
  for place, call in enumerate(_tool_calls(message)):
    named = {**call["function"], "arguments": ""}
    deltas.append({"tool_calls": [{**call, "index": place, "function": named}]})
    deltas += [
      {"tool_calls": [{"index": place, "function": {"arguments": piece}}]}
      for piece in _pieces(call["function"]["arguments"])
    ]
  base = {
    "id": "chatcmpl-1",
    "object": "chat.completion.chunk",
    "created": 1,
    "model": body["model"],
  }
  choices = [{"index": 0, "delta": d, "finish_reason": None} for d in deltas]
  choices.append({"index": 0, "delta": {}, "finish_reason": _finish(message)})
  events = [{**base, "choices": [choice]} for choice in choices]
  if body.get("stream_options", {}).get("include_usage"):
    events.append({**base, "choices": [], "usage": _usage(body)})
  return events


def _pieces(text: str, size: int = 5) -> list[str]:
  return [text[at : at + size] for at in range(0, len(text), size)]


@contextlib.contextmanager
def served(
  behaviour: str | Callable[[dict[str, Any]], Message] = "tools",
  *,
  faults: Sequence[Fault] = (),
  models: Sequence[str] = (NAME,),
  routes: Sequence[str] = ("/v1/chat/completions",),
  refused: Sequence[str] = (),
  streams: bool = True,
  key: str = "",
  **script: Any,
):
  """Runs a server; yields it, a `Server`.

  Args:
    behaviour: a key of `BEHAVIOURS`, or a function of a question's body.
    faults: of the first questions, in order.
    models: names that it lists and knows.
    routes: that it has; `/v1/completions` gives a message's content as text.
    refused: fields that it answers with 400.
    streams: whether it streams when asked to.
    key: expected of clients; "": none.
    script: `queries` and `answer` of `model`.
  """
  server = Server(("127.0.0.1", 0), _Handler)
  server.asked, server.headers, server.faults = [], [], list(faults)
  server.models, server.routes, server.refused = models, routes, refused
  server.streams, server.key = streams, key
  server.stopped = threading.Event()
  server.reply = (
    behaviour if callable(behaviour) else model(behaviour, **script)
  )
  server.url = f"http://127.0.0.1:{server.server_port}/v1"
  thread = threading.Thread(target=server.serve_forever, args=(0.01,))
  thread.start()
  try:
    yield server
  finally:
    server.stopped.set()
    server.shutdown()
    thread.join(10)
    server.server_close()
