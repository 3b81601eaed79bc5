"""A search tool of an MCP server as a retriever.

Specification: https://modelcontextprotocol.io/specification
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import mcp
import mcp_types
import pydantic

from anysearch_jax import types
from anysearch_jax.host import own_loop
from anysearch_jax.host.http import breaker as breaker_lib
from anysearch_jax.host.http import calls, errors, redaction
from retrieval import requests as requests_lib
from retrieval.mcp_tools import arguments as arguments_lib
from retrieval.mcp_tools import results, transports

Answer = tuple[types.Passage, ...]

LARGEST = 1 << 24
# Pages of a list of tools that are read.
_PAGES = 20
_LONGEST_MET = 300


class ToolError(errors.AnswerError):
  """The tool answered with an error: it works, and refuses this call."""


class McpRetriever(requests_lib.OneByBatch):
  """Calls one tool; safe to use from any event loop and thread.

  The connection is opened at once, and again when it has ended: a server that
  died is started again, or connected to again. A blank query finds nothing.

  Args:
    server: a server, see `transports`.
    tool: name of the tool; "": the only one, or `search`.
    query, count: names of its arguments; "": see `arguments.detect`.
    fixed: further arguments of every call.
    price: cost of one call; `counters["cost"]` is the sum.
    corpus: name of the corpus; a request must name this corpus or none.
    patience: deadlines, retries after a broken connection, and calls at a time.
    secrets: keys, which are removed from everything that is quoted.
    clock: of the circuit breaker.

  Raises:
    ValueError: the tool is missing, or does not take a query.
    RetrievalError: the server cannot be reached.

  `counters` has the `queries`, the `calls`, those that were `retries`, the
  `failures`, the `connections` that were opened, and the `cost`.
  """

  def __init__(
    self,
    server: transports.Process | transports.Address,
    *,
    tool: str = "",
    query: str = "",
    count: str = "",
    fixed: Mapping[str, Any] | None = None,
    price: float = 0.0,
    corpus: str = "",
    patience: calls.Patience = calls.DEFAULT,
    secrets: Sequence[str] = (),
    clock: Callable[[], float] = time.monotonic,
  ):
    self._server, self._patience = server, patience
    self._price, self._corpus = price, corpus
    self._redact = redaction.Redactor(*secrets)
    self._breaker = breaker_lib.Breaker(
      patience.failures, patience.cooldown, unless=ToolError, clock=clock
    )
    self._slots = asyncio.Semaphore(patience.concurrency)
    self._session: _Session | None = None
    self.counters: Counter[str] = Counter()
    self._loop = own_loop.OwnLoop(self._disconnect)
    try:
      self._name, tools = self._loop.run(self._list())
      self._tool = arguments_lib.choose(tool, list(tools))
      self._arguments = arguments_lib.detect(
        tools[self._tool], query=query, count=count, fixed=fixed
      )
    except BaseException:
      self._loop.close()
      raise

  async def search_many(
    self, requests: Sequence[types.SearchRequest]
  ) -> list[Answer | Exception]:
    """Returns answers in request order, by one call each.

    Returns:
      For each request its passages or a `RetrievalError`; a `ToolError` if the
      tool answered with an error.

    Raises:
      ValueError: a request is invalid, see `requests.check`.
    """
    requests_lib.check(requests, self._corpus)
    return await self._loop.wait(self._search(list(requests)))

  def identity(self) -> dict[str, Any]:
    """Returns JSON values that identify the answers."""
    return {
      "kind": "mcp",
      "server": self._name,
      "tool": self._tool,
      "query": self._arguments.query,
      "k": self._arguments.count,
      "arguments": dict(self._arguments.fixed),
    }

  def close(self) -> None:
    """Ends the connection, and the server if it is a child process."""
    self._loop.close()

  async def _search(
    self, requests: list[types.SearchRequest]
  ) -> list[Answer | Exception]:
    until = self._until()
    self.counters["queries"] += len(requests)

    async def one(request: types.SearchRequest) -> Answer | Exception:
      query = " ".join(request.query.encode(errors="ignore").decode().split())
      if not query:
        return ()
      try:
        return await self._in_turn(query, request.k, until)
      except types.RetrievalError as error:
        self.counters["failures"] += 1
        return error

    return await asyncio.gather(*map(one, requests))

  async def _in_turn(self, query: str, k: int, until: float) -> Answer:
    try:
      async with asyncio.timeout_at(until):
        await self._slots.acquire()
    except TimeoutError:
      raise self._late() from None
    try:
      with self._breaker.call():
        return await self._ask(query, k, until)
    finally:
      self._slots.release()

  async def _ask(self, query: str, k: int, until: float) -> Answer:
    """Calls the tool; after a broken connection, on a new one."""
    given = self._arguments.of(query, k)
    retries, attempt = self._patience.retries, -1
    started = asyncio.get_running_loop().time()
    while attempt < retries:
      attempt += 1
      self.counters["calls"] += 1
      self.counters["retries"] += attempt > 0
      session = None
      try:
        async with asyncio.timeout_at(until):
          session = self._connected()
          await session.opened()
          result = await session.client.call_tool(self._tool, given)
      except TimeoutError:
        # A server that answered nothing meanwhile answers no later call either.
        # One that starts has a deadline of its own.
        if session is not None and session.client is not None:
          if session.answered < started:
            self._drop(session)
        raise self._late() from None
      except Exception as error:
        met = self._met(error)
        if _is_of_answer(error):
          raise errors.AnswerError(f"{self._named()}: {met}") from None
        if self._server.why:
          # The call itself may be the reason, or another one beside it.
          retries = min(retries, 1)
        self._drop(session)
        continue
      session.answered = asyncio.get_running_loop().time()
      # The declared counts of a Counter are whole; these are dollars.
      self.counters["cost"] += self._price  # type: ignore[assignment]
      return self._answer(result, k)
    raise types.RetrievalError(
      f"{self._named()}: tried {attempt + 1} times, the last met {met}"
    )

  def _answer(self, result: Any, k: int) -> Answer:
    if result.is_error:
      met = self._redact.quote(results.said(result), _LONGEST_MET)
      raise ToolError(f"{self._named()}: {met or 'an error without a reason.'}")
    found = results.passages(result)
    if found is None:
      kinds = ", ".join(sorted({block.type for block in result.content}))
      raise errors.AnswerError(
        f"{self._named()}: found an answer without text ({kinds}), expected "
        "passages."
      )
    return found[:k]

  async def _list(self) -> tuple[str, dict[str, Mapping[str, Any]]]:
    """Returns the server's name, and the input schema of each of its tools."""
    try:
      session = self._connected()
      await session.opened()
      async with asyncio.timeout(self._patience.deadline):
        tools: dict[str, Mapping[str, Any]] = {}
        cursor: str | None = None
        for _ in range(_PAGES):
          found = await session.client.list_tools(cursor=cursor)
          tools |= {each.name: each.input_schema for each in found.tools}
          cursor = found.next_cursor
          if not cursor:
            break
    except TimeoutError:
      raise self._late() from None
    except Exception as error:
      raise types.RetrievalError(
        f"The MCP server did not tell its tools: {self._met(error)}"
      ) from None
    info = session.client.server_info
    return (info.name if info else ""), tools

  def _connected(self) -> _Session:
    """Returns the session, a new one if there is none."""
    if self._session is None or self._session.is_over:
      self.counters["connections"] += 1
      self._session = _Session(self._server)
    return self._session

  def _drop(self, session: _Session | None) -> None:
    """Ends a session, so that the next call opens another one."""
    if session is not None and session is self._session:
      self._session = None
      session.end()

  async def _disconnect(self) -> None:
    self._drop(self._session)

  def _late(self) -> types.RetrievalError:
    return types.RetrievalError(
      f"{self._named()}: no answer within {self._patience.deadline:g} seconds."
    )

  def _met(self, error: BaseException) -> str:
    """Returns what went wrong, with the last lines that the server wrote."""
    while isinstance(error, BaseExceptionGroup):
      error = error.exceptions[0]
    text = self._server.why or f"{type(error).__name__}: {error}".rstrip(": ")
    if said := " | ".join(self._server.said):
      text = f"{text} The server said: {said}"
    return self._redact.quote(" ".join(text.split()), _LONGEST_MET)

  def _named(self) -> str:
    return f"MCP tool {getattr(self, '_tool', '') or '(unknown)'}"

  def _until(self) -> float:
    return asyncio.get_running_loop().time() + self._patience.deadline


