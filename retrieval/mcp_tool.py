"""A search tool of an MCP server as a retriever, over the SDK's transports.

https://modelcontextprotocol.io/specification
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import math
import re
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import anyio
import httpx2
import mcp
import mcp_types
import pydantic
from mcp.client import stdio, streamable_http

from anysearch_jax import types
from anysearch_jax.host import http_calls, loop, redaction
from retrieval import requests as requests_lib

Answer = tuple[types.Passage, ...]

# Keys of lists of results and of a result's parts, in the order of choice.
_LISTS = "passages results documents docs hits result items data content"
_TEXTS = "text contents content passage page_content snippet description"
_TITLES, _IDS, _SCORES = "title name", "id url uri link href", "score"
_WITHIN = "document metadata"  # Objects that have parts of a result.
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff]")
_START_SECONDS = 60.0


class ToolError(http_calls.AnswerError):
  """The tool answered with an error: it works, and refuses this call."""


class McpRetriever(requests_lib.OneByBatch):
  """Calls one tool, once a query; a blank query finds nothing.

  The connection is opened at once, and again when it has ended: a server that
  died is started again, or connected to again. The SDK bounds no message.

  Args:
    server: its address, or its program and arguments.
    headers: sent to an address.
    variables: environment variables of a program besides the SDK's few.
    tool: name of the tool; "": the only one, or `search`.
    query: name of its argument for the query.
    count: name of its argument for the number of results; "": none is sent.
    fixed: further arguments of every call.
    price: cost of one call; `counters["cost"]` is the sum.
    deadline: seconds of a call with its retry.
    secrets: keys, which are removed from everything that is quoted.

  Raises:
    ValueError: the tool is missing, or does not take a query.
    RetrievalError: the server cannot be reached.

  `counters` has the `queries`, the `failures`, the `connections` that were
  opened, and the `cost`.
  """

  def __init__(
    self,
    server: str | Sequence[str],
    *,
    headers: Mapping[str, str] | None = None,
    variables: Mapping[str, str] | None = None,
    tool: str = "",
    query: str = "query",
    count: str = "",
    fixed: Mapping[str, Any] | None = None,
    price: float = 0.0,
    deadline: float = 30.0,
    secrets: Sequence[str] = (),
  ):
    self._server, self._headers = server, dict(headers or {})
    self._variables, self._fixed = dict(variables or {}), dict(fixed or {})
    self._price, self._deadline = price, deadline
    self._query, self._count = query, count
    self._redact = redaction.Redactor(*secrets)
    self._session: _Session | None = None
    self._said: Any = tempfile.TemporaryFile("w+", errors="replace")
    self.counters: Counter[str] = Counter()
    try:
      self._name, tools = loop.run(self._tools())
      self._tool = tool or ("search" if len(tools) > 1 else [*tools, ""][0])
      _check(self._tool, tools, query, count, self._fixed)
    except BaseException:
      self.close()
      raise

  async def search_many(
    self, requests: Sequence[types.SearchRequest]
  ) -> list[Answer | Exception]:
    """Returns the passages of each request, or its `RetrievalError`.

    Raises:
      ValueError: a request is invalid, see `requests.check`.
    """
    requests_lib.check(requests, "")
    self.counters["queries"] += len(requests)
    found = await loop.wait(self._search(requests))
    self.counters["failures"] += sum(isinstance(x, Exception) for x in found)
    return found

  def identity(self) -> dict[str, Any]:
    """Returns JSON values that identify the answers."""
    return {
      "kind": "mcp",
      "server": self._name,
      "tool": self._tool,
      "query": self._query,
      "k": self._count,
      "arguments": self._fixed,
    }

  def close(self) -> None:
    """Ends the connection, and the server if it is a program."""
    if self._session is not None:
      loop.run(self._drop(self._session))

  async def _search(self, requests: Sequence[types.SearchRequest]) -> list[Any]:
    return await asyncio.gather(*map(self._one, requests))

  async def _one(self, request: types.SearchRequest) -> Answer | Exception:
    """Calls the tool; after a broken connection, once more on a new one."""
    query = " ".join(request.query.encode(errors="ignore").decode().split())
    if not query:
      return ()
    asked = self._fixed | {self._query: query}
    if self._count:
      asked[self._count] = request.k
    met: Exception = TimeoutError()
    for _ in range(2):
      session = self._session = self._session or self._opened()
      calls = session.answered
      try:
        async with asyncio.timeout(self._deadline):
          client = await asyncio.shield(session.client)
          result = await client.call_tool(self._tool, asked)
        session.answered += 1
        self.counters["cost"] += self._price  # type: ignore[assignment]
        return self._answer(result, request.k)
      except TimeoutError as error:
        # A server that starts slowly is left to later calls; one that answers
        # nobody meanwhile is left for a new one.
        if session.client.done() and session.answered == calls:
          await self._drop(session)
        return self._failed(error)
      except (mcp.MCPError, pydantic.ValidationError) as error:
        of_call = (mcp_types.PARSE_ERROR, mcp_types.INVALID_PARAMS)
        if isinstance(error, pydantic.ValidationError) or error.code in of_call:
          return self._failed(error)
        met = error
      except types.RetrievalError as error:
        return error
      except Exception as error:  # Whatever a transport and its scopes raise.
        met = error
      await self._drop(session)
    return self._failed(met)

  def _answer(self, result: Any, k: int) -> Answer:
    """Returns the passages of a result: structured, JSON in texts, or texts."""
    if result.is_error:
      parts = (getattr(block, "text", "") for block in result.content)
      met = self._redact.quote(" ".join(filter(None, parts)), 300)
      raise ToolError(f"MCP tool {self._tool}: {met or 'an error.'}")
    found = _passages(result.structured_content)
    texts = [b.text for b in result.content if b.type == "text"]
    if found is None and result.content and not texts:
      kinds = ", ".join(sorted({block.type for block in result.content}))
      raise http_calls.AnswerError(
        f"MCP tool {self._tool}: found an answer without text ({kinds}), "
        "expected passages."
      )
    if found is None:
      found = []
      for text in texts:
        with contextlib.suppress(ValueError, RecursionError):
          inner = _passages(json.loads(text))
          if inner is not None:
            found += inner
            continue
        found += _passages([text]) or ()
    return tuple(found[:k])

  def _failed(self, error: BaseException) -> types.RetrievalError:
    """Returns what went wrong, with the last that a program wrote."""
    while isinstance(error, BaseExceptionGroup):
      error = error.exceptions[0]
    met = f"{type(error).__name__}: {error}".rstrip(": ")
    if isinstance(error, TimeoutError):
      met = f"no answer within {self._deadline:g} seconds."
    self._said.seek(max(0, self._said.seek(0, 2) - 300))
    if said := " ".join(self._said.read().split()):
      met = f"{met} The server said: {said}"
    return types.RetrievalError(
      f"MCP tool {getattr(self, '_tool', '')}: {self._redact.quote(met, 600)}"
    )

  async def _tools(self) -> tuple[str, dict[str, Any]]:
    """Returns the server's name, and the schema of each tool's arguments."""
    self._session = self._opened()
    try:
      async with asyncio.timeout(self._deadline + _START_SECONDS):
        client = await asyncio.shield(self._session.client)
        found = await client.list_tools()
    except Exception as error:
      raise self._failed(error) from None
    info = client.server_info
    schemas = {each.name: each.input_schema for each in found.tools}
    return (info.name if info else ""), schemas

  def _opened(self) -> _Session:
    self.counters["connections"] += 1
    return _Session(self._transport())

  async def _drop(self, session: _Session) -> None:
    if session is self._session:
      self._session = None
    session.scope.cancel()
    await asyncio.wait([session.task])

  @contextlib.asynccontextmanager
  async def _transport(self) -> AsyncIterator[Any]:
    """Yields the streams that the SDK's client takes."""
    if isinstance(self._server, str):
      async with (
        httpx2.AsyncClient(headers=self._headers, timeout=300.0) as client,
        streamable_http.streamable_http_client(
          self._server, http_client=client
        ) as streams,
      ):
        yield streams
      return
    program, *rest = self._server
    parameters = stdio.StdioServerParameters(
      command=program, args=rest, env=self._variables
    )
    async with stdio.stdio_client(parameters, errlog=self._said) as streams:
      yield streams


