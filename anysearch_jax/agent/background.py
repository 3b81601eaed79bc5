"""An event loop on a thread of its own, for callers of any thread and loop."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import threading
import weakref
from collections.abc import Awaitable, Callable
from typing import TypeVar

# Seconds that `close` waits for the work that it cancels.
_PATIENCE = 30.0
_T = TypeVar("_T")


class ClosedError(RuntimeError):
  """The agent is closed, or was closed before the question was answered."""


class Background:
  """Runs coroutines until it is closed or nobody refers to it any more."""

  def __init__(self) -> None:
    self._loop = asyncio.new_event_loop()
    self._thread = threading.Thread(
      target=self._loop.run_forever, name="agent", daemon=True
    )
    self._lock = threading.Lock()
    self._ended = self._closed = False
    self._process = os.getpid()
    self._thread.start()
    weakref.finalize(self, _stop, self._loop)

  def start(
    self, work: Callable[[], Awaitable[_T]]
  ) -> concurrent.futures.Future[_T]:
    """Starts `work`; the future's `cancel` cancels it.

    Raises:
      ClosedError: here, or by the future if `work` is ended.
    """

    async def run() -> _T:
      try:
        return await work()
      except asyncio.CancelledError:
        if not self._ended:
          raise
        # Otherwise a caller's own task would look cancelled.
        raise ClosedError(
          "The agent was closed before the answer; load another one."
        ) from None

    if os.getpid() != self._process:
      raise ClosedError(
        "The agent was made in another process; load one in this process."
      )
    with self._lock:
      if self._ended:
        raise ClosedError("The agent is closed; load another one.")
      return asyncio.run_coroutine_threadsafe(run(), self._loop)

  def end(self) -> None:
    """Refuses new work, and ends what is under way; see `start`."""
    with self._lock:
      if not self._ended:
        self._ended = True
        asyncio.run_coroutine_threadsafe(_cancel_all(), self._loop)

  def close(self, release: Callable[[], None]) -> None:
    """Ends all work and the thread, then calls `release`.

    Later calls do nothing, nor does one in a forked process, which has neither
    the thread nor what is to be released.
    """
    if os.getpid() != self._process:
      return
    with self._lock:
      if self._closed:
        return
      self._closed = self._ended = True
      ending = asyncio.run_coroutine_threadsafe(_cancel_all(), self._loop)
    try:
      ending.result(_PATIENCE)
    finally:
      _stop(self._loop)
      self._thread.join(_PATIENCE)
      if not self._thread.is_alive():
        self._loop.close()
      release()


def _stop(loop: asyncio.AbstractEventLoop) -> None:
  with contextlib.suppress(RuntimeError):  # The loop is closed.
    loop.call_soon_threadsafe(loop.stop)


async def _cancel_all() -> None:
  """Cancels all other tasks of the running loop and waits for them."""
  tasks = asyncio.all_tasks() - {asyncio.current_task()}
  for task in tasks:
    task.cancel()
  await asyncio.gather(*tasks, return_exceptions=True)
