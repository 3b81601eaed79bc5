"""SGLang servers over HTTP: asked with patience, or a sentence why not.

Every wait has a deadline. What met a broken connection or a busy server is sent
again, because nothing of an answer was received; whatever else is no plain
answer is a `types.EngineError`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re
import threading
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

import httpx2

from anysearch_jax import config as config_lib
from anysearch_jax import types
from anysearch_jax.host.http import calls, redaction, wire

T = TypeVar("T")
Json = dict[str, Any]

_BUSY = (429, 502, 503, 504)
_CONNECT_SECONDS = 10.0
_CONTROL_SECONDS = 30.0
_ABORT_SECONDS = 5.0
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 5.0
_LONGEST = 300  # Characters of what broke a connection.
_LONGEST_FOUND = 1000  # And of what a reply has.
# The first version whose replies name the weights of every token.
_SPANS_SINCE = (0, 5, 23)
# Tokens of its context that a server keeps to itself.
_RESERVED = 6


class UnansweredError(types.EngineError):
  """A server gave no answer that counts; another one may, or this one later."""


class Background:
  """An event loop on a thread of its own.

  Each rollout brings its own event loop and takes it away again; connections,
  and aborts of what nobody waits for any more, outlive it here.
  """

  def __init__(self):
    self._loop = asyncio.new_event_loop()
    self._thread = threading.Thread(target=self._serve, daemon=True)
    self._thread.start()

  def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
    """Waits for a coroutine's result outside of any event loop."""
    future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
    try:
      return future.result()
    except BaseException:
      future.cancel()  # Of use where this thread was interrupted.
      raise

  async def wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
    """Waits for it in another event loop; cancelling this cancels it."""
    return await asyncio.wrap_future(
      asyncio.run_coroutine_threadsafe(coroutine, self._loop)
    )

  def close(self, last: Callable[[], Awaitable[None]]) -> None:
    """Gives tasks that still run a moment, then does `last` and ends.

    What does not end in time is left behind.
    """
    if self._thread.is_alive():
      self.run(_settle(last))
      self._loop.call_soon_threadsafe(self._loop.stop)
      # A daemon: one that hangs is left behind.
      self._thread.join(_ABORT_SECONDS)

  def _serve(self) -> None:
    self._loop.run_forever()
    self._loop.close()


class Server:
  """One server; its methods run in the loop that `client` belongs to.

  Args:
    url: where it listens.
    client: without a deadline of its own.
    config: `retries`, and `deadline` where it is short.
    counters: `retries` are counted here.
    secret: the key; it is removed from what is quoted.
  """

  def __init__(
    self,
    url: str,
    *,
    client: httpx2.AsyncClient,
    config: config_lib.SglangConfig,
    counters: Counter[str],
    secret: str = "",
  ):
    self._redact = redaction.Redactor(secret)
    self.url = url.rstrip("/")
    self._client = client
    self._retries = config.retries
    self._patience = min(_CONTROL_SECONDS, config.deadline)
    self._counters = counters
    self._aborts: set[asyncio.Task] = set()

  async def limits(self) -> tuple[int, bool]:
    """Makes sure that the server generates.

    Returns:
      The longest context that it takes with what is sampled, and whether its
      replies name the weights of every token.
    """
    await self.get("/model_info", "/get_model_info")
    # A run that was killed while it handed weights over left it paused.
    await self.post("/continue_generation", {})
    await self.tell("GET", "/health")
    info = await self.get("/server_info", "/get_server_info")
    # Prompts are shorter than this number.
    longest = info.get("max_req_input_len")
    if type(longest) is not int:
      models = await self.get("/v1/models")
      try:
        longest = int(models["data"][0]["max_model_len"]) - _RESERVED
      except (LookupError, TypeError, ValueError):
        raise types.EngineError(
          f"{self.url}: neither /server_info nor /v1/models tells the longest "
          "context; expected a server of requirements-sglang.txt."
        ) from None
    found = re.match(r"(\d+)\.(\d+)\.(\d+)", str(info.get("version")))
    spans = (
      found is not None and tuple(map(int, found.groups())) >= _SPANS_SINCE
    )
    return longest - 1, spans

  async def get(self, path: str, *others: str) -> Json:
    """The object at a path, or at the next one where the server has none."""
    for each in (path, *others):
      response = await self._ask("GET", each, None, self._patience)
      if response.status_code != 404:
        break
    return self._object(response)

  async def post(
    self, path: str, body: Json, *, deadline: float | None = None
  ) -> Json:
    """The object that answers a body, by default soon."""
    seconds = deadline or self._patience
    return self._object(await self._ask("POST", path, lambda: body, seconds))

  async def tell(self, method: str, path: str) -> None:
    """Asks for something whose answer says no more than that it was done."""
    self._check(await self._ask(method, path, None, self._patience))

  async def generate(self, body: Json) -> Json:
    """Has the server generate; what it may still work on in vain is aborted.

    There is no deadline: whoever waits sets one and cancels.
    """
    waiting: list[str] = []

    def request() -> Json:
      # Its own id for each try: the server refuses one that it still runs.
      waiting.append(uuid.uuid4().hex)
      return body | {"rid": waiting[-1]}

    try:
      response = await self._ask("POST", "/generate", request, None)
      waiting.pop()
    finally:
      for rid in waiting:
        task = asyncio.create_task(self._abort(rid))
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)
    return self._object(response)

  async def _abort(self, rid: str) -> None:
    try:
      async with asyncio.timeout(_ABORT_SECONDS):
        await self._client.post(f"{self.url}/abort_request", json={"rid": rid})
    except (httpx2.HTTPError, TimeoutError):
      pass  # A server that is gone generates nothing.

  async def _ask(
    self,
    method: str,
    path: str,
    body: Callable[[], Json] | None,
    deadline: float | None,
  ) -> httpx2.Response:
    """The response to a request that was received."""
    url = self.url + path
    try:
      async with asyncio.timeout(deadline):
        for attempt in range(self._retries + 1):
          if attempt:
            self._counters["retries"] += 1
            await asyncio.sleep(pause(attempt))
          try:
            response = await self._client.request(
              method, url, json=None if body is None else body()
            )
          except httpx2.TransportError as error:
            met = self._redact.quote(str(error), _LONGEST)
            met = f"{type(error).__name__}: {met}".rstrip(": ")
            continue
          if response.status_code not in _BUSY:
            return response
          met = f"HTTP {response.status_code}: {self._message(response)}"
    except TimeoutError:
      raise UnansweredError(
        f"{url}: no answer within {deadline:g} seconds."
      ) from None
    except httpx2.HTTPError as error:
      # Its cause would hold the request, and so the key.
      met = self._redact.quote(str(error), _LONGEST)
      raise types.EngineError(f"{url}: {met}") from None
    raise UnansweredError(
      f"{url}: tried {self._retries + 1} times, the last met {met}. Is an "
      "SGLang server running there (launch/serve_sglang.sh)?"
    )

  def _check(self, response: httpx2.Response) -> None:
    if response.status_code != 200:
      raise types.EngineError(
        f"{response.url}: HTTP {response.status_code}: "
        f"{self._message(response)}"
      )

  def _message(self, response: httpx2.Response) -> str:
    return wire.message(response.content, self._redact)

  def _object(self, response: httpx2.Response) -> Json:
    """The JSON object that a response holds."""
    self._check(response)
    try:
      value = json.loads(self._redact.scrub(response.content))
    except (ValueError, RecursionError):
      value = None
    if not isinstance(value, dict):
      raise types.EngineError(
        f"{response.url}: found {self._redact.quote(response.content, 80)!r}, "
        "expected a JSON object."
      )
    return value

  def error(self, found: object) -> types.EngineError:
    """What was found in a reply of this server, as an error without the key."""
    shown = self._redact.quote(str(found), _LONGEST_FOUND)
    return types.EngineError(f"{self.url}: {shown}")