class _Session:
  """A client in a task of its own, which must leave the scopes it entered.

  It is ended by its scope: the SDK ends no program if its task is cancelled.
  """

  def __init__(self, transport: Any):
    self.answered = 0
    self.client: asyncio.Future[Any] = (
      asyncio.get_running_loop().create_future()
    )
    self.scope = anyio.CancelScope()
    self.task = asyncio.create_task(self._run(transport))

  async def _run(self, transport: Any) -> None:
    met: Exception = ConnectionError("it was not ready in time.")
    try:
      with self.scope:
        self.scope.deadline = anyio.current_time() + _START_SECONDS
        async with mcp.Client(transport) as client:
          self.scope.deadline = math.inf
          self.client.set_result(client)
          await anyio.sleep_forever()
    except Exception as error:
      met = error
    finally:
      if not self.client.done():
        self.client.set_exception(met)
        self.client.exception()  # Nobody may wait for it any more.


def _check(
  tool: str,
  tools: Mapping[str, Any],
  query: str,
  count: str,
  fixed: Mapping[str, Any],
) -> None:
  """Refuses a tool that there is not, and arguments that it does not have.

  Raises:
    ValueError: the message lists what there is.
  """
  if tool not in tools:
    raise ValueError(
      f"retrieval.mcp.tool: found {tool!r}; the tools of the server are: "
      f"{', '.join(sorted(tools)[:20]) or 'none'}."
    )
  names = list(tools[tool].get("properties") or {})
  required = set(tools[tool].get("required") or ())
  given = [query, *([count] if count else []), *fixed]
  for field, wrong in (
    ("query", query not in names),
    ("k", bool(count) and count not in names),
    ("arguments", bool({*given} - {*names} or required - {*given})),
    ("arguments", len(given) > len({*given})),
  ):
    if wrong:
      raise ValueError(
        f"retrieval.mcp.{field}: found query {query!r}, k {count!r} and "
        f"{dict(fixed)}; expected arguments of the tool, each once: "
        f"{', '.join(names) or 'none'} (required: "
        f"{', '.join(sorted(required)) or 'none'})."
      )


