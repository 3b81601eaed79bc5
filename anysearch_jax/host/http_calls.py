"""HTTP calls with a deadline, retries and redacted errors.

A `Caller` makes the calls to one service. Error messages never contain its key.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import datetime
import email.utils
import json
import math
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import httpx2

from anysearch_jax import types
from anysearch_jax.config import settings
from anysearch_jax.host import loop, redaction, turns

T = TypeVar("T")

# Temporary statuses: of servers that are busy, restarting or too slow.
BUSY = (408, 425, 429, 502, 503, 504)
_CONNECT_SECONDS = 10.0
_CLOSE_SECONDS = 5.0
_LONGEST_ANSWER = 3600.0  # Seconds for which parts of streams renew deadlines.
# Of the deadline between two parts of a stream, after which it counts as ended;
# less than all, so that no deadline above this one passes first.
_STALL_SHARE = 0.95
# Addresses of this machine, which no proxy reaches.
_DIRECT = {
  f"all://{host}": None for host in ("127.0.0.1", "localhost", "[::1]")
}
_LONGEST_PAUSE = 5.0  # Seconds between two attempts, before the jitter.
# Limits on the characters that an error message quotes: of the service's own
# error, and of a value in an answer.
_ERROR_CHARACTERS = 300
_VALUE_CHARACTERS = 80


class AnswerError(types.RetrievalError):
  """The service replied, with an error or with something invalid."""

  why = "answer"


class LateError(types.RetrievalError):
  """The service did not answer in time."""

  why = "late"


class StatusError(types.RetrievalError):
  """The service answered with another status than 200, stored in `status`."""

  def __init__(self, sentence: str, status: int):
    super().__init__(sentence)
    self.status = status
    self.why = f"http_{status}"


class RefusedError(StatusError, AnswerError):
  """The service works, and refuses this request (4xx)."""


class FailedError(StatusError, AnswerError):
  """The service failed (5xx); the request may be the reason."""


@dataclasses.dataclass(frozen=True)
class Patience:
  """Limits on the waiting for a service.

  deadline: seconds that a call may take from its first request on, including
    its retries. Waiting for a turn does not count. A stream gets them again
    with each part of it, and so do the calls whose answers have not begun,
    because the service may answer them after it; all for an hour at most.
  retries: limit on retries, which follow broken connections and temporary
    statuses (by default `BUSY`).
  pause: seconds before the first retry; it doubles for each further one, up to
    5 seconds, with random jitter.
  concurrency: limit on concurrent calls.
  rate: limit on the requests in a second; 0: none.
  wait: seconds that a call may wait for its turn: for a free place, for the
    rate, and because the service says so (429, or 503 with Retry-After), which
    is neither a failure nor a retry, and makes all calls wait.
  """

  deadline: float = settings.placement(30.0, settings.POSITIVE)
  retries: int = settings.placement(3, settings.at_least(0))
  pause: float = settings.placement(0.1, settings.POSITIVE)
  concurrency: int = settings.placement(4, settings.at_least(1))
  rate: float = settings.placement(0.0, settings.at_least(0))
  wait: float = settings.placement(600.0, settings.POSITIVE)

  def __post_init__(self):
    settings.check(self)


DEFAULT = Patience()


class _Sent(NamedTuple):
  """A request that was sent: the limits of its task, and when."""

  limits: tuple[turns.Limit, ...]
  time: float

  def renew(self) -> None:
    """Gives the limits their seconds again, for an hour at most."""
    if time.monotonic() - self.time < _LONGEST_ANSWER:
      for limit in self.limits:
        limit.renew()


@dataclasses.dataclass(eq=False, kw_only=True, repr=False)
class Caller:
  """Makes HTTP calls to a service, in the loop of `host.loop`.

  Attributes:
    secret: the key; `redact` removes it from everything that is quoted.
    advice: last sentence of the error for an unreachable service.
    patience: limits on the waiting.
    headers: sent with each call; None: those of a JSON request, with the key as
      a bearer token.
    largest_bytes: limit on the size of an answer.
    retried_statuses: HTTP statuses after which a call is tried again.
    price: dollars, added to `counters["cost"]` for each call that is answered.
    proxies: whether to use the proxies that the environment names, except for
      addresses of this machine.
    transport: replaces the network, for tests.

  `counters` holds the number of `requests` sent, how many of them were
  `retries`, the number of calls that were `failures`, the total `seconds` of
  all requests, and those of `turns.Gate`.
  """

  secret: str
  advice: str
  patience: Patience = DEFAULT
  headers: dict[str, str] | None = None
  largest_bytes: int = 1 << 24
  retried_statuses: tuple[int, ...] = BUSY
  price: float = 0.0
  proxies: bool = False
  transport: httpx2.AsyncBaseTransport | None = None

  def __post_init__(self):
    patience = self.patience
    headers = self.headers
    proxy_passwords = redaction.proxy_passwords() if self.proxies else []
    self.redact = redaction.Redactor(self.secret, *proxy_passwords)
    # Counts of events, and the seconds and dollars, which are fractions.
    self.counters: Any = Counter()
    self._gate = turns.Gate(
      concurrency=patience.concurrency,
      rate=patience.rate,
      longest=patience.wait,
      counters=self.counters,
    )
    if headers is None:
      headers = {"Content-Type": "application/json"}
      if self.secret:
        headers |= {"Authorization": f"Bearer {self.secret}"}
    self._client = httpx2.AsyncClient(
      headers=headers,
      follow_redirects=False,
      timeout=httpx2.Timeout(
        None, connect=min(_CONNECT_SECONDS, patience.deadline)
      ),
      limits=httpx2.Limits(max_connections=patience.concurrency),
      trust_env=self.proxies and self.transport is None,
      mounts=_DIRECT,
      transport=self.transport,
    )
    # The deadlines of calls in progress; None once this is closed.
    self._limits: set[turns.Limit] | None = set()
    # The limits of the tasks whose calls wait for the first part of an answer,
    # and when they were sent.
    self._unanswered: dict[object, _Sent] = {}

  def close(self) -> None:
    """Closes the connections; calls in progress and later ones fail."""
    if self._limits is not None:
      loop.run(self._end())

  async def _end(self) -> None:
    limits = self._limits or set()
    self._limits = None
    for limit in limits:
      limit.end()
    with contextlib.suppress(TimeoutError):
      async with asyncio.timeout(_CLOSE_SECONDS):
        await asyncio.sleep(0)  # Calls end before their connections do.
        await self._client.aclose()

  def limit(self) -> turns.Limit:
    """Returns a new deadline, for one call or several consecutive ones."""
    return turns.Limit(self.patience.deadline, self.patience.wait)

  @loop.inside
  async def ask(
    self,
    method: str,
    url: str,
    *,
    read: Callable[[Any], T],
    limit: turns.Limit | None = None,
    counted: bool = True,
    stream_joiner: Callable[[], Any] | None = None,
    **request: Any,
  ) -> T:
    """Makes a call with retries; it may be awaited in any event loop.

    Args:
      method: HTTP method.
      url: address of the request, which must not contain secrets.
      read: converts the JSON value of the answer to the result. A
        `RetrievalError` that it raises counts as a failure of the service. It
        must quote the answer only through `redact`.
      limit: result of the method `limit`, for calls with one deadline.
      counted: whether an `AnswerError` counts as one of the `failures`.
      stream_joiner: makes an object that joins an answer if that is a stream of
        events: `feed` gets its bytes, and `whole` returns the answer as JSON,
        or raises httpx2's error if the stream broke off, which is retried as a
        broken connection.
      request: further arguments of httpx2's `request`.

    Raises:
      RetrievalError: the call failed; a `StatusError` if the last answer had
        another status than 200, an `AnswerError` if it is not JSON.
    """
    if self._limits is None:
      raise types.RetrievalError(f"{url}: not asked, the client was closed.")
    limit = limit or self.limit()
    self._limits.add(limit)
    try:
      async with limit, self._gate.slot():
        data = await self._try(
          method,
          url,
          limit=limit,
          stream_joiner=stream_joiner,
          request=request,
        )
        if self.price:
          self.counters["cost"] += self.price
        return read(self._parse(url, data))
    except TimeoutError:
      self.counters["failures"] += 1
      raise self._late(url, limit) from None
    except types.RetrievalError as error:
      if counted or not isinstance(error, AnswerError):
        self.counters["failures"] += 1
      raise
    finally:
      if self._limits is not None:
        self._limits.discard(limit)

  def unexpected(self, url: str, value: object, expected: str) -> AnswerError:
    """Returns the error for an answer with another value than `expected`.

    Args:
      url: address that answered.
      value: the value in its answer; the message quotes a part, redacted.
      expected: noun phrase for the values that are valid.
    """
    quoted = self.redact.quote(repr(value), _VALUE_CHARACTERS)
    return AnswerError(f"{url}: found {quoted}, expected {expected}.")

  def _late(self, url: str, limit: turns.Limit) -> types.RetrievalError:
    """Returns the error of a call that ended before its answer."""
    if self._limits is None:
      return types.RetrievalError(f"{url}: the client was closed.")
    if not limit.is_late:
      return turns.BusyError(f"{url}: {self._gate.waited(limit)}")
    return self._too_late(url)

  def _too_late(self, url: str) -> LateError:
    return LateError(
      f"{url}: no whole answer within {self.patience.deadline:g} seconds. "
      f"{self.advice}"
    )

  async def _try(
    self,
    method: str,
    url: str,
    *,
    limit: turns.Limit,
    stream_joiner: Callable[[], Any] | None,
    request: dict[str, Any],
  ) -> bytes:
    """Returns the bytes of an answer with status 200, retrying if needed."""
    attempt = 0
    while True:
      sent = await self._gate.turn(limit)
      call = object()
      self._unanswered[call] = _Sent(turns.running(), sent)
      self.counters["requests"] += 1
      self.counters["retries"] += attempt > 0
      status = 0  # No answer.
      retry_after_seconds = 0.0
      try:
        async with self._client.stream(method, url, **request) as response:
          data = await self._read(url, response, stream_joiner, call)
        status = response.status_code
      # Raised `from None`: the cause holds the request and so the key. The
      # message may quote what the server sent instead of HTTP.
      except httpx2.HTTPError as error:
        failure = self.redact.quote(str(error), _ERROR_CHARACTERS)
        if not isinstance(error, httpx2.TransportError):
          raise types.RetrievalError(f"{url}: {failure}") from None
        failure = f"{type(error).__name__}: {failure}".rstrip(": ")
      finally:
        self._unanswered.pop(call, None)
        self.counters["seconds"] += time.monotonic() - sent
      if status == 200:
        self._gate.answered()
        return data
      if status:
        failure = f"HTTP {status}: {message(data, self.redact)}"
        retry_after_seconds = retry_after(response.headers)
        if status == 429 or (status == 503 and retry_after_seconds):
          refusal = f"{url}: {failure}"
          self._gate.pause(
            retry_after_seconds, sent=sent, refusal=refusal, limit=limit
          )
          continue
        if status not in self.retried_statuses:
          kinds = {4: RefusedError, 5: FailedError}
          kind = kinds.get(status // 100, StatusError)
          raise kind(f"{url}: {failure}", status)
      pause = self.patience.pause * 2**attempt
      pause = min(pause, _LONGEST_PAUSE) * random.uniform(0.5, 1.5)
      pause = max(pause, retry_after_seconds)
      attempt += 1
      if attempt > self.patience.retries:
        break
      if pause >= limit.seconds:
        failure += f" To wait for {pause:.3g} seconds more would be too long."
        break
      await asyncio.sleep(pause)
    sentence = f"{url}: tried {attempt} times, the last met {failure}"
    if status:
      raise (StatusError if status in BUSY else FailedError)(sentence, status)
    raise types.RetrievalError(f"{sentence.rstrip('.')}. {self.advice}")

  async def _read(
    self,
    url: str,
    response: httpx2.Response,
    stream_joiner: Callable[[], Any] | None,
    call: object,
  ) -> bytes:
    """Reads an answer, unless it is too large.

    A stream that stops before its end is whole as far as it came.
    """
    content = bytearray()
    content_type = response.headers.get("Content-Type", "")
    is_stream = response.status_code == 200 and "event-stream" in content_type
    events = stream_joiner() if stream_joiner and is_stream else None
    sent = self._unanswered[call]
    chunks = response.aiter_bytes()
    stall = None  # The service may queue a request whose headers it has sent.
    while True:
      try:
        async with asyncio.timeout(stall):
          chunk = await anext(chunks, None)
      except TimeoutError:
        part = None if events is None else events.part()
        if part is None:
          raise self._too_late(url) from None
        return part
      if chunk is None:
        break
      content += chunk
      if events is not None:
        events.feed(chunk)
        self._unanswered.pop(call, None)
        stall = _STALL_SHARE * self.patience.deadline
        for progressing in (sent, *self._unanswered.values()):
          progressing.renew()
      if len(content) > self.largest_bytes:
        raise AnswerError(
          f"{url}: found an answer of more than {self.largest_bytes} bytes; "
          "expected a shorter one."
        )
    return bytes(content) if events is None else events.whole()

  def _parse(self, url: str, data: bytes) -> Any:
    """Parses an answer, without keys, as JSON without NaN and infinities."""

    def refuse(name: str) -> None:
      raise ValueError(f"it says {name}")

    try:
      return json.loads(self.redact.scrub(data), parse_constant=refuse)
    except (ValueError, RecursionError) as error:
      quoted = self.redact.quote(data, _VALUE_CHARACTERS)
      raise AnswerError(
        f"{url}: found {quoted!r} ({error}), expected JSON."
      ) from None


def at_address(
  url: str, route: str, service_name: str, *, key_variable: str, **settings: Any
) -> tuple[str, Caller]:
  """Returns the address of a route of a server, and a `Caller` for it.

  Args:
    url: address of the server, with or without `route`.
    route: such as `/retrieve`.
    service_name: noun for the server, for error messages.
    key_variable: environment variable with the bearer token; "": none is sent.
    settings: further arguments of `Caller`.

  Raises:
    ValueError: the url is invalid, or the key is missing.
  """
  if not redaction.is_address(url):
    # The message does not quote the url, which may contain a password.
    raise ValueError(
      f"The {service_name}'s url is invalid; expected an address such as "
      "http://127.0.0.1:8000, with no user, query or fragment."
    )
  key = key_variable and secret_in(
    key_variable, f"the key for the {service_name}"
  )
  base = url.rstrip("/").removesuffix(route).rstrip("/")
  return base + route, Caller(secret=key, **settings)


def secret_in(variable: str, contents: str) -> str:
  """Returns the secret in an environment variable.

  Args:
    variable: name of the variable.
    contents: noun phrase for what the variable should contain, for error
      messages.

  Raises:
    ValueError: the variable is not set, or its value cannot be sent in a
      header. The message does not show the value.
  """
  redaction.check_variable(variable, f"The variable with {contents}")
  value = os.environ.get(variable, "").strip()
  if not value:
    raise ValueError(f"{variable} is not set; expected {contents} in it.")
  if not (value.isascii() and value.isprintable() and " " not in value):
    raise ValueError(
      f"{variable}: expected {contents}, found characters that none has."
    )
  return value


def text_of(value: object) -> str | None:
  """Returns a text without halves of surrogate pairs; None for other values.

  No tokenizer can encode such a half.
  """
  if not isinstance(value, str):
    return None
  return value.encode(errors="replace").decode()


def body(value: Any) -> bytes:
  """Encodes a request as JSON in ASCII.

  A policy can write half of a surrogate pair, which has no UTF-8 encoding but
  can be escaped in ASCII.
  """
  return json.dumps(value).encode("ascii")


def message(data: bytes, redact: redaction.Redactor) -> str:
  """Returns the message of an error reply for logs, with keys redacted.

  Services put it at different places: `error`, `message` or `detail`, possibly
  nested, or plain text.
  """
  try:
    value = json.loads(data)
  except (ValueError, RecursionError):
    value = None
  while isinstance(value, dict):
    value = next(
      (value[k] for k in ("error", "message", "detail") if k in value), None
    )
  text = value if isinstance(value, str) else data.decode(errors="replace")
  return (
    redact.quote(" ".join(text.split()), _ERROR_CHARACTERS)
    or "no reason given."
  )


def retry_after(headers: Mapping[str, str]) -> float:
  """Returns the seconds that the Retry-After header asks to wait, or 0.

  The header is a number of seconds or a date.
  """
  text = headers.get("retry-after", "")
  try:
    seconds = float(text)
  except ValueError:
    try:
      date = email.utils.parsedate_to_datetime(text)
      seconds = (date - datetime.datetime.now(date.tzinfo)).total_seconds()
    except (ValueError, OverflowError):
      return 0.0
  return seconds if 0 < seconds < math.inf else 0.0
