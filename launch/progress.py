"""A progress line: what is done, how fast, and the time left."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

_EVERY = 2.0  # Seconds between printed lines.


class Line:
  """Prints `done/total unit, rate, time left` every two seconds at most."""

  def __init__(self, total: int, unit: str):
    self._total = total
    self._unit = unit
    self._started = time.monotonic()
    self._first: int | None = None
    self._printed = float("-inf")
    self._done = 0

  def tick(self, done: int, note: str = "") -> None:
    """Reports that `done` items are done; always prints the last one."""
    now = time.monotonic()
    self._done = done
    if self._first is None:
      # A resumed run starts in the middle, and the first item compiles, so the
      # rate counts from here.
      self._first, self._started = done, now
    if now - self._printed < _EVERY and done < self._total:
      return
    self._print(now, note)

  @contextlib.contextmanager
  def telling(
    self, waits: Callable[[], str], every: float = 10.0
  ) -> Iterator[None]:
    """Prints what the work waits for, each `every` seconds, inside.

    `waits` returns it, or "", in another thread. Until the first item is done,
    it also says that programs are compiled.
    """
    ended = threading.Event()

    def tell() -> None:
      while not ended.wait(every):
        now, said = time.monotonic(), waits()
        if self._first is None and not said:
          took = duration(now - self._started)
          said = f"the first one also compiles programs, {took} so far"
        if said:
          self._print(now, said)

    threading.Thread(target=tell, name="progress", daemon=True).start()
    try:
      yield
    finally:
      ended.set()

  def _print(self, now: float, note: str) -> None:
    self._printed = now
    line = f"{self._unit} {self._done}/{self._total}"
    if made := self._done - (self._first or 0):
      rate = made / max(now - self._started, 1e-9)
      left = (self._total - self._done) / rate
      line += f"  {rate:.1f}/s  {duration(left)} left"
    print(f"{line}  {note}".rstrip(), flush=True)


def duration(seconds: float) -> str:
  """Formats seconds as minutes and seconds, such as 3:07."""
  minutes, rest = divmod(round(seconds), 60)
  return f"{minutes}:{rest:02d}"