class _Session:
  """A connection with a client on it, opened and closed by a task of its own.

  The SDK's scopes must be left by the task that entered them.
  """

  def __init__(self, server: transports.Process | transports.Address):
    self._server = server
    server.why = ""
    self.answered = 0.0  # When it last answered, in event-loop time.
    self.client: Any = None  # An `mcp.Client`, once the session is open.
    self._ready = asyncio.get_running_loop().create_future()
    self._task = asyncio.create_task(self._run())

  @property
  def is_over(self) -> bool:
    return self._task.done()

  async def opened(self) -> None:
    """Waits for the connection; raises what it met.

    A server may take longer to start than a call may last, so a call that stops
    waiting leaves it to later ones.
    """
    await asyncio.shield(self._ready)

  def end(self) -> None:
    self._task.cancel()

  async def _run(self) -> None:
    seconds = self._server.start
    try:
      async with asyncio.timeout(seconds) as starting:
        async with mcp.Client(self._server.connect()) as client:
          starting.reschedule(None)
          self.client = client
          self._ready.set_result(None)
          await asyncio.Event().wait()  # `end` cancels it.
    except TimeoutError:
      error = ConnectionError(f"it was not ready within {seconds:g} seconds.")
      self._fail(error)
    except Exception as error:
      self._fail(error)
    finally:
      self._fail(ConnectionError("it was ended while it started."))

  def _fail(self, error: Exception) -> None:
    if not self._ready.done():
      self._ready.set_exception(error)
      self._ready.exception()  # Nobody may wait for it any more.


def _is_of_answer(error: Exception) -> bool:
  """Returns whether the server is well, and its answer or our call is not."""
  if isinstance(error, mcp.MCPError):
    return error.code in (mcp_types.PARSE_ERROR, mcp_types.INVALID_PARAMS)
  return isinstance(error, pydantic.ValidationError)
