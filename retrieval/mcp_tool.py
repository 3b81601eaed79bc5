"""A search tool of an MCP server as a retriever, over the SDK's transports.

https://modelcontextprotocol.io/specification
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import re
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import anyio
import httpx2
import mcp
import mcp_types
import pydantic
from mcp.client import stdio, streamable_http

from anysearch_jax import types
from anysearch_jax.host import (
  http_calls,
  json_files,
  listing,
  loop,
  redaction,
  turns,
)
from anysearch_jax.retrieval import requests as requests_lib

# `retrieval.mcp.fields` says where a reply has its list of results, and where a
# result has these parts.
_RESULTS = "results"
_PARTS = ("id", "title", "text", "score")
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff]")
# Codes of errors that the arguments of a call cause.
_CALL_ERRORS = (mcp_types.PARSE_ERROR, mcp_types.INVALID_PARAMS)
_START_SECONDS = 60.0
_LARGEST = 2_000_000  # Characters of a result.
_PAUSE_SECONDS = 1.0  # After a 429 without Retry-After.


class McpRetriever:
  """Calls one tool once for each query; a blank query finds nothing.

  The constructor opens the connection. If it ends, the next call opens another
  one, and starts the server again if it is a program. A call that a server
  refuses for now (429) is sent again until its deadline.

  Args:
    url: address of the server; "" if it is the program `settings.command`.
    settings: a `config.McpConfig`.
    key_variable: environment variable with the bearer token of an address.
    price: cost of one call; `counters["cost"]` is the sum.
    patience: its `concurrency`, `rate` and `wait` are used.

  Raises:
    ValueError: the tool or a key is missing, or the tool has other arguments.
    RetrievalError: the server cannot be reached.
  """

  def __init__(
    self,
    url: str,
    settings: Any,
    *,
    key_variable: str = "",
    price: float = 0.0,
    patience: http_calls.Patience = http_calls.DEFAULT,
  ):
    token = key_variable and http_calls.secret_in(
      key_variable, "the token of the MCP server"
    )
    # A program gets these variables besides the few that the SDK passes on.
    self._variables = {
      name: http_calls.secret_in(name, "a value for the MCP server")
      for name in settings.variables
    }
    self._url = url
    self._command = settings.command
    self._price = price
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    self._http = _Client(headers=headers, timeout=300.0)
    self._tool = settings.tool
    self._query = settings.query
    self._k = settings.k
    self._fixed: dict[str, Any] = json_files.parse(settings.arguments or "{}")
    self._deadline = settings.deadline
    self._paths = _fields(settings.fields)
    self._redact = redaction.Redactor(token, *self._variables.values())
    self._connection: _Connection | None = None
    self._is_closed = False
    self._stderr: Any = tempfile.TemporaryFile("w+", errors="replace")
    self.counters: Counter[str] = Counter()
    self._wait = patience.wait
    self._gate = turns.Gate(
      patience.concurrency, patience.rate, patience.wait, self.counters
    )
    try:
      loop.run(self._choose_tool())
    except BaseException:
      self.close()
      raise

  @loop.inside
  async def search(
    self, request: types.SearchRequest
  ) -> Sequence[types.Passage]:
    """Returns the passages of a request; raises RetrievalError if it fails."""
    requests_lib.check([request])
    self.counters["queries"] += 1
    limit = turns.Limit(self._deadline, self._wait)
    try:
      async with limit, self._gate.slot():
        return await self._call(request, limit)
    except types.RetrievalError:
      self.counters["failures"] += 1
      raise
    except TimeoutError as error:
      self.counters["failures"] += 1
      if limit.is_late:
        raise self._failure(error) from None
      waited = self._gate.waited(limit)
      raise turns.BusyError(f"MCP tool {self._tool}: {waited}") from None

  def identity(self) -> dict[str, Any]:
    """Returns JSON values that identify the answers."""
    fields = {"fields": self._paths} if self._paths else {}
    return {
      "kind": "mcp",
      "server": self._name,
      "tool": self._tool,
      "query": self._query,
      "k": self._k,
      **fields,
      "arguments": self._fixed,
    }

  def close(self) -> None:
    """Ends the connection, and the server if it is a program."""
    self._is_closed = True
    loop.run(self._close_connection(self._connection))
    loop.run(self._http.aclose())

  async def _choose_tool(self) -> None:
    """Chooses the tool, and checks the names of its arguments."""
    try:
      client = await asyncio.shield(self._open_connection().client)
      async with asyncio.timeout(self._deadline):
        tools = (await client.list_tools()).tools
    except Exception as error:
      raise self._failure(error) from None
    self._name = client.server_info.name if client.server_info else ""
    schemas = {self._quote(tool.name): tool.input_schema for tool in tools}
    if not self._tool:
      self._tool = "search" if len(tools) > 1 else [*schemas, ""][0]
    if self._tool not in schemas:
      raise ValueError(
        f"retrieval.mcp.tool: found {self._tool!r}; the tools of the server "
        f"are: {listing.first_names(sorted(schemas)) or 'none'}."
      )
    schema = schemas[self._tool]
    names = [*map(self._quote, schema.get("properties") or ())]
    required = [*map(self._quote, schema.get("required") or ())]
    arguments = [self._query, *([self._k] if self._k else []), *self._fixed]
    is_unique = len(set(arguments)) == len(arguments)
    if not is_unique or not {*required} <= {*arguments} <= {*names}:
      raise ValueError(
        f"retrieval.mcp: found the arguments {arguments}; expected those of "
        f"the tool, each once: {listing.first_names(names) or 'none'} "
        f"(required: {listing.first_names(required) or 'none'})."
      )

  def _quote(self, text: object) -> str:
    return self._redact.quote(text, 200)

  async def _call(
    self, request: types.SearchRequest, limit: turns.Limit
  ) -> tuple[types.Passage, ...]:
    """Calls the tool; after a broken connection, once more on a new one."""
    query = " ".join(request.query.encode(errors="ignore").decode().split())
    if not query:
      return ()
    arguments = self._fixed | {self._query: query}
    if self._k:
      arguments[self._k] = request.k
    is_last = False
    while True:
      await self._gate.turn(limit)
      connection = self._open_connection()
      try:
        client = await asyncio.shield(connection.client)
        result = await client.call_tool(self._tool, arguments)
        break
      except asyncio.CancelledError:
        # Without an answer in time, a new connection may help the next call.
        if limit.is_late and connection.client.done():
          await self._close_connection(connection)
        raise
      except Exception as error:  # Whatever a transport and its scopes raise.
        failure = self._failure(error)
        is_of_call = getattr(_first_error(error), "code", None) in _CALL_ERRORS
        if is_of_call or isinstance(error, pydantic.ValidationError):
          raise failure from None
        if connection.client.done():  # Otherwise it starts slowly.
          await self._close_connection(connection)
        if is_last:
          raise failure from None
        is_last = True
    self.counters["cost"] += self._price  # type: ignore[assignment]
    return self._answer(result)[: request.k]

  def _open_connection(self) -> _Connection:
    """Returns the connection, or a new one."""
    if self._is_closed:
      raise types.RetrievalError(f"MCP tool {self._tool}: it was closed.")
    if self._connection is None:
      self.counters["connections"] += 1
      if self._url:
        transport: Any = streamable_http.streamable_http_client(
          self._url, http_client=self._http
        )
      else:
        program, *arguments = self._command
        parameters = stdio.StdioServerParameters(
          command=program, args=arguments, env=self._variables
        )
        transport = stdio.stdio_client(parameters, errlog=self._stderr)
      self._connection = _Connection(transport)
    return self._connection

  async def _close_connection(self, connection: _Connection | None) -> None:
    if connection is self._connection:
      self._connection = None
    if connection is not None:
      connection.scope.cancel()
      await asyncio.wait([connection.task], timeout=_START_SECONDS)

  def _answer(self, result: Any) -> tuple[types.Passage, ...]:
    """Returns the passages of a result: its list, or one of each text block."""
    texts = [block.text for block in result.content if block.type == "text"]
    size = sum(map(len, texts))
    if size > _LARGEST:
      raise http_calls.AnswerError(
        f"MCP tool {self._tool}: found a result of {size} characters, expected "
        f"at most {_LARGEST}."
      )
    if result.is_error or (result.content and not texts):
      kinds = listing.first_names(sorted({b.type for b in result.content}))
      message = self._redact.quote(" ".join(texts), 300)
      raise http_calls.AnswerError(
        f"MCP tool {self._tool}: found {message or f'no text ({kinds}).'}"
      )
    value = result.structured_content
    if value is None and self._paths:
      try:
        value = json.loads("\n".join(texts))
      except (ValueError, RecursionError) as error:
        raise self._unexpected("\n".join(texts), f"JSON ({error})") from None
    path = self._paths.get(_RESULTS, "")
    results = _value_at_path(value, path) if path else _only_list(value)
    if results is None and not self._paths:
      return tuple(map(_passage, filter(str.strip, texts)))
    if not isinstance(results, list):
      raise self._unexpected(
        value, f"a list at {path or 'the whole'} (retrieval.mcp.fields)"
      )
    return tuple(map(self._read_result, results))

  def _read_result(self, item: Any) -> types.Passage:
    """Returns one result as a passage, by the places of its parts."""
    if isinstance(item, str):
      return _passage(item)
    paths = {part: self._paths.get(part, part) for part in _PARTS}
    parts = {part: _value_at_path(item, path) for part, path in paths.items()}
    if not isinstance(parts["text"], str) or not parts["text"].strip():
      raise self._unexpected(
        item, f"a text at {paths['text']} (retrieval.mcp.fields)"
      )
    return _passage(**parts)

  def _unexpected(self, value: object, expected: str) -> http_calls.AnswerError:
    quoted = self._redact.quote(repr(value), 80)
    return http_calls.AnswerError(
      f"MCP tool {self._tool}: found {quoted}, expected {expected}."
    )

  def _failure(self, error: BaseException) -> types.RetrievalError:
    """Returns the error to raise, with the last lines that a program wrote."""
    error = _first_error(error)
    message = f"{type(error).__name__}: {error}".rstrip(": ")
    if isinstance(error, TimeoutError):
      message = f"no answer within {self._deadline:g} seconds."
    self._stderr.seek(max(0, self._stderr.seek(0, 2) - 300))
    if stderr := " ".join(self._stderr.read().split()):
      message = f"{message} The server said: {stderr}"
    message = f"MCP tool {self._tool}: {self._redact.quote(message, 600)}"
    if isinstance(error, TimeoutError):
      return http_calls.LateError(message)
    return types.RetrievalError(message)


class _Client(httpx2.AsyncClient):
  """Sends a request again that the address refuses for now (429, or 503)."""

  async def send(
    self, request: httpx2.Request, **options: Any
  ) -> httpx2.Response:
    while True:
      response = await super().send(request, **options)
      seconds = http_calls.retry_after(response.headers)
      is_busy = response.status_code == 503 and seconds
      if response.status_code != 429 and not is_busy:
        return response
      await response.aclose()
      await asyncio.sleep(seconds or _PAUSE_SECONDS)


def _first_error(error: BaseException) -> BaseException:
  """Returns the first error of a group, or the error itself."""
  while isinstance(error, BaseExceptionGroup):
    error = error.exceptions[0]
  return error


class _Connection:
  """A client in a task of its own, which must leave the scopes it entered.

  It is ended by its scope: the SDK ends no program if its task is cancelled.
  """

  def __init__(self, transport: Any):
    self.client: asyncio.Future[Any] = asyncio.Future()
    self.scope = anyio.CancelScope(
      deadline=anyio.current_time() + _START_SECONDS
    )
    self.task = asyncio.create_task(self._run(transport))

  async def _run(self, transport: Any) -> None:
    failure: Exception = ConnectionError("it was not ready in time.")
    try:
      with self.scope:
        async with mcp.Client(transport) as client:
          self.scope.deadline = math.inf
          self.client.set_result(client)
          await anyio.sleep_forever()
    except Exception as error:
      failure = error
    if not self.client.done():
      self.client.set_exception(failure)
      self.client.exception()  # Nobody may wait for it any more.


def _only_list(value: Any) -> list[Any] | None:
  """Returns a list, or the only one in an object; None if there is none."""
  if isinstance(value, Mapping):
    lists = [item for item in value.values() if isinstance(item, list)]
    value = lists[0] if len(lists) == 1 else None
  return value if isinstance(value, list) else None


def _value_at_path(value: Any, path: str) -> Any:
  """Returns what a JSON value has at names joined by dots, None if nothing."""
  for name in path.split(".") if path else ():
    value = value.get(name) if isinstance(value, Mapping) else None
  return value


def _fields(entries: Sequence[str]) -> dict[str, str]:
  """Returns the place of each part that `retrieval.mcp.fields` names.

  Raises:
    ValueError: an entry is not PART=PLACE of a known part.
  """
  paths = dict(entry.partition("=")[::2] for entry in entries)
  parts = (_RESULTS, *_PARTS)
  is_distinct = len(paths) == len(entries)
  if not all([is_distinct, *paths.values()]) or paths.keys() - set(parts):
    raise ValueError(
      f"retrieval.mcp.fields: found {', '.join(entries)}; expected entries "
      f"such as text=snippet or results=data.hits, each once, of "
      f"{', '.join(parts)}."
    )
  return paths


def _passage(
  text: str, *, title: Any = None, id: Any = None, score: Any = None
) -> types.Passage:
  """Returns a passage without control characters.

  Args:
    text: with words.
    title: a text; other values count as none.
    id: a text or a number; other values count as none, and then the id is a
      hash of title and text.
    score: a finite number; other values count as 0.
  """
  title = title if isinstance(title, str) else ""
  title = " ".join(_CONTROL.sub("", title).split())
  text = _CONTROL.sub("", text).strip()
  name = str(id) if isinstance(id, str | int) else ""
  if not name:
    digest = hashlib.sha256(f"{title}\n{text}".encode()).hexdigest()
    name = f"sha256:{digest[:16]}"
  is_number = isinstance(score, int | float) and math.isfinite(score)
  return types.Passage(
    _CONTROL.sub("", name), title, text, float(score) if is_number else 0.0
  )
