"""A server with OpenAI's interface: one of its routes, streamed or whole."""

from __future__ import annotations

import functools
import json
import os
import re
import urllib.parse
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import httpx2
import pydantic

from anysearch_jax import types
from anysearch_jax.host import http_calls, turns

_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s?([KMB])", re.IGNORECASE)
_SIZE_UNITS = {"K": 10**3, "M": 10**6, "B": 10**9}
_FACT_SECONDS = 3.0  # For each thing that a server says of itself.

KEY = "OPENAI_API_KEY"
T = TypeVar("T")


def default_key_variable(url: str) -> str:
  """Returns `KEY` if it is set and the address is https, otherwise ""."""
  # Without being told, send the key over encrypted connections only.
  is_encrypted = urllib.parse.urlsplit(url).scheme == "https"
  return KEY if is_encrypted and os.environ.get(KEY) else ""


class _Embedding(pydantic.BaseModel):
  index: pydantic.StrictInt
  embedding: list[pydantic.FiniteFloat]


_EMBEDDINGS = pydantic.TypeAdapter(list[_Embedding])


class Usage(NamedTuple):
  """The tokens of a call as its server counts them; 0 if it says nothing."""

  prompt: int
  completion: int


class ServedModel(NamedTuple):
  """What a server says of one of its models; 0: it does not say.

  Attributes:
    parameters: number of the model's weights.
    context: tokens of one conversation.
    slots: number of requests that are answered at a time.
  """

  parameters: int = 0
  context: int = 0
  slots: int = 0


