"""The event loop of this process: one thread, in which everything waits.

Connections and locks belong to the event loop that first uses them, so a run
has one loop from its first rollout to its last. Engines, retrievers, episodes
and agents wait in it; other threads (training, a command, a notebook) start
work in it and wait for its end. It begins with the first work.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextlib
import copy
import functools
import os
import threading
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, Generic, ParamSpec, TypeVar

T = TypeVar("T")
Q = TypeVar("Q")
P = ParamSpec("P")
E = TypeVar("E", bound=BaseException)

# Seconds that cancelled work has for its clean-up; then it is abandoned.
_CLEANUP_SECONDS = 30.0


class Scope:
  """Work of one owner, who can stop all of it. Thread-safe.

  Args:
    stopped: returns an error: the one that new work raises after `stop`, and
      the one that the result of work raises if `stop` ended it.
  """

  def __init__(self, stopped: Callable[[], BaseException]):
    self.error = stopped
    self.is_stopped = False
    self.works: set[Work] = set()
    self.lock = threading.Lock()

  def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine as the function `run` does; see the class for errors."""
    return Work(coroutine, self).wait()

  def stop(self) -> list[Work]:
    """Cancels all work and refuses more; returns what it cancelled."""
    with self.lock:
      self.is_stopped = True
      return [work for work in list(self.works) if work.cancel()]


class Work(concurrent.futures.Future, Generic[T]):
  """A coroutine that starts in the loop; may be made in any thread.

  Unlike other futures, it is done only when the coroutine is: `result` waits
  for the clean-up of cancelled work, and then raises `CancelledError`, or the
  error of a scope that was stopped.
  """

  def __init__(
    self, coroutine: Coroutine[Any, Any, T], scope: Scope | None = None
  ):
    super().__init__()
    self._loop = _loop_thread().loop
    self._task: asyncio.Task[T] | None = None
    self._scope = scope or Scope(asyncio.CancelledError)
    with self._scope.lock:
      if self._scope.is_stopped:
        coroutine.close()
        raise self._scope.error()
      self._loop.call_soon_threadsafe(self._begin, coroutine)
      self._scope.works.add(self)
    self.add_done_callback(self._scope.works.discard)

  def cancel(self) -> bool:
    """Cancels the coroutine; may be called from any thread."""
    if not self.done():
      self._loop.call_soon_threadsafe(self._cancel)
    return not self.done()

  def wait(self) -> T:
    """Returns the result; an interrupt of this thread cancels the coroutine."""
    try:
      return self.result()
    except BaseException:
      if self.cancel():
        concurrent.futures.wait([self], _CLEANUP_SECONDS)
      raise

  def _begin(self, coroutine: Coroutine[Any, Any, T]) -> None:
    self._task = self._loop.create_task(coroutine)
    self._task.add_done_callback(self._end)

  def _cancel(self) -> None:
    assert self._task is not None  # `_begin` was called before.
    # Not before its first step, which would leave it without a clean-up.
    self._loop.call_soon(self._task.cancel)

  def _end(self, task: asyncio.Task[T]) -> None:
    if task.cancelled() and self._scope.is_stopped:
      self.set_exception(self._scope.error())
    elif task.cancelled():
      super().cancel()
      self.set_running_or_notify_cancel()
    elif error := task.exception():
      self.set_exception(error)
    else:
      self.set_result(task.result())


class _Thread(threading.Thread):
  """The thread of the loop."""

  def __init__(self) -> None:
    # A daemon, so that a call that hangs in it does not keep the process alive.
    super().__init__(name="event loop", daemon=True)
    self.loop = asyncio.new_event_loop()
    self.process = os.getpid()
    self.start()

  def run(self) -> None:
    while True:
      try:
        self.loop.run_forever()
      except (KeyboardInterrupt, SystemExit):
        # Raised by a task, which holds it for whoever waits for the task.
        continue


_lock = threading.Lock()
_thread: _Thread | None = None


def _loop_thread() -> _Thread:
  """Returns the thread; a forked process has lost that of its parent."""
  global _thread
  with _lock:
    if _thread is None or _thread.process != os.getpid():
      _thread = _Thread()
    return _thread


def run(coroutine: Coroutine[Any, Any, T]) -> T:
  """Runs a coroutine in the loop and returns its result.

  An interrupt of the waiting thread, such as Ctrl-C, cancels the coroutine, and
  is raised after the coroutine's clean-up.

  Raises:
    RuntimeError: the caller is in the loop, which would wait for itself.
  """
  if is_loop_thread():
    coroutine.close()
    raise RuntimeError(
      "Found a call in the event loop that would wait for the loop itself; "
      "await the coroutine."
    )
  return Work(coroutine).wait()


async def wait(coroutine: Coroutine[Any, Any, T]) -> T:
  """Awaits a coroutine of the loop, here or in any other event loop."""
  if is_loop_thread():
    return await coroutine
  return await asyncio.wrap_future(Work(coroutine))


async def shared(future: asyncio.Future[T]) -> T:
  """Awaits a future of several waiters, none of which disturbs the others.

  Cancelling a waiter does not cancel the future, and an error is raised as an
  exception of this waiter alone.

  Raises:
    Exception: the future's error, see `error_for_waiter`.
  """
  await asyncio.wait([future])
  if not future.cancelled():
    error = future.exception()
    if error is not None:
      raise error_for_waiter(error)
  return future.result()


def error_for_waiter(error: E) -> E:
  """Returns an equal exception for one of several waiters.

  One object that is raised in many waiters collects the traceback of each, and
  a waiter that changes it changes it for all.
  """
  kind = type(error)
  if kind.__module__ == "builtins":
    error_copy = copy.copy(error)
  else:
    # Its `__init__` may take other arguments than those that it stored.
    error_copy = kind.__new__(kind, *error.args)
    error_copy.__dict__.update(error.__dict__)
  error_copy.__cause__ = error.__cause__
  error_copy.__context__ = error.__context__
  error_copy.__suppress_context__ = error.__suppress_context__
  return error_copy.with_traceback(error.__traceback__)


def inside(
  method: Callable[P, Coroutine[Any, Any, T]],
) -> Callable[P, Coroutine[Any, Any, T]]:
  """Makes an async method run in the loop, wherever it is awaited."""

  @functools.wraps(method)
  async def run(*args: P.args, **kwargs: P.kwargs) -> T:
    return await wait(method(*args, **kwargs))

  return run


def thread_safe_put(items: asyncio.Queue[Q]) -> Callable[[Q], None]:
  """Returns a thread-safe function that adds to a queue of the running loop."""
  reader_loop = asyncio.get_running_loop()

  def put(item: Q) -> None:
    with contextlib.suppress(RuntimeError):  # The reader's loop is closed.
      reader_loop.call_soon_threadsafe(items.put_nowait, item)

  return put


def wait_for_cleanup(works: Iterable[Work]) -> None:
  """Waits for the clean-up of cancelled work, at most 30 seconds."""
  if not is_loop_thread():
    concurrent.futures.wait(works, _CLEANUP_SECONDS)


def is_loop_thread() -> bool:
  """Returns whether the calling thread is that of the loop."""
  return threading.current_thread() is _thread


@atexit.register
def _end_all() -> None:
  """Cancels what is left when the process ends, as `asyncio.run` does."""

  async def cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
      task.cancel()
    if others:
      await asyncio.wait(others, timeout=_CLEANUP_SECONDS)

  if _thread is not None and _thread.process == os.getpid():
    concurrent.futures.wait([Work(cancel_others())], _CLEANUP_SECONDS)
