"""HTTP calls that end, from any event loop.

Each has a deadline, a number of tries and a number of bytes at most; a service
that does not answer is left alone for a while. What goes wrong is a sentence
without the key.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import httpx2

from anysearch_jax.host.http import breaker as breaker_lib
from anysearch_jax.host.http import errors, redaction, wire

T = TypeVar("T")

# Statuses that pass: of servers that are busy, restarted or too slow.
BUSY = (408, 425, 429, 502, 503, 504)
_CONNECT_SECONDS = 10.0
_LONGEST_PAUSE = 5.0
_CLOSE_SECONDS = 5.0
_LONGEST_MET = 300


class StatusError(errors.RetrievalError):
  """An answer that is no 200; `status` is its number."""

  def __init__(self, sentence: str, status: int):
    super().__init__(sentence)
    self.status = status


class RefusedError(StatusError, errors.AnswerError):
  """The service is well, and does not answer such a request (4xx)."""


class FailedError(StatusError, errors.AnswerError):
  """The service failed at a request, which may be at fault (500)."""


@dataclasses.dataclass(frozen=True)
class Patience:
  """How long a service is waited for.

  deadline: seconds that a search may take, with all its tries.
  retries: tries after the first; for broken connections, and HTTP 408, 425,
    429, 502, 503 and 504.
  pause: seconds before the first retry, about twice as many before each next.
  concurrency: calls at a time.
  failures: so many calls in a row that fail, and for `cooldown` seconds none is
    made.
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
  """Makes calls on a thread of its own, so that event loops come and go.

  Args:
    patience: how long is waited.
    headers: of each call.
    secret: the key; `redact` removes it from what is quoted.
    advice: ends the sentence of a service that is out of reach.
    largest: bytes of an answer.
    again: statuses that are tried again.
    proxies: whether those of the environment are used.
    transport: answers instead of the network.
    clock: of the breaker.

  `counters` holds the `requests` sent, how many of them were `retries`, the
  calls that were `failures`, and the `seconds` of all calls together.
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
    self.counters: Counter[str] = Counter()
    self._closed = False
    self._loop = asyncio.new_event_loop()
    self._thread = threading.Thread(target=self._serve, daemon=True)
    self._thread.start()

  async def wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
    """Waits for it in any event loop; cancelling this cancels it."""
    future = self._submit(coroutine)
    try:
      return await asyncio.wrap_future(future)
    except asyncio.CancelledError:
      if asyncio.current_task().cancelling():
        raise
      raise errors.RetrievalError("The retriever was closed.") from None

  def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
    """Waits for it outside of any event loop."""
    return self._submit(coroutine).result()

  def close(self) -> None:
    """Ends calls that are under way, and the thread."""
    if not self._closed:
      self._closed = True
      ending = asyncio.run_coroutine_threadsafe(self._end(), self._loop)
      # A daemon: one that hangs is left behind.
      with contextlib.suppress(TimeoutError):
        ending.result(3 * _CLOSE_SECONDS)
      self._loop.call_soon_threadsafe(self._loop.stop)
      self._thread.join(_CLOSE_SECONDS)

  def until(self) -> float:
    """The end of a search that begins now; in a coroutine of this caller."""
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
    """Asks until there is an answer, or no more time; `wait` and `run` this.

    Args:
      method, url: without anything secret.
      read: what is made of the answer's bytes; a `RetrievalError` of it is a
        failure of the service. It quotes them by `redact`.
      until: as `until` gave it.
      counted: whether an `errors.AnswerError` is a failure of the service. The
        caller of a request that may be at fault itself finds out, and says so
        by `fail`.
      request: arguments of httpx2's `request`.

    Raises:
      RetrievalError: a sentence; `StatusError` where it is an HTTP status.
    """
    seconds = f"within {self._patience.deadline:g} seconds"
    try:
      async with asyncio.timeout_at(until):
        await self._slots.acquire()
    except TimeoutError:
      self.counters["failures"] += 1
      raise errors.RetrievalError(
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
          raise errors.RetrievalError(
            f"{url}: no whole answer {seconds}. {self._advice}"
          ) from None
    except errors.RetrievalError as error:
      if counted or not isinstance(error, errors.AnswerError):
        self.counters["failures"] += 1
      raise
    finally:
      self.counters["seconds"] += time.perf_counter() - started
      self._slots.release()

  def fail(self, error: errors.RetrievalError) -> None:
    """Counts an error that was not `counted` as a failure of the service."""
    self._breaker.fail(error)

  async def _try(
    self, method: str, url: str, until: float, request: dict[str, Any]
  ) -> bytes:
    """The bytes of a 200."""
    for attempt in range(self._patience.retries + 1):
      self.counters["requests"] += 1
      self.counters["retries"] += attempt > 0
      pause = self._patience.pause * 2**attempt
      pause = min(pause, _LONGEST_PAUSE) * random.uniform(0.5, 1.5)
      status = 0
      try:
        status, headers, data = await self._send(method, url, request)
      except httpx2.TransportError as error:
        # It may quote a line that is not HTTP.
        met = self.redact.quote(str(error), _LONGEST_MET)
        met = f"{type(error).__name__}: {met}".rstrip(": ")
      # Its cause would hold the request, and so the key.
      except httpx2.HTTPError as error:
        met = self.redact.quote(str(error), _LONGEST_MET)
        raise errors.RetrievalError(f"{url}: {met}") from None
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
    raise errors.RetrievalError(f"{sentence.rstrip('.')}. {self._advice}")

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

  def _submit(self, coroutine: Coroutine[Any, Any, T]):
    if self._closed:
      coroutine.close()
      raise errors.RetrievalError("The retriever was closed.")
    return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

  async def _end(self) -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
      task.cancel()
    if others:
      await asyncio.wait(others, timeout=_CLOSE_SECONDS)
    with contextlib.suppress(TimeoutError):
      async with asyncio.timeout(_CLOSE_SECONDS):
        await self._client.aclose()

  def _serve(self) -> None:
    self._loop.run_forever()
    self._loop.close()


def secret_in(variable: str, what: str) -> str:
  """What an environment variable holds.

  Raises:
    ValueError: nothing, or what cannot be sent; it is not shown.
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


def check(request: Any, corpus: str) -> None:
  """Refuses what one corpus cannot answer.

  Raises:
    ValueError: `k` below 1, another corpus than `corpus` or "".
  """
  if request.k < 1:
    raise ValueError(f"Found k={request.k}, expected 1 or more passages.")
  if request.corpus not in ("", corpus):
    raise ValueError(
      f"Found a search of the corpus {request.corpus!r}; this retriever has "
      f"{corpus!r} only. Name it in `corpus`, or use one retriever a corpus."
    )