class OpenAIEndpoint:
  """One route of a server with OpenAI's interface.

  https://platform.openai.com/docs/api-reference/completions

  Args:
    url: address of the server's interface (`http://host:8000/v1`), with or
      without `route`.
    route: such as `/completions`.
    key_variable: environment variable with the key; "": no key.
    deadline: seconds that a call may take, with its retries.
    concurrency: limit on concurrent calls.

  Attributes:
    url: the address of the route.

  Raises:
    ValueError: the url is invalid, or the key is missing.
  """

  def __init__(
    self,
    url: str,
    route: str,
    *,
    key_variable: str = "",
    deadline: float,
    concurrency: int = 1,
  ):
    route_name = route[1:].replace("/", " ")
    self.url, self._caller = http_calls.at_address(
      url,
      route,
      "model",
      key_variable=key_variable,
      patience=http_calls.Patience(deadline=deadline, concurrency=concurrency),
      # A model's server may fail for a moment.
      retried_statuses=(500, *http_calls.BUSY),
      advice=f"Does a server with OpenAI's {route_name} run there?",
      proxies=True,
    )
    base = self.url.removesuffix(route)
    self._models = f"{base}/models"
    self._server = base.removesuffix("/v1")
    self.close = self._caller.close

  async def models(self) -> list[str]:
    """Returns the names of the server's models; raises as `ask`."""

    def read(value: Any) -> list[str]:
      try:
        return [str(model["id"]) for model in value["data"]]
      except (KeyError, TypeError):
        raise self._caller.unexpected(
          self._models, value, "models with their id at data"
        ) from None

    return await self._caller.ask("GET", self._models, read=read)

  async def served_model(self, model: str) -> ServedModel:
    """Returns what the server says of a model, in a few seconds.

    vLLM and llama.cpp say it beside the model's name, llama.cpp also at
    `/props` and Ollama at `/api/tags`. Encrypted addresses, which are hosted
    models, are asked for the first only.
    """
    served = _row(await self._fact(self._models, "data"), "id", model)
    props = None
    pulled = None
    if not self.url.startswith("https"):
      props = await self._fact(f"{self._server}/props")
      if props is None:
        listed = await self._fact(f"{self._server}/api/tags", "models")
        pulled = _row(listed, "name", model)
    parameters = _count(_at(served, "meta", "n_params"))
    if not parameters:
      parameters = _size(_at(pulled, "details", "parameter_size"))
    context = _count(_at(props, "default_generation_settings", "n_ctx"))
    return ServedModel(
      parameters=parameters,
      context=context or _count(_at(served, "max_model_len")),
      slots=_count(_at(props, "total_slots")),
    )

  async def _fact(self, url: str, *path: str) -> Any:
    """Returns a value of an answer in JSON; None if there is none in time."""
    try:
      return await self._caller.ask(
        "GET",
        url,
        read=lambda value: _at(value, *path),
        limit=turns.Limit(_FACT_SECONDS, _FACT_SECONDS),
        counted=False,
      )
    except types.RetrievalError:
      return None

  async def chat(
    self, model: str, prompt: str, **limits: Any
  ) -> tuple[str, Usage]:
    """Asks a model with one message; raises as `ask`."""
    messages = [{"role": "user", "content": prompt}]
    return await self.ask(
      {"model": model, "messages": messages, **limits},
      lambda choice: http_calls.text_of(choice["message"]["content"]),
      expected="a text at choices[0].message.content",
    )

  async def embed(self, model: str, texts: Sequence[str]) -> list[list[float]]:
    """Returns a vector for each text; raises as `ask`.

    https://platform.openai.com/docs/api-reference/embeddings
    """

    def read(value: Any) -> list[list[float]]:
      data = value.get("data") if isinstance(value, Mapping) else None
      try:
        entries = _EMBEDDINGS.validate_python(data)
      except pydantic.ValidationError:
        entries = []
      vectors = {entry.index: entry.embedding for entry in entries}
      if sorted(entry.index for entry in entries) != list(range(len(texts))):
        raise self._caller.unexpected(
          self.url,
          value,
          f"an embedding for each of {len(texts)} texts",
        )
      return [vectors[i] for i in range(len(texts))]

    request = {"model": model, "input": texts, "encoding_format": "float"}
    return await self._caller.ask(
      "POST", self.url, content=http_calls.body(request), read=read
    )

  async def ask(
    self,
    request: Mapping[str, Any],
    read: Callable[[Any], T | None],
    *,
    expected: str,
    tell: Callable[[Mapping[str, Any]], None] | None = None,
  ) -> tuple[T, Usage]:
    """Makes a call, with retries.

    Args:
      request: body of the request.
      read: returns the part of the first choice that the caller needs; None,
        KeyError or TypeError if the choice lacks it.
      expected: noun phrase for the value that `read` returns, for the error
        message.
      tell: called with the message so far if the server streams it, which the
        request asks for; after a broken connection it begins anew.

    Raises:
      types.RetrievalError: the server gave no such answer in time.
    """

    def parsed(value: Any) -> tuple[T, Usage]:
      try:
        content = read(value["choices"][0])
      except (KeyError, IndexError, TypeError, AttributeError):
        content = None
      if content is None:
        raise self._caller.unexpected(self.url, value, expected)
      usage = value.get("usage")
      usage = usage if isinstance(usage, Mapping) else {}
      return content, Usage(
        prompt=_count(usage.get("prompt_tokens")),
        completion=_count(usage.get("completion_tokens")),
      )

    return await self._caller.ask(
      "POST",
      self.url,
      content=http_calls.body(request),
      read=parsed,
      stream_joiner=functools.partial(_StreamJoiner, tell) if tell else None,
    )


def _at(value: Any, *path: str) -> Any:
  """Returns a value within nested JSON objects; None if there is none."""
  for name in path:
    if not isinstance(value, Mapping):
      return None
    value = value.get(name)
  return value


def _row(rows: Any, name: str, value: str) -> Any:
  """Returns the first object of a list whose `name` is a value, or None."""
  if not isinstance(rows, list):
    return None
  return next((row for row in rows if _at(row, name) == value), None)


def _size(text: Any) -> int:
  """Returns a number of parameters that is written as `494.03M` or `7.6B`."""
  match = _SIZE.fullmatch(text) if isinstance(text, str) else None
  if match is None:
    return 0
  return int(float(match[1]) * _SIZE_UNITS[match[2].upper()])


def _count(value: object) -> int:
  """Returns a server's count; 0 for anything but a positive int."""
  return value if type(value) is int and value > 0 else 0


