"""Waiting for a turn: deadlines that stand still meanwhile, and who may go.

A service admits a number of requests at a time, and of requests in a second. A
request that waits for its turn is not late, so its deadlines stand still: a
`Limit` counts the seconds of work and those of waiting apart.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import contextvars
import math
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

from anysearch_jax import types

# Seconds of a pause that a service asks for without saying how long; the first
# is as long as a step of the rate, if there is one, but not shorter than this.
_SHORTEST_PAUSE = 0.1
_FIRST_PAUSE = 1.0
_LONGEST_PAUSE = 30.0
_INSTANT = 1e-3  # Seconds by which clocks may differ.
# Requests arrive with other gaps than they were sent with, so a window of the
# rate is a little longer here than where it is enforced.
_MARGIN = 1.005

_limits: contextvars.ContextVar[tuple[Limit, ...]] = contextvars.ContextVar(
  "limits", default=()
)


class Limit:
  """A deadline: `async with` it, also several times after each other.

  Work that several callers share, such as a query of two episodes, has a limit
  without seconds, which nobody enters: while the work waits, that limit makes
  the limits of all callers stand still.

  Args:
    seconds: seconds that the work may take.
    waiting: seconds that it may wait for a turn.
    waits: number of turns that the work waits for now, an attribute too.

  Attributes:
    spent: seconds that it has waited.

  Raises:
    TimeoutError: at the end of the block; `is_late` then says whether the work
      took too long, and not the waiting.
  """

  def __init__(
    self, seconds: float = math.inf, waiting: float = math.inf, *, waits=0
  ):
    self._seconds = seconds
    self._waiting = waiting
    self.waits = waits
    self._allowed_seconds = seconds
    self.spent = 0.0
    self._since = 0.0
    self._timeout: asyncio.Timeout | None = None
    self._callers: list[Limit] = []

  async def __aenter__(self) -> Limit:
    self._loop = asyncio.get_running_loop()
    self._since = time.monotonic()
    self._timeout = await asyncio.timeout(None).__aenter__()
    self._reschedule()
    self._token = _limits.set((*_limits.get(), self))
    return self

  async def __aexit__(self, *error) -> None:
    _limits.reset(self._token)
    self._count_elapsed()
    timeout = self._timeout
    self._timeout = None
    assert timeout is not None
    await timeout.__aexit__(*error)

  @contextlib.contextmanager
  def shared(self) -> Iterator[None]:
    """Makes the running task's limits stand still with this one, inside."""
    caller_limits = _limits.get()
    self._callers += caller_limits
    for limit in caller_limits if self.waits else ():
      limit.wait()
    try:
      yield
    finally:
      for limit in caller_limits:
        self._callers.remove(limit)
        if self.waits:
          limit.wait(-1)

  @property
  def seconds(self) -> float:
    """Seconds of work that are left."""
    self._count_elapsed()
    return self._seconds

  @property
  def is_late(self) -> bool:
    """Whether no seconds of work are left."""
    return self.seconds < _INSTANT

  def why(self) -> str:
    """Returns a sentence that says which ran out, the work or the waiting."""
    if not self.is_late:
      return f"it waited {self.spent:.0f} seconds for its turn."
    waited = f", after {self.spent:.0f} in a queue" if self.spent else ""
    return f"no answer within {self._allowed_seconds:g} seconds{waited}."

  @property
  def waiting_left(self) -> float:
    """Seconds of waiting that are left."""
    self._count_elapsed()
    return self._waiting - self.spent

  def wait(self, change: int = 1) -> None:
    """Notes that the work waits for one turn more, or with -1 for one less."""
    self._count_elapsed()
    waits_before = self.waits
    self.waits += change
    self._reschedule()
    for caller in self._callers if 0 in (waits_before, self.waits) else ():
      caller.wait(change)

  def waited(self, seconds: float) -> None:
    """Counts the last `seconds` of work as waiting."""
    self._seconds += seconds
    self.spent += seconds
    self._reschedule()
    for caller in self._callers:
      caller.waited(seconds)

  def renew(self) -> None:
    """Gives the work all of its seconds again, because it makes progress."""
    self._count_elapsed()
    if self._seconds > -math.inf:
      self._seconds = self._allowed_seconds
      self._reschedule()

  def end(self) -> None:
    """Ends the work now."""
    self._seconds = self._waiting = -math.inf
    self._reschedule()

  def _count_elapsed(self) -> None:
    """Counts the time since the last change as waiting or as work."""
    now = time.monotonic()
    if self.waits:
      self.spent += now - self._since
    elif self._timeout is not None:
      self._seconds -= now - self._since
    self._since = now

  def _reschedule(self) -> None:
    """Sets the end of the work, or of the waiting, from now."""
    timeout = self._timeout  # Another thread may end the block meanwhile.
    if timeout is None or timeout.expired():
      return
    if asyncio.get_running_loop() is not self._loop:
      # A search of another event loop waits in that of `host.loop`.
      with contextlib.suppress(RuntimeError):  # It was closed meanwhile.
        self._loop.call_soon_threadsafe(self._reschedule)
      return
    seconds_left = self.waiting_left if self.waits else self.seconds
    deadline = self._loop.time() + max(seconds_left, 0.0)
    timeout.reschedule(None if seconds_left == math.inf else deadline)


