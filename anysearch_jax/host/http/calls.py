"""HTTP calls with limits, usable from any event loop.

Each call has a deadline and limits on its retries and on the size of its
answer. A circuit breaker protects a failing service. Error messages never
contain the key.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import httpx2

from anysearch_jax import types
from anysearch_jax.host import own_loop
from anysearch_jax.host.http import breaker as breaker_lib
from anysearch_jax.host.http import errors, redaction, wire

T = TypeVar("T")

# Temporary statuses: of servers that are busy, restarting or too slow.
BUSY = (408, 425, 429, 502, 503, 504)
_CONNECT_SECONDS = 10.0
_LONGEST_PAUSE = 5.0
_LONGEST_MET = 300


class StatusError(types.RetrievalError):
  """The service answered with another status than 200, stored in `status`."""

  def __init__(self, sentence: str, status: int):
    super().__init__(sentence)
    self.status = status


class RefusedError(StatusError, errors.AnswerError):
  """The service works, and refuses this request (4xx)."""


class FailedError(StatusError, errors.AnswerError):
  """The service failed (5xx); the request may be the reason."""


@dataclasses.dataclass(frozen=True)
class Patience:
  """Limits on the waiting for a service.

  deadline: seconds that a search may take, including its retries.
  retries: limit on retries, which follow broken connections and temporary
    statuses (by default `BUSY`).
  pause: seconds before the first retry; it doubles for each further one, up to
    5 seconds, with random jitter.
  concurrency: limit on concurrent calls.
  failures, cooldown: after `failures` consecutive failed calls, no call is made
    for `cooldown` seconds.
  """

  deadline: float = 30.0
  retries: int = 3
  pause: float = 0.1
  concurrency: int = 4
  failures: int = 5
  cooldown: float = 10.0

  def __post_init__(self):
    for name, least in (("retries", 0), ("concurrency", 1), ("failures", 1)):
      if getattr(self, name) < least:
        raise ValueError(
          f"{name}: found {getattr(self, name)}, expected at least {least}."
        )
    for name in ("deadline", "pause", "cooldown"):
      if not 0 < getattr(self, name) < math.inf:
        raise ValueError(
          f"{name}: found {getattr(self, name)}, expected seconds above 0."
        )


DEFAULT = Patience()


class Caller:
  """Makes HTTP calls on its own thread, which outlives callers' event loops.

  Args:
    patience: limits on the waiting.
    headers: sent with each call.
    secret: the key; `redact` removes it from everything that is quoted.
    advice: last sentence of the error for an unreachable service.
    largest: limit on the bytes of an answer.
    again: statuses that are retried.
    proxies: whether to use the proxies that the environment names.
    transport: replaces the network, for tests.
    clock: clock of the circuit breaker.

  `counters` holds the number of `requests` sent, how many of them were
  `retries`, the number of calls that were `failures`, and the total `seconds`
  of all calls.
  """

  def __init__(
    self,
    patience: Patience,
    *,
    headers: dict[str, str],
    secret: str,
    advice: str,
    largest: int,
    again: tuple[int, ...] = BUSY,
    proxies: bool = False,
    transport: httpx2.AsyncBaseTransport | None = None,
    clock: Callable[[], float] = time.monotonic,
  ):
    self._patience = patience
    through = redaction.proxy_passwords() if proxies else []
    self.redact = redaction.Redactor(secret, *through)
    self._advice, self._largest, self._again = advice, largest, again
    self._breaker = breaker_lib.Breaker(
      patience.failures, patience.cooldown, unless=RefusedError, clock=clock
    )
    self._slots = asyncio.Semaphore(patience.concurrency)
    self._client = httpx2.AsyncClient(
      headers=headers,
      follow_redirects=False,
      timeout=httpx2.Timeout(
        None, connect=min(_CONNECT_SECONDS, patience.deadline)
      ),
      limits=httpx2.Limits(max_connections=patience.concurrency),
      trust_env=proxies and transport is None,
      transport=transport,
    )
    # Counts of events, and the seconds, which are a fraction.
    self.counters: Counter[str] = Counter()
    self._loop = own_loop.OwnLoop(self._client.aclose)

  async def wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
    """Awaits a coroutine of this caller from any event loop.

    Cancelling the wait cancels the coroutine.
    """
    return await self._loop.wait(coroutine)

  def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine of this caller from outside of any event loop."""
    return self._loop.run(coroutine)

  def close(self) -> None:
    """Cancels the calls in progress and ends the thread."""
    self._loop.close()

  def until(self) -> float:
    """Returns the deadline of a search that begins now, as event-loop time.

    It must be called in a coroutine of this caller.
    """
    return asyncio.get_running_loop().time() + self._patience.deadline

  async def ask(
    self,
    method: str,
    url: str,
    *,
    read: Callable[[bytes], T],
    until: float,
    counted: bool = True,
    **request: Any,
  ) -> T:
    """Makes a call with retries; pass the coroutine to `wait` or `run`.

    Args:
      method, url: of the request; the URL must not contain secrets.
      read: converts the bytes of the answer to the result. A `RetrievalError`
        that it raises counts as a failure of the service. It must quote the
        answer only through `redact`.
      until: result of the method `until`.
      counted: whether an `errors.AnswerError` counts as a failure of the
        service. A caller whose request may itself be at fault passes False and
        reports by `fail` if it was not.
      request: further arguments of httpx2's `request`.

    Raises:
      RetrievalError: the call failed; a `StatusError` if the last answer had
        another status than 200.
    """
    seconds = f"within {self._patience.deadline:g} seconds"
    try:
      async with asyncio.timeout_at(until):
        await self._slots.acquire()
    except TimeoutError:
      self.counters["failures"] += 1
      raise types.RetrievalError(
        f"{url}: not asked {seconds}, because it was never its turn; calls at "
        f"a time: {self._patience.concurrency}."
      ) from None
    started = time.perf_counter()
    try:
      with self._breaker.call(() if counted else (errors.AnswerError,)):
        try:
          async with asyncio.timeout_at(until):
            return read(await self._try(method, url, until, request))
        except TimeoutError:
          raise types.RetrievalError(
            f"{url}: no whole answer {seconds}. {self._advice}"
          ) from None
    except types.RetrievalError as error:
      if counted or not isinstance(error, errors.AnswerError):
        self.counters["failures"] += 1
      raise
    finally:
      self.counters["seconds"] += (  # type: ignore[assignment]  # A float.
        time.perf_counter() - started
      )
      self._slots.release()

  def fail(self, error: types.RetrievalError) -> None:
    """Counts an error that was not `counted` as a failure of the service."""
    self._breaker.fail(error)

  async def _try(
    self, method: str, url: str, until: float, request: dict[str, Any]
  ) -> bytes:
    """Returns the bytes of an answer with status 200, retrying if needed."""
    for attempt in range(self._patience.retries + 1):
      self.counters["requests"] += 1
      self.counters["retries"] += attempt > 0
      pause = self._patience.pause * 2**attempt
      pause = min(pause, _LONGEST_PAUSE) * random.uniform(0.5, 1.5)
      status = 0
      try:
        status, headers, data = await self._send(method, url, request)
      except httpx2.TransportError as error:
        # The message may quote what the server sent instead of HTTP.
        met = self.redact.quote(str(error), _LONGEST_MET)
        met = f"{type(error).__name__}: {met}".rstrip(": ")
      # Raised `from None`: the cause holds the request and so the key.
      except httpx2.HTTPError as error:
        met = self.redact.quote(str(error), _LONGEST_MET)
        raise types.RetrievalError(f"{url}: {met}") from None
      if status == 200:
        return self.redact.scrub(data)
      if status:
        met = f"HTTP {status}: {wire.message(data, self.redact)}"
        if status not in self._again:
          kinds = {4: RefusedError, 5: FailedError}
          kind = kinds.get(status // 100, StatusError)
          raise kind(f"{url}: {met}", status)
        pause = max(pause, wire.retry_after(headers))
      if attempt == self._patience.retries:
        break
      if asyncio.get_running_loop().time() + pause >= until:
        met += f" To wait for {pause:.3g} seconds more would be too long."
        break
      await asyncio.sleep(pause)
    sentence = f"{url}: tried {attempt + 1} times, the last met {met}"
    if status:
      raise (StatusError if status in BUSY else FailedError)(sentence, status)
    raise types.RetrievalError(f"{sentence.rstrip('.')}. {self._advice}")

  async def _send(
    self, method: str, url: str, request: dict[str, Any]
  ) -> tuple[int, httpx2.Headers, bytes]:
    async with self._client.stream(method, url, **request) as response:
      parts, size = [], 0
      async for part in response.aiter_bytes():
        parts.append(part)
        size += len(part)
        if size > self._largest:
          raise errors.AnswerError(
            f"{url}: found an answer of more than {self._largest} bytes; "
            "expected passages only."
          )
      return response.status_code, response.headers, b"".join(parts)


def json_headers(key: str) -> dict[str, str]:
  """Returns the headers of a JSON request; "" sends no bearer key."""
  headers = {"Content-Type": "application/json"}
  return headers | ({"Authorization": f"Bearer {key}"} if key else {})


def secret_in(variable: str, what: str) -> str:
  """Returns the secret in an environment variable.

  Args:
    variable: name of the variable.
    what: what the variable should contain, for error messages.

  Raises:
    ValueError: the variable is not set, or its value cannot be sent in a
      header. The message does not show the value.
  """
  redaction.check_variable(variable, f"The variable with {what}")
  value = os.environ.get(variable, "").strip()
  if not value:
    raise ValueError(f"{variable} is not set; expected {what} in it.")
  if not (value.isascii() and value.isprintable() and " " not in value):
    raise ValueError(
      f"{variable}: expected {what}, found characters that none has."
    )
  return value
