"""A progress line: items done, their rate, and the time left."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

_LINE_SECONDS = 2.0  # Between printed lines.


class Line:
  """Prints `done/total unit, rate, time left` every two seconds at most."""

  def __init__(self, total: int, unit: str):
    self._total = total
    self._unit = unit
    self._started_at = time.monotonic()
    self._first_done: int | None = None
    self._printed_at = float("-inf")
    self._done = 0

  def tick(self, done: int, note: str = "") -> None:
    """Reports that `done` items are done; always prints the last one."""
    now = time.monotonic()
    self._done = done
    if self._first_done is None:
      # A resumed run starts in the middle, and the first item compiles, so the
      # rate counts from here.
      self._first_done = done
      self._started_at = now
    if now - self._printed_at < _LINE_SECONDS and done < self._total:
      return
    self._print(now, note)

  @contextlib.contextmanager
  def reporting_waits(
    self,
    waits: Callable[[], str],
    every: float = 10.0,
    *,
    compiles: bool = True,
  ) -> Iterator[None]:
    """Prints why the work waits, each `every` seconds, in the `with` block.

    Until the first item is done, it also says how long that takes.

    Args:
      waits: returns the reason, or "" if there is none; called in another
        thread.
      every: seconds between two lines.
      compiles: whether the first item compiles programs, which is said.
    """
    finished = threading.Event()

    def tell() -> None:
      while not finished.wait(every):
        now = time.monotonic()
        reason = waits()
        if self._first_done is None and not reason:
          elapsed = duration(now - self._started_at)
          work = "the first one also compiles programs, " if compiles else ""
          reason = f"{work}{elapsed} so far"
        if reason:
          self._print(now, reason)

    threading.Thread(target=tell, name="progress", daemon=True).start()
    try:
      yield
    finally:
      finished.set()

  def _print(self, now: float, note: str) -> None:
    self._printed_at = now
    line = f"{self._unit} {self._done}/{self._total}"
    if done_since_first := self._done - (self._first_done or 0):
      rate = done_since_first / max(now - self._started_at, 1e-9)
      seconds_left = (self._total - self._done) / rate
      line += f"  {rate:.1f}/s  {duration(seconds_left)} left"
    print(f"{line}  {note}".rstrip(), flush=True)


def duration(seconds: float) -> str:
  """Formats seconds as minutes and seconds, such as 3:07."""
  minutes, rest_seconds = divmod(round(seconds), 60)
  return f"{minutes}:{rest_seconds:02d}"
