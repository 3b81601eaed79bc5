"""One way to stop for every command: print a line, save, exit with 75.

SIGINT (Ctrl-C), SIGTERM and SIGHUP (a closed terminal) stop a command, and so
does a closed output pipe (`| head`). The command prints a line at once, even
while it compiles, and then saves what it needs. It exits with `RESUME` if the
same command resumes. A second signal ends it at once, with the same exit code.
A signal that was ignored when the command started stays ignored (`nohup`).
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import io
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from absl import logging

from anysearch_jax.host import terminal

if TYPE_CHECKING:
  from _typeshed import ReadableBuffer

# Exit code of a stopped command that can resume: "temporary failure", 75.
RESUME = os.EX_TEMPFAIL
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Signals within this many seconds count as one request: `timeout` and service
# managers signal a process and then its group, and both the kernel and the
# shell report a closed terminal.
_SAME_REQUEST_SECONDS = 1.0
_RESEND_SECONDS = 0.1  # Seconds until a signal that was lost is sent again.
_JOIN_SECONDS = 0.1  # Seconds to wait for the listening thread to end.


class StoppedError(SystemExit):
  """Raised when a signal stops the command, so that cleanup code runs."""


def _end_at_once(number: int, code: int) -> None:
  say(f"ended at once on a second {signal.Signals(number).name}")
  os._exit(code)


def _active_signals() -> list[signal.Signals]:
  """Returns the signals that were not ignored when the command started."""
  return [s for s in _SIGNALS if signal.getsignal(s) is not signal.SIG_IGN]


@contextlib.contextmanager
def on_signals(
  on_first: Callable[[int], None],
  on_later: Callable[[int], None] = lambda number: None,
  *,
  handler: Callable[[int, Any], None] = lambda number, frame: None,
) -> Iterator[None]:
  """Listens for signals that ask to stop; call in the main thread.

  Python runs a signal handler only between two bytecode instructions of the
  main thread, which a compilation can delay for minutes. The wakeup descriptor
  receives the signal's number at once, and a thread reads it:
  https://docs.python.org/3/library/signal.html#signal.set_wakeup_fd

  Args:
    on_first: called once, on that thread, with the first signal's number.
    on_later: called there with each later signal's number.
    handler: called for each signal in the main thread.
  """
  reading_end, writing_end = socket.socketpair()
  writing_end.setblocking(False)
  active_signals = _active_signals()

  def listen() -> None:
    first_time = None
    while numbers := reading_end.recv(64):
      for number in filter(active_signals.__contains__, numbers):
        if first_time is None:
          first_time = time.monotonic()
          on_first(number)
        elif time.monotonic() - first_time > _SAME_REQUEST_SECONDS:
          on_later(number)

  thread = threading.Thread(target=listen, name="signals", daemon=True)
  thread.start()
  handlers = {
    number: signal.signal(number, handler) for number in active_signals
  }
  wakeup = signal.set_wakeup_fd(writing_end.fileno(), warn_on_full_buffer=False)
  try:
    yield
  finally:
    signal.set_wakeup_fd(wakeup)
    for number, previous_handler in handlers.items():
      signal.signal(number, previous_handler)
    writing_end.close()  # Ends the thread.
    thread.join(_JOIN_SECONDS)
    reading_end.close()


@contextlib.contextmanager
def command(*, resumes: bool) -> Iterator[None]:
  """Raises `StoppedError` in the main thread when a signal asks to stop.

  A signal that arrives later, until the process ends, keeps the exit code.

  Raises:
    StoppedError: with exit code `RESUME`, or 128 + signal if not `resumes`.
    SystemExit: the output of a command that does not `resume` was lost.
  """
  signal_numbers: list[int] = []
  code: int | None = None

  def code_of(number: int) -> int:
    return RESUME if resumes else 128 + number

  def stop(number: int, frame: Any) -> None:
    if not signal_numbers:
      signal_numbers.append(number)
      raise StoppedError(code_of(number))

  previous_hook = sys.unraisablehook

  def resend_lost_stop(raised: sys.UnraisableHookArgs) -> None:
    if not isinstance(raised.exc_value, StoppedError):
      previous_hook(raised)
    elif signal_numbers:
      # Python drops exceptions that callbacks raise, such as those of its
      # garbage collector. The signal is sent again while it counts as the same
      # request.
      number = signal_numbers.pop()
      main_thread = threading.main_thread().ident
      resend = threading.Timer(
        _RESEND_SECONDS, signal.pthread_kill, (main_thread, number)
      )
      resend.daemon = True
      resend.start()

  def exit_at_once(number: int) -> None:
    _end_at_once(number, code_of(number))

  def exit_late(number: int, frame: Any) -> None:
    os._exit(code_of(number) if code is None else code)

  keep_output()
  # asyncio would log an error for each task that ends with `StoppedError`.
  logging.get_absl_handler().addFilter(
    lambda record: not record.exc_info or record.exc_info[0] is not StoppedError
  )
  # `on_signals` restores this handler. Python restores the default one after
  # its exit functions, of which this is the last because it registers first.
  for number in _active_signals():
    signal.signal(number, exit_late)
    atexit.register(signal.signal, number, signal.SIG_IGN)
  try:
    sys.unraisablehook = resend_lost_stop
    with on_signals(_say_stopping, exit_at_once, handler=stop):
      try:
        yield
        code = 0
      except BaseException as error:
        exit_code = error.code if isinstance(error, SystemExit) else 1
        code = exit_code if isinstance(exit_code, int) else 1
        raise
  except StoppedError:
    say("stopped; the same command resumes" if resumes else "stopped")
    raise
  finally:
    sys.unraisablehook = previous_hook
    # Flushed here, while `_Output` still handles errors of the stream.
    sys.stdout.flush()
    output = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    if code == 0 and not resumes and getattr(output, "drops", False):
      raise SystemExit(os.EX_IOERR)


@contextlib.contextmanager
def saving(
  stop: Callable[[], None],
  seconds: Callable[[], float],
  resume_sentence: Callable[[], str] = lambda: "The same command resumes.",
) -> Iterator[None]:
  """Calls `stop` on a signal; the code inside then saves and returns.

  Args:
    stop: asks the code inside to save and return; called on another thread.
    seconds: returns the seconds that saving may take; after them the process
      exits.
    resume_sentence: returns a sentence that says from where the command
      resumes.
  """
  allowed_seconds = 0.0
  timer: threading.Timer | None = None

  def give_up() -> None:
    say(
      f"no checkpoint within {allowed_seconds:.0f} s (--grace). "
      f"{resume_sentence()}"
    )
    os._exit(RESUME)

  def ask(number: int) -> None:
    nonlocal allowed_seconds, timer
    allowed_seconds = seconds()
    stop()
    _say_stopping(number, allowed_seconds)
    timer = threading.Timer(allowed_seconds, give_up)
    timer.daemon = True
    timer.start()

  try:
    with on_signals(ask, lambda number: _end_at_once(number, RESUME)):
      yield
  finally:
    if timer is not None:
      timer.cancel()


def _say_stopping(number: int, seconds: float | None = None) -> None:
  lasts = "" if seconds is None else f"; it may take up to {seconds:.0f} s"
  say(f"stopping on {signal.Signals(number).name}{lasts}")


def say(line: str) -> None:
  """Prints a line to standard error at once, without what terminals obey."""
  text = terminal.printable(line, keeps_lines=True)
  print(text, file=sys.stderr, flush=True)


def keep_output() -> None:
  """Keeps writes to standard output and error from raising, even if closed."""
  for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
    if getattr(sys, name) is None:
      null = os.open(os.devnull, os.O_RDWR)
      setattr(sys, name, open(null, mode, closefd=False))
  for name, descriptor in (("stdout", 1), ("stderr", 2)):
    stream = getattr(sys, name)
    with contextlib.suppress(OSError):
      # Tests replace the streams to capture them; leave those alone.
      if stream.fileno() == descriptor:
        stream.flush()
        wrapper = io.TextIOWrapper(
          io.BufferedWriter(_Output(descriptor)),
          encoding=stream.encoding,
          errors=stream.errors,
          line_buffering=stream.line_buffering,
        )
        setattr(sys, name, wrapper)
  logging.get_absl_handler().python_handler.setStream(sys.stderr)


class _Output(io.FileIO):
  """A standard stream whose errors do not raise in the code that writes to it.

  If its pipe or terminal is closed, the command stops as on SIGHUP. If
  its disk is full, lines are dropped (`drops`): the results of commands that
  run for long are in other files.
  """

  def __init__(self, descriptor: int):
    super().__init__(descriptor, "wb", closefd=False)
    self._failed = False
    self.drops = False

  def write(self, data: ReadableBuffer, /) -> int:
    try:
      return super().write(data)
    except OSError as error:
      if not self._failed:
        self._failed = True
        self._fail(error)
      return memoryview(data).nbytes

  def _fail(self, error: OSError) -> None:
    is_closed = error.errno in (errno.EPIPE, errno.EIO)
    self.drops = not is_closed
    if is_closed:
      # Writes of C++ libraries, and those at interpreter exit, must not fail:
      # https://docs.python.org/3/library/signal.html#note-on-sigpipe
      with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), self.fileno())
    if self.fileno() == 1:
      consequence = (
        "nobody reads it any more" if is_closed else "its lines are dropped"
      )
      say(f"standard output: {error.strerror}; {consequence}")
    # Only while `on_signals` is active: not after the command has ended, and
    # not if SIGHUP is ignored (`nohup`).
    if is_closed and callable(signal.getsignal(signal.SIGHUP)):
      os.kill(os.getpid(), signal.SIGHUP)
