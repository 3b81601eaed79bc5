"""The event loop of a process: results, interruptions, other loops, ends."""

from __future__ import annotations

import asyncio
import concurrent.futures
import signal

import httpx2
import pytest
import source_tree

from anysearch_jax import types
from anysearch_jax.host import http_calls, loop


@pytest.fixture
def ended():
  return []


async def cleaned(ended, *, begun=None, seconds=60.0):
  """Waits; its clean-up takes a moment and is then noted."""
  if begun is not None:
    begun.set_result(None)
  try:
    await asyncio.sleep(seconds)
    return seconds
  finally:
    await asyncio.sleep(0.05)
    ended.append(1)


def test_result_comes_back_to_a_thread_and_to_another_loop(ended):
  assert loop.run(cleaned(ended, seconds=0.0)) == 0.0
  assert asyncio.run(loop.wait(cleaned(ended, seconds=0.0))) == 0.0
  with pytest.raises(ZeroDivisionError):
    loop.run(asyncio.to_thread(lambda: 1 / 0))


def test_cancelled_work_is_done_after_its_clean_up(ended):
  begun = concurrent.futures.Future()
  work = loop.Work(cleaned(ended, begun=begun))
  begun.result(10)
  assert work.cancel()
  with pytest.raises(concurrent.futures.CancelledError):
    work.result(10)
  assert ended == [1] and not work.cancel()


def test_interrupt_of_the_waiting_thread_cancels_first(ended):
  def interrupt(*_):
    raise KeyboardInterrupt

  before = signal.signal(signal.SIGALRM, interrupt)
  signal.setitimer(signal.ITIMER_REAL, 0.1)
  try:
    with pytest.raises(KeyboardInterrupt):
      loop.run(cleaned(ended))
  finally:
    signal.signal(signal.SIGALRM, before)
  assert ended == [1]


def test_exit_raised_in_work_leaves_the_loop_running(ended):
  async def leave():
    raise SystemExit(4)

  with pytest.raises(SystemExit):
    loop.run(leave())
  assert loop.run(cleaned(ended, seconds=0.0)) == 0.0


def test_waiting_for_the_loop_inside_it_is_an_error():
  async def inside():
    return loop.run(asyncio.sleep(0))

  with pytest.raises(RuntimeError, match="await the coroutine"):
    loop.run(inside())


def test_work_that_is_left_is_cancelled_when_the_process_ends():
  code = (
    "import asyncio\n"
    "from anysearch_jax.host import loop\n"
    "async def work():\n"
    "  try:\n"
    "    await asyncio.sleep(60)\n"
    "  finally:\n"
    "    print('cleaned', flush=True)\n"
    "loop.Work(work())\n"
    "loop.run(asyncio.sleep(0))\n"
  )
  done = source_tree.python("-c", code, timeout=60, check=True)
  assert done.stdout == "cleaned\n"


def test_a_client_that_does_not_close_is_left_behind(monkeypatch):
  ended = []

  async def hang(_):
    await asyncio.sleep(30)
    ended.append(1)

  monkeypatch.setattr(http_calls, "_CLOSE_SECONDS", 0.1)
  monkeypatch.setattr(httpx2.AsyncClient, "aclose", hang)
  caller = http_calls.Caller(secret="", advice="")
  caller.close()
  caller.close()  # Once more does nothing.
  assert not ended


class _TwoArgumentsError(RuntimeError):
  def __init__(self, name, *, status):
    super().__init__(f"{name} failed with {status}.")
    self.status = status


@pytest.mark.parametrize(
  "error",
  [
    _TwoArgumentsError("it", status=3),
    FileNotFoundError(2, "No such file", "a.json"),
    UnicodeDecodeError("utf-8", b"x", 0, 1, "bad"),
    KeyError("name"),
    types.RetrievalError("Late."),
  ],
)
def test_each_waiter_of_a_future_raises_an_equal_exception_of_its_own(error):
  async def run():
    future = asyncio.get_running_loop().create_future()
    waiters = [loop.shared(future) for _ in range(3)]
    tasks = [asyncio.create_task(waiter) for waiter in waiters]
    await asyncio.sleep(0)
    tasks[0].cancel()
    future.set_exception(error)
    return await asyncio.gather(*tasks, return_exceptions=True)

  cancelled, *errors = asyncio.run(run())
  assert isinstance(cancelled, asyncio.CancelledError)
  assert len({id(error), *map(id, errors)}) == 3
  for raised in errors:
    assert type(raised) is type(error) and str(raised) == str(error)
    assert raised.args == error.args and vars(raised) == vars(error)
  assert error.__traceback__ is None
