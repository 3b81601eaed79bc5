"""Warns when no running episode makes progress, and says what they wait for.

Until its deadline passes, an engine or retriever that hangs looks like one that
works. Progress is a turn or search that ends, or an episode that starts to run.
Tokens inside a turn are not visible here, so one long turn can also cause the
warning. The warning never aborts anything; deadlines do.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

from anysearch_jax import types

_log = logging.getLogger(__name__)

# What an episode waits for. An address: permission to run (max_concurrency).
Request = types.GenerateRequest | types.SearchRequest | types.Address

_STATES = {
  types.GenerateRequest: "a turn",
  types.SearchRequest: "a search",
  types.Address: "a place",
}
_QUERY = 80  # Show at most this many characters: a policy wrote the query.


class _Wait(NamedTuple):
  since: float
  request: Request


class InFlight:
  """Tracks what many episodes of one event loop wait for.

  Args:
    quiet_seconds: warn after this many seconds without progress, and again
      each time the quiet period has doubled. 0 never warns.
    warn: called with the warning.
    clock: a monotonic clock in seconds.
    span: entered while an episode waits for a request, for example to time it.
  """

  def __init__(
    self,
    quiet_seconds: float = 0.0,
    *,
    warn: Callable[[str], None] = _log.warning,
    clock: Callable[[], float] = time.monotonic,
    span: Callable[[Request], contextlib.AbstractContextManager[None]] = (
      lambda request: contextlib.nullcontext()
    ),
  ):
    self._quiet, self._warn, self._clock = quiet_seconds, warn, clock
    self._span = span
    self._waits: dict[object, _Wait] = {}
    # When something last moved, and the quiet seconds of the next warning.
    self._moved, self._due = clock(), quiet_seconds

  @contextlib.contextmanager
  def waiting(self, request: Request) -> Iterator[None]:
    """Marks one episode as waiting for `request` inside the context."""
    key = object()
    self._waits[key] = _Wait(self._clock(), request)
    try:
      with self._span(request):
        yield
    finally:
      del self._waits[key]
      self._move()

  @contextlib.contextmanager
  def watched(self) -> Iterator[None]:
    """Checks for progress on the running event loop inside the context."""
    if not self._quiet > 0:
      yield
      return
    loop = asyncio.get_running_loop()

    timer: asyncio.TimerHandle

    def look() -> None:
      nonlocal timer
      timer = loop.call_later(self.look(), look)

    self._move()
    timer = loop.call_later(self._quiet, look)
    try:
      yield
    finally:
      timer.cancel()

  def look(self) -> float:
    """Warns if the quiet period is over; returns seconds to the next check."""
    now = self._clock()
    quiet = now - self._moved
    if quiet >= self._due:
      self._due = 2 * quiet
      if self._waits:
        self._warn(_sentence(quiet, now, list(self._waits.values())))
    return self._due - quiet

  def _move(self) -> None:
    self._moved, self._due = self._clock(), self._quiet


# Never warns.
OFF = InFlight()


def _sentence(quiet: float, now: float, waits: list[_Wait]) -> str:
  """Returns how many episodes wait for what, and the longest wait."""
  told = []
  for kind, state in _STATES.items():
    since = [wait.since for wait in waits if isinstance(wait.request, kind)]
    if since:
      longest = _seconds(now - min(since))
      told.append(f"{len(since)} waiting for {state} (longest {longest})")
  # Queued episodes are blocked by running ones, so report a running one first.
  oldest = min(
    waits, key=lambda w: (isinstance(w.request, types.Address), w.since)
  )
  return (
    f"Nothing moved for {_seconds(quiet)}; in flight: {', '.join(told)}. The "
    f"oldest: {_named(oldest.request)}."
  )


def _seconds(value: float) -> str:
  return f"{round(value, 1):g} s"


def _named(request: Request) -> str:
  match request:
    case types.SearchRequest(query=query):
      more = "..." if len(query) > _QUERY else ""
      return f"the search for {query[:_QUERY]!r}{more}"
    case types.GenerateRequest(address=address, turn=turn):
      return f"turn {turn} of {address}"
    case _:
      return f"{request}"