def connect(
  config: config_lib.SglangConfig, counters: Counter[str]
) -> tuple[httpx2.AsyncClient, list[Server]]:
  """The servers of a configuration, and the client that all of them share.

  Raises:
    ValueError: no url, or one that is none; a key that is not there.
  """
  validate(config)
  key = read_key(config)
  headers = {"Authorization": f"Bearer {key}"} if key else {}
  client = httpx2.AsyncClient(
    headers=headers,
    timeout=httpx2.Timeout(None, connect=_CONNECT_SECONDS),
    limits=httpx2.Limits(max_connections=None, max_keepalive_connections=None),
    trust_env=False,  # Proxies are for the outside.
  )
  return client, [
    Server(url, client=client, config=config, counters=counters, secret=key)
    for url in config.urls
  ]


def validate(config: config_lib.SglangConfig) -> None:
  """Raises ValueError with a sentence for an address or a name that is none."""
  wrong = [url for url in config.urls if not redaction.is_address(url)]
  if wrong or not config.urls:
    found = redaction.shown(wrong[0]) if wrong else "'none'"
    raise ValueError(
      f"sglang.urls: found {found}, expected addresses such as "
      "http://127.0.0.1:30000."
    )
  if config.api_key_variable:
    redaction.check_variable(config.api_key_variable, "sglang.api_key_variable")


def read_key(config: config_lib.SglangConfig) -> str:
  """The servers' key, "" where they have none.

  Raises:
    ValueError: the variable is not set, or holds what cannot be sent, which is
      not shown.
  """
  variable = config.api_key_variable
  return variable and calls.secret_in(variable, "the servers' key")


def pause(attempt: int) -> float:
  """Seconds before a next try: more each time, different for all that wait."""
  seconds = min(_FIRST_PAUSE * 2 ** min(attempt, 99), _LONGEST_PAUSE)
  return seconds * random.uniform(0.5, 1.5)


async def _settle(last: Callable[[], Awaitable[None]]) -> None:
  async def others() -> None:
    # What is cancelled leaves an abort behind, so this goes on until none is.
    while tasks := asyncio.all_tasks() - mine:
      await asyncio.wait(tasks)

  waiting = asyncio.create_task(others())
  mine = {asyncio.current_task(), waiting}
  await asyncio.wait([waiting], timeout=_ABORT_SECONDS)
  late = asyncio.all_tasks() - {asyncio.current_task()}
  for task in late:
    task.cancel()
  if late:
    await asyncio.wait(late, timeout=_ABORT_SECONDS)
  with contextlib.suppress(TimeoutError):
    async with asyncio.timeout(_ABORT_SECONDS):
      await last()
