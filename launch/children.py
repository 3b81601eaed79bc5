"""Child processes: each with a log, stopped with all that it started.

A child runs in a session of its own, so Ctrl-C in a terminal reaches only this
process, which decides in what order its children stop.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence

from launch import progress, stopping

_POLL = 0.1  # Seconds between polls of processes that were asked to stop.
_LEFT_BEHIND = 10.0  # Seconds that killed processes may take to disappear.
_TAIL = 50  # Lines of a log that are searched for what a child announces.


class Child:
  """A running command whose output goes to a log.

  Its children belong to it, except those with a session of their own.

  Args:
    command: the program and its arguments.
    log: file of its output.
    env: variables that are added to the environment.
    heading: text that is written to the log first.
    append: whether to keep what is in the log; `text` and `tail` skip it.

  Raises:
    OSError: the program cannot be started.
  """

  def __init__(
    self,
    command: Sequence[str],
    log: pathlib.Path,
    *,
    env: Mapping[str, str] | None = None,
    heading: str = "",
    append: bool = False,
  ):
    self.log = log
    self._asked: set[bool] = set()
    with log.open("ab" if append else "wb") as file:
      file.write(heading.encode())
      file.flush()
      self._start = file.tell()
      self._process = subprocess.Popen(
        list(command),
        stdin=subprocess.DEVNULL,
        stdout=file,
        stderr=subprocess.STDOUT,
        env={**os.environ, **(env or {})},
        start_new_session=True,
      )
    self._began = time.monotonic()

  @property
  def code(self) -> int | None:
    """The exit code in a shell's convention; None while it runs."""
    code = self._process.poll()
    return code if code is None or code >= 0 else 128 - code

  @property
  def took(self) -> str:
    """The time since its start, in words."""
    return progress.duration(time.monotonic() - self._began)

  def text(self) -> str:
    """Returns its output so far."""
    return self._read(self._start)

  def tail(self, count: int) -> list[str]:
    """Returns its last lines; a CR, as progress bars write it, ends a line."""
    size = self.log.stat().st_size
    text = self._read(max(self._start, size - 400 * count - 4000))
    lines = [line.rstrip() for line in re.split(r"[\r\n]+", text)]
    return list(filter(None, lines))[-count:]

  def patience(self) -> float:
    """Returns the seconds that it says it needs to stop."""
    return stopping.patience(self.tail(_TAIL))

  def runs(self) -> bool:
    """Returns whether it or any process of its group runs."""
    return self._process.poll() is None or _group_runs(self._process.pid)

  def ask_to_end(self) -> None:
    """Sends SIGTERM once to the command and, after it ended, to its children.

    The command comes first, because it may have its own way to end them.
    """
    ended = self._process.poll() is not None
    if ended in self._asked:
      return
    self._asked.add(ended)
    if ended:
      self._signal(signal.SIGTERM)
    else:
      self._process.terminate()

  def kill(self) -> None:
    """Kills all processes of its group and waits until they are gone.

    A process that waits for a device cannot be killed; `runs` is then still
    true after some seconds.
    """
    self._signal(signal.SIGKILL)
    end = time.monotonic() + _LEFT_BEHIND
    while self.runs() and time.monotonic() < end:
      time.sleep(_POLL)

  def _signal(self, number: int) -> None:
    # Check that the group exists: process-group ids can be reused.
    if self.runs():
      with contextlib.suppress(ProcessLookupError):
        os.killpg(self._process.pid, number)

  def _read(self, start: int) -> str:
    with self.log.open("rb") as file:
      file.seek(start)
      return file.read().decode(errors="replace")


def stop(
  children: Sequence[Child],
  *,
  limit: Callable[[Child], float] = Child.patience,
  urged: Callable[[], bool] = lambda: False,
  poll: Callable[[], None] = lambda: None,
) -> list[Child]:
  """Stops children by SIGTERM, and by SIGKILL after the limit or when urged.

  Args:
    children: those to stop; some may have ended.
    limit: returns the seconds that a child may take, as known so far.
    urged: returns whether SIGKILL must be sent at once.
    poll: is called repeatedly while they stop.

  Returns:
    The children that were killed.
  """
  began = time.monotonic()
  killed: list[Child] = []
  while left := [each for each in children if each.runs()]:
    late = time.monotonic() - began
    for each in left:
      if each not in killed and (urged() or late > limit(each)):
        each.kill()
        killed.append(each)
      else:
        each.ask_to_end()
    if all(each in killed for each in left):
      break
    poll()
    time.sleep(_POLL)
  return killed


def _group_runs(group: int) -> bool:
  """Returns whether a process of the group runs; zombies do not count."""
  try:
    os.killpg(group, 0)
  except ProcessLookupError:
    return False
  except PermissionError:
    return True
  stats = list(pathlib.Path("/proc").glob("[0-9]*/stat"))
  for stat in stats:
    with contextlib.suppress(OSError):
      state, _, of = stat.read_text().rpartition(")")[2].split()[:3]
      if int(of) == group and state not in "ZX":
        return True
  return not stats  # Without /proc, the existence of the group must suffice.
