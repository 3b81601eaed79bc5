"""An event loop on a thread of its own, for clients that any loop may use.

Connections belong to the event loop that opened them. A client that keeps its
connections on a loop of its own works from every other loop, and outlives it.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from anysearch_jax import types

T = TypeVar("T")

_CLOSE_SECONDS = 5.0


class OwnLoop:
  """Runs coroutines of a client.

  Args:
    release: called on the loop when it closes, after everything that ran on it
      was cancelled; it has 5 seconds.
  """

  def __init__(self, release: Callable[[], Awaitable[None]]):
    self._release = release
    self._closed = False
    self._lock = threading.Lock()
    self._loop = asyncio.new_event_loop()
    self._thread = threading.Thread(target=self._serve, daemon=True)
    self._thread.start()

  async def wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
    """Awaits a coroutine of this loop from any event loop.

    Cancelling the wait cancels the coroutine.

    Raises:
      RetrievalError: the loop was closed.
    """
    future = self._submit(coroutine)
    try:
      return await asyncio.wrap_future(future)
    except asyncio.CancelledError:
      task = asyncio.current_task()
      if task is not None and task.cancelling():
        raise
      raise types.RetrievalError("The retriever was closed.") from None

  def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine of this loop from outside of any event loop."""
    return self._submit(coroutine).result()

  def close(self) -> None:
    """Cancels what is in progress and ends the thread."""
    with self._lock:
      if self._closed:
        return
      self._closed = True
      ending = asyncio.run_coroutine_threadsafe(self._end(), self._loop)
    # The thread is a daemon, so one that hangs can be abandoned.
    with contextlib.suppress(TimeoutError):
      ending.result(3 * _CLOSE_SECONDS)
    self._loop.call_soon_threadsafe(self._loop.stop)
    self._thread.join(_CLOSE_SECONDS)

  def _submit(
    self, coroutine: Coroutine[Any, Any, T]
  ) -> concurrent.futures.Future[T]:
    # Without the lock, what is submitted beside `close` could wait for ever.
    with self._lock:
      if not self._closed:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)
    coroutine.close()
    raise types.RetrievalError("The retriever was closed.")

  async def _end(self) -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
      task.cancel()
    if others:
      await asyncio.wait(others, timeout=_CLOSE_SECONDS)
    with contextlib.suppress(TimeoutError):
      async with asyncio.timeout(_CLOSE_SECONDS):
        await self._release()

  def _serve(self) -> None:
    self._loop.run_forever()
    self._loop.close()
