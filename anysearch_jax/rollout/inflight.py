"""What the episodes under way wait for, said when nothing moves.

An engine or a retriever that hangs looks like one that works until deadlines
pass. A move is a turn or a search that ends, or an episode that gets its place:
how far a turn has come is not seen here.
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

# What is waited for: a turn, a search, or a place among those that may run.
Request = types.GenerateRequest | types.SearchRequest | types.Address

_STATES = {
  types.GenerateRequest: "a turn",
  types.SearchRequest: "a search",
  types.Address: "a place",
}
_QUERY = 80  # Characters of a query that are shown; a policy wrote it.


class _Wait(NamedTuple):
  since: float
  request: Request


class InFlight:
  """The waits of many episodes; of one event loop at a time.

  Args:
    quiet_seconds: so long nothing moves before it is said; if it lasts, again
      after twice as long, and so on. 0: never.
    warn: is told the sentence.
    clock: seconds that only grow.
  """

  def __init__(
    self,
    quiet_seconds: float = 0.0,
    *,
    warn: Callable[[str], None] = _log.warning,
    clock: Callable[[], float] = time.monotonic,
  ):
    self._quiet, self._warn, self._clock = quiet_seconds, warn, clock
    self._waits: dict[object, _Wait] = {}
    self._move()

  @contextlib.contextmanager
  def waiting(self, request: Request) -> Iterator[None]:
    """One episode's wait for the answer to a request, or for its place."""
    if not self._quiet > 0:
      yield
      return
    key = object()
    self._waits[key] = _Wait(self._clock(), request)
    try:
      yield
    finally:
      del self._waits[key]
      self._move()

  @contextlib.contextmanager
  def watched(self) -> Iterator[None]:
    """Looks from time to time, while the running event loop goes on."""
    if not self._quiet > 0:
      yield
      return
    loop = asyncio.get_running_loop()

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
    """Warns if nothing has moved for long; seconds until the next look."""
    now = self._clock()
    quiet = now - self._moved
    if quiet >= self._due:
      self._due = 2 * quiet
      if self._waits:
        self._warn(_sentence(quiet, now, list(self._waits.values())))
    return self._due - quiet

  def _move(self) -> None:
    self._moved, self._due = self._clock(), self._quiet


# Watches nothing.
OFF = InFlight()


def _sentence(quiet: float, now: float, waits: list[_Wait]) -> str:
  """How many wait for what, and which of them has waited longest."""
  told = []
  for kind, state in _STATES.items():
    since = [wait.since for wait in waits if isinstance(wait.request, kind)]
    if since:
      longest = _seconds(now - min(since))
      told.append(f"{len(since)} waiting for {state} (longest {longest})")
  # Who waits for a place waits for those that have one.
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