@contextlib.contextmanager
def waiting() -> Iterator[None]:
  """Counts the `with` block as waiting, for the task and its callers."""
  limits = _limits.get()
  for limit in limits:
    limit.wait()
  try:
    yield
  finally:
    for limit in limits:
      limit.wait(-1)


def running() -> tuple[Limit, ...]:
  """Returns the limits of the running task."""
  return _limits.get()


def of_work(limits: tuple[Limit, ...]) -> contextvars.Context:
  """Returns the context of a task that works for these limits alone."""
  context = contextvars.copy_context()
  context.run(_limits.set, limits)
  return context


class BusyError(types.RetrievalError):
  """The service works, but a request got no turn while it may wait for one."""

  status = 429
  why = "busy"


class Gate:
  """Admits requests to a service: at a time, in a second, and in no pause.

  Args:
    concurrency: limit on requests at a time.
    rate: limit on requests in a second, which are spread evenly; 0: none.
    longest: limit on a pause, in seconds.
    counters: gets `throttled`, how often the service asked to wait, and
      `throttled_seconds`, how long it was sent nothing because of that.
  """

  def __init__(
    self,
    concurrency: int,
    rate: float,
    longest: float,
    counters: collections.Counter[str],
  ):
    self._concurrency = concurrency
    self._rate = rate
    self._refusal = ""  # What the service said when it last asked to wait.
    self._slots = asyncio.Semaphore(concurrency)
    self._next_lock = asyncio.Lock()  # Held by the request that goes next.
    # The times of the last requests; the first and a new one are a window of
    # the rate apart.
    size = max(1, int(rate))
    self._sent = collections.deque([-math.inf] * size, maxlen=size)
    self._interval = 1 / rate if rate else 0.0
    self._due_time = -math.inf
    self._refused_at = -math.inf
    # A pause is cut to the longest one, so that a later request tries again.
    self._refused_until = -math.inf
    self._paused_until = -math.inf
    self._longest = longest
    self._pause = 0.0
    self._counters: Any = counters

  @contextlib.asynccontextmanager
  async def slot(self) -> AsyncIterator[None]:
    """Waits until fewer than `concurrency` are inside."""
    with waiting():
      await self._slots.acquire()
    try:
      yield
    finally:
      self._slots.release()

  async def turn(self, limit: Limit) -> float:
    """Waits until a request may be sent, which the caller then does.

    Returns:
      The time, in monotonic seconds.

    Raises:
      BusyError: a pause lasts for longer than `limit` may wait.
    """
    with waiting():
      async with self._next_lock:
        due_time = max(self._due_time, time.monotonic())
        while True:
          now = time.monotonic()
          seconds_left = self._next_time() - now
          if seconds_left <= 0:
            break
          if self._paused_until > now:
            self._check(self._refused_until - now, limit)
          await asyncio.sleep(seconds_left)
        self._sent.append(now)
        # A delay of up to one step is caught up, so that the rate is reached.
        self._due_time = max(due_time, now - self._interval) + self._interval
        return now

  def _next_time(self) -> float:
    """Returns when the next request may be sent."""
    window = len(self._sent) * self._interval * _MARGIN
    return max(self._due_time, self._sent[0] + window, self._paused_until)

  def pause(
    self, seconds: float, *, sent: float, refusal: str, limit: Limit
  ) -> None:
    """Sends nothing for a while, because the service asks for it.

    Args:
      seconds: length of the pause that the service asks for; 0: it does not
        say.
      sent: when the refused request was sent, as `turn` returned it.
      refusal: what the service said.
      limit: deadline of the request.

    Raises:
      BusyError: this is longer than `limit` may wait.
    """
    now = time.monotonic()
    for task_limit in _limits.get():
      task_limit.waited(now - sent)
    if sent >= self._refused_at:  # Others say nothing new.
      self._refused_at = now
      first = max(self._interval or _FIRST_PAUSE, _SHORTEST_PAUSE)
      self._pause = min(max(2 * self._pause, first), _LONGEST_PAUSE)
    asked_seconds = seconds or self._pause
    until = max(self._paused_until, now + min(asked_seconds, self._longest))
    self._counters["throttled"] += 1
    self._counters["throttled_seconds"] += until - max(self._paused_until, now)
    self._paused_until = until
    self._refusal = refusal
    self._refused_until = max(self._refused_until, now + asked_seconds)
    self._check(asked_seconds, limit)

  def _check(self, seconds: float, limit: Limit) -> None:
    if seconds > max(limit.waiting_left, 0.0):
      raise BusyError(
        f"{self._refusal} It asks to wait for {seconds:.6g} seconds, and this "
        f"request may wait for {max(limit.waiting_left, 0.0):.0f} more."
      )

  def waited(self, limit: Limit) -> str:
    """Returns the sentence for a request whose turn did not come."""
    rate = f"{self._rate:g}" if self._rate else "no limit"
    paused = self._counters["throttled_seconds"]
    pauses = (
      f" {paused:.0f} seconds were pauses: {self._refusal}" if paused else ""
    )
    return (
      f"not asked: it waited {limit.spent:.3g} seconds for its turn; calls at "
      f"a time: {self._concurrency}, a second: {rate}.{pauses}"
    )

  def answered(self) -> None:
    """Notes that the service answered, so the next pause is a first one."""
    self._pause = 0.0