def _passages(value: Any) -> list[types.Passage] | None:
  """Returns the passages in a JSON value; None if it has no results."""
  items = value
  while isinstance(items, Mapping):
    lists = (items.get(key) for key in _LISTS.split())
    items = next((x for x in lists if isinstance(x, list | Mapping)), [value])
  if isinstance(items, list) and len(items) == 1 and isinstance(items[0], list):
    items = items[0]  # Of several queries' lists, only ours is there.
  if not isinstance(items, list):
    return None
  found = [p for p in map(_passage, items) if p is not None]
  return found if found or not items else None


def _passage(item: Any) -> types.Passage | None:
  """Returns a result as a passage; None if it has no text."""
  if isinstance(item, str):
    item = {"text": item}
  if not isinstance(item, Mapping):
    return None
  within = (item.get(key) for key in _WITHIN.split())
  parts = [item, *(each for each in within if isinstance(each, Mapping))]

  def first(keys: str, kinds: Any) -> Any:
    found = (part.get(key) for part in parts for key in keys.split())
    return next((x for x in found if isinstance(x, kinds) and x != ""), None)

  title = _CONTROL.sub("", first(_TITLES, str) or "")
  text = _CONTROL.sub("", first(_TEXTS, str) or "").strip()
  if not title and any("contents" in part for part in parts) and "\n" in text:
    title, text = text.split("\n", 1)  # Search-R1's form.
  if not (text or title):
    return None
  digest = hashlib.sha256(f"{title}\n{text}".encode()).hexdigest()
  name = first(_IDS, str | int)
  score = first(_SCORES, int | float) or 0.0
  return types.Passage(
    _CONTROL.sub("", str(name))
    if name is not None
    else f"sha256:{digest[:16]}",
    " ".join(title.split()),
    text or title,
    float(score) if math.isfinite(score) else 0.0,
  )
