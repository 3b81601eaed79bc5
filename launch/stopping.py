"""One way to stop for every command: save, say so, exit with 75.

SIGINT (Ctrl-C), SIGTERM and SIGHUP (a terminal that was closed) stop a command,
and so does an output that nobody reads any more (`| head`). The command says
so at once, also while it compiles; what it saves is its own affair. It exits
with `RESUME` where the same command resumes. A second signal ends it at once.
A signal that was ignored when the command started stays ignored (`nohup`).
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from absl import logging

# Exit code of a command that the same command resumes: "try again".
RESUME = os.EX_TEMPFAIL
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Seconds in which signals are the same request: `timeout` and service managers
# send one to a process and again to its group, and both the kernel and the
# shell report a terminal that is gone.
_SAME = 1.0
_WORD = re.compile(r"stopping on \w+; it may take up to (\d+) s")
# Seconds for a process that does not say how long it takes, and beyond what it
# said: it ends itself before that.
_SILENT, _MARGIN = 600.0, 30.0
_POLL = 0.1


class StoppedError(SystemExit):
  """A signal ends the command; what it has begun is left in order."""


def _nothing(number: int, frame: Any) -> None:
  """Takes a signal that the listening thread acts on."""


def _end_at_once(number: int) -> None:
  say(f"ended at once on a second {signal.Signals(number).name}")
  os._exit(128 + number)


@contextlib.contextmanager
def heard(
  first: Callable[[int], None],
  again: Callable[[int], None] = _end_at_once,
  *,
  handler: Callable[[int, Any], None] = _nothing,
) -> Iterator[None]:
  """Has signals that ask to stop heard; for the main thread.

  Python runs a signal's handler when the main thread is between two steps of
  Python, which a compilation may keep it from for minutes. The interpreter's
  wakeup descriptor has the number at once, and a thread reads it:
  https://docs.python.org/3/library/signal.html#signal.set_wakeup_fd

  Args:
    first: called once, on that thread, with the first signal's number.
    again: called there with each later one.
    handler: called for each signal in the main thread.
  """
  listening, telling = socket.socketpair()
  telling.setblocking(False)
  heeded = [s for s in _SIGNALS if signal.getsignal(s) is not signal.SIG_IGN]

  def listen() -> None:
    asked = None
    while numbers := listening.recv(64):
      for number in filter(heeded.__contains__, numbers):
        if asked is None:
          asked = time.monotonic()
          first(number)
        elif time.monotonic() - asked > _SAME:
          again(number)

  thread = threading.Thread(target=listen, name="signals", daemon=True)
  thread.start()
  handlers = {number: signal.signal(number, handler) for number in heeded}
  wakeup = signal.set_wakeup_fd(telling.fileno(), warn_on_full_buffer=False)
  try:
    yield
  finally:
    signal.set_wakeup_fd(wakeup)
    for number, before in handlers.items():
      signal.signal(number, before)
    telling.close()  # Ends the thread.
    thread.join(_POLL)
    listening.close()


@contextlib.contextmanager
def command(*, resumes: bool) -> Iterator[None]:
  """Stops whatever runs inside, by a `StoppedError` in the main thread.

  Args:
    resumes: whether the same command resumes.

  Raises:
    SystemExit: with `RESUME`, or the number that a shell gives to a signal.
  """
  asked: list[int] = []

  def stop(number: int, frame: Any) -> None:
    if not asked:
      asked.append(number)
      raise StoppedError(RESUME if resumes else 128 + number)

  keep_output()
  # A task that it is raised in ends with it, which asyncio calls an error.
  logging.get_absl_handler().addFilter(
    lambda record: not record.exc_info or record.exc_info[0] is not StoppedError
  )
  try:
    with heard(_say_stopping, handler=stop):
      yield
  except StoppedError:
    say("stopped; the same command resumes" if resumes else "stopped")
    raise
  finally:
    # While errors of it are still ours.
    sys.stdout.flush()


@contextlib.contextmanager
def saving(
  stop: Callable[[], None], seconds: Callable[[], float]
) -> Iterator[None]:
  """Has a signal call `stop`, which ends what runs inside when it has saved.

  Args:
    stop: called from another thread.
    seconds: how long that may take; the process ends without it after that.
  """

  def give_up() -> None:
    say(
      f"no checkpoint within {allowed:.0f} s (--grace); the same command "
      "resumes from the last one"
    )
    os._exit(RESUME)

  def ask(number: int) -> None:
    nonlocal allowed, timer
    allowed = seconds()
    stop()
    _say_stopping(number, allowed)
    timer = threading.Timer(allowed, give_up)
    timer.daemon = True
    timer.start()

  allowed, timer = 0.0, None
  try:
    with heard(ask):
      yield
  finally:
    if timer is not None:
      timer.cancel()


def _say_stopping(number: int, seconds: float | None = None) -> None:
  lasts = "" if seconds is None else f"; it may take up to {seconds:.0f} s"
  say(f"stopping on {signal.Signals(number).name}{lasts}")


def patience(lines: Sequence[str]) -> float:
  """The seconds that a process which is told to stop may take.

  Args:
    lines: the last ones that it wrote; it says there how long it takes.
  """
  said = _WORD.findall("\n".join(lines))
  return (float(said[-1]) if said else _SILENT) + _MARGIN


def await_end(
  process: subprocess.Popen,
  log: pathlib.Path,
  urged: Callable[[], bool] = lambda: False,
) -> None:
  """Asks a process to stop and waits as long as it says that it takes.

  Args:
    process: a command of this project.
    log: what it writes.
    urged: whether to kill it now.
  """
  if process.poll() is None:
    process.terminate()
  asked = time.monotonic()
  while process.poll() is None:
    lines = log.read_text(errors="replace").splitlines()[-50:]
    if urged() or time.monotonic() - asked > patience(lines):
      process.kill()
    time.sleep(_POLL)


def say(line: str) -> None:
  """Prints a line to the standard error at once."""
  print(line, file=sys.stderr, flush=True)


def keep_output() -> None:
  """Has standard output and error never raise: see `_Output`."""
  for name, descriptor in (("stdout", 1), ("stderr", 2)):
    stream = getattr(sys, name)
    try:
      # Not in tests, which take what a command prints.
      if stream is None or stream.fileno() != descriptor:
        continue
    except OSError:
      continue
    stream.flush()
    kept = io.TextIOWrapper(
      io.BufferedWriter(_Output(descriptor)),
      encoding=stream.encoding,
      errors=stream.errors,
      line_buffering=stream.line_buffering,
    )
    setattr(sys, name, kept)
  logging.get_absl_handler().python_handler.setStream(sys.stderr)


class _Output(io.FileIO):
  """A standard stream whose errors do not end what writes to it.

  Where nobody reads it any more the command is stopped, as by SIGHUP. Where
  the disk behind it is full, lines are dropped: the command has its own files.
  """

  def __init__(self, descriptor: int):
    super().__init__(descriptor, "wb", closefd=False)
    self._failed = False

  def write(self, data: Any) -> int | None:
    try:
      return super().write(data)
    except OSError as error:
      if not self._failed:
        self._failed = True
        self._fail(error)
      return len(data)

  def _fail(self, error: OSError) -> None:
    gone = error.errno in (errno.EPIPE, errno.EIO)
    if gone:
      # What C++ libraries and the interpreter's end write does not fail either:
      # https://docs.python.org/3/library/signal.html#note-on-sigpipe
      with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), self.fileno())
    if self.fileno() == 1:
      then = "nobody reads it any more" if gone else "its lines are dropped"
      say(f"standard output: {error.strerror}; {then}")
    # Not where a command is over, or was told to outlive its terminal.
    if gone and callable(signal.getsignal(signal.SIGHUP)):
      os.kill(os.getpid(), signal.SIGHUP)