class _StreamJoiner:
  """Joins the chunks of a completion, of chats or text, see `Caller.ask`.

  https://platform.openai.com/docs/api-reference/chat-streaming

  Args:
    tell: called with the message so far, after each part of the stream.
  """

  def __init__(self, tell: Callable[[Mapping[str, Any]], None]):
    self._tell = tell
    self._rest = b""  # The begun line at the end of the bytes so far.
    self._message: dict[str, Any] = {}
    self._calls: list[dict[str, Any]] = []
    self._last: Mapping[str, Any] | None = None  # The choice that ends it.
    self._usage: Any = None
    self._has_ended = False  # The server said that the stream is whole.

  def feed(self, data: bytes) -> None:
    *lines, self._rest = (self._rest + data).split(b"\n")
    for line in lines:
      content = line.strip().removeprefix(b"data:").strip()
      # Other lines are comments, names of events or empty.
      if not line.startswith(b"data:") or not content:
        continue
      if content == b"[DONE]":
        self._has_ended = True
      else:
        self._add(content)
    self._tell(self._message)

  def whole(self) -> bytes:
    last = self._last
    if last is None and self._has_ended and (self._message or self._calls):
      last = {"finish_reason": "stop"}  # Some servers never name a reason.
    if last is None:
      raise httpx2.RemoteProtocolError("the stream ended before the message.")
    message = dict(self._message)
    if self._calls:
      message["tool_calls"] = [
        {name: value for name, value in call.items() if name != "index"}
        for call in self._calls
      ]
    choice = {**last, "message": message, "text": message.get("text")}
    return json.dumps({"choices": [choice], "usage": self._usage}).encode()

  def part(self) -> bytes | None:
    """Returns a stream that stopped, as a reply cut in its text."""
    text = self._message.get("text")
    if not (text or self._message.get("content", "")).strip():
      return None
    message = dict(self._message)
    choice = {"finish_reason": "length", "message": message, "text": text}
    return json.dumps({"choices": [choice], "usage": self._usage}).encode()

  def _add(self, data: bytes) -> None:
    """Adds a chunk; an error in its place breaks the stream off."""
    try:
      chunk = json.loads(data)
      self._usage = chunk.get("usage") or self._usage
      for choice in (chunk["choices"] or [])[:1]:
        parts = choice.get("delta") or {"text": choice.get("text")}
        for name, value in parts.items():
          if name == "tool_calls":
            for call in value or ():
              self._add_call(call)
            continue
          if isinstance(value, list):
            texts = [part["text"] for part in value if "text" in part]
            value = "".join(texts)
          if isinstance(value, str):
            text_so_far = self._message.get(name, "") if name != "role" else ""
            self._message[name] = text_so_far + value
        if choice.get("finish_reason"):
          self._last = choice
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
      text = data.decode(errors="replace")
      raise httpx2.RemoteProtocolError(f"in the stream: {text}") from None

  def _add_call(self, part: Mapping[str, Any]) -> None:
    """Adds a part of a call of a tool."""
    function = part.get("function") or {}
    call = self._call_of(part, names_tool=bool(function.get("name")))
    call |= {k: v for k, v in part.items() if k == "id" and v}
    for name, value in function.items():
      value_so_far = call["function"].get(name, "")
      if isinstance(value, Mapping) and value:
        call["function"][name] = json.dumps(value)
      elif isinstance(value, str) and value_so_far == "{}":
        call["function"][name] = value or value_so_far
      elif isinstance(value, str) and (name != "name" or value != value_so_far):
        call["function"][name] = value_so_far + value

  def _call_of(
    self, part: Mapping[str, Any], *, names_tool: bool
  ) -> dict[str, Any]:
    """Returns the call that a part belongs to, a new one if it begins one.

    Servers may leave out the index, count it up with each part, or give all
    calls the same; the id and the tool's name then tell the calls apart.
    """
    identity = part.get("id")
    index = part.get("index")
    for call in reversed(self._calls):
      if identity and call.get("id") == identity:
        return call
      is_same_index = index is not None and str(call["index"]) == str(index)
      if is_same_index and not (names_tool and identity and call.get("id")):
        return call
    if self._calls and not names_tool:
      return self._calls[-1]
    self._calls.append({"index": index, "function": {}})
    return self._calls[-1]
