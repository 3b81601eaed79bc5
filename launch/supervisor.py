"""Runs several commands as one: starts, watches and stops them together.

Services start first. When all of them answer, the main command starts; when it
ends, everything ends. Each command writes to its own log, and one line is
printed whenever something changes. A stop is passed on to the main command,
which may need its services while it saves, so they are stopped only after it
has ended, however long it says that it needs. A command is stopped together
with all processes that it started, except those with a session of their own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import pathlib
import re
import shlex
import signal
import socket
import subprocess
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from anysearch_jax.launch import progress, stopping

_POLL = 0.1  # Seconds between polls of the processes.
_PATIENCE = 15.0  # Seconds between lines of a service that is not ready.
_ASKED = 5.0  # Seconds for one of several other machines to answer.
_TAIL = 20  # Lines of a log that are shown after a failure.
_LEFT_BEHIND = 10.0  # Seconds that killed processes may take to disappear.
_ANNOUNCED = 50  # Lines of a log that are searched for what a child announces.


@dataclasses.dataclass(frozen=True)
class Part:
  """One command.

  Attributes:
    name: prefix of its printed lines, and name of its log: `<name>.log`.
    command: the program and its arguments.
    env: variables that are added to the environment.
    health: URL that answers without error when it is ready; "": ready at once.
    restarts: how often it is restarted if it ends before the main command.
    ends: whether it may end before the main command, with 0 or `RESUME`.
    needs: URLs, also of other machines; one answers before it is started.
  """

  name: str
  command: tuple[str, ...]
  env: Mapping[str, str] = dataclasses.field(default_factory=dict)
  health: str = ""
  restarts: int = 0
  ends: bool = False
  needs: tuple[str, ...] = ()

  def shown(self) -> str:
    """Returns the command with its environment, quoted for a shell."""
    words = [f"{name}={shlex.quote(x)}" for name, x in self.env.items()]
    for word in self.command:
      line = "\\\n    " if word.startswith("--") else ""
      words.append(line + shlex.quote(word))
    return " ".join(words)


class PartError(RuntimeError):
  """A part has failed; the message says how."""


class _SignalError(Exception):
  """A signal asks to stop."""


_say = functools.partial(print, flush=True)  # A pipe would buffer it.


def run(
  services: Sequence[Part],
  main: Part,
  *,
  logs: pathlib.Path,
  deadline: float,
  grace: float = 30.0,
  every: float = 2.0,
) -> int:
  """Runs `main` beside its services, and stops them all whatever happens.

  A signal stops everything, see `stopping`; a second signal kills what is left.

  Args:
    services: the commands that the main command needs.
    main: the main command; when it ends, everything is stopped.
    logs: folder of the logs; an existing log is appended to.
    deadline: seconds within which all services must answer.
    grace: seconds between SIGTERM and SIGKILL of a service; the main command
      has as many as it asks for.
    every: seconds between printed lines of the main command.

  Returns the exit code of `main`, or 128 + the signal that killed it; 1 if a
  service failed; `stopping.RESUME` if a signal arrived before `main` was
  started.
  """
  logs.mkdir(parents=True, exist_ok=True)
  serving: list[Running] = []
  mains: list[Running] = []
  asked, urged = threading.Event(), threading.Event()

  def first(number: int) -> None:
    _say(f"stopping everything on {signal.Signals(number).name}")
    asked.set()

  def end(running: Sequence[Running], limit: Callable[[Child], float]) -> None:
    def show() -> None:
      for each in running:
        each.show()

    for each in stop(running, limit=limit, urged=urged.is_set, poll=show):
      each.say("did not end by itself; killed")
    if left := ", ".join(each.part.name for each in running if each.runs()):
      _say(f"not even SIGKILL ended all of {left}; look for their processes")

  with stopping.heard(first, lambda number: urged.set()):
    try:
      for part in services:
        _await_others(part, asked, deadline)
        serving.append(Running(part, logs, _PATIENCE))
      _await_health(serving, asked, deadline)
      mains.append(Running(main, logs, every))
      code = _await_end(mains[0], serving, asked)
    except PartError as error:
      _say(str(error))
      code = 1
    except _SignalError:
      code = None
    finally:
      ended = any(each.code is not None for each in mains)
      end(mains, (lambda _: grace) if ended else Child.patience)
      end(serving, lambda _: grace)
    for each in mains if code is None else ():
      code = each.code
      each.say(f"ended with code {code} after {each.took}")
    return stopping.RESUME if code is None else code


def _await_others(part: Part, asked: threading.Event, deadline: float) -> None:
  """Waits until one of those that a part needs has answered."""
  end, needs, said = time.monotonic() + deadline, part.needs, False
  while needs and not any(_answers(url, _ASKED) for url in needs):
    among = f"one of {', '.join(needs)}"
    if not said:
      _say(f"[{part.name}] waits for {among}")
    said = True
    if time.monotonic() > end:
      raise PartError(
        f"[{part.name}] {among} did not answer within {deadline:g} seconds; "
        "look at the logs of those machines."
      )
    if asked.wait(1.0):
      raise _SignalError


def _await_health(
  services: Sequence[Running], asked: threading.Event, deadline: float
) -> None:
  """Waits until all services have answered."""
  end = time.monotonic() + deadline
  waiting = [each for each in services if each.part.health]
  while waiting:
    time.sleep(_POLL)
    _check(services, asked)
    for each in list(waiting):
      if each.ready.is_set():
        each.say(f"ready after {each.took}")
        waiting.remove(each)
      elif time.monotonic() > end:
        raise each.failure(
          f"did not answer {each.part.health} within {deadline:g} seconds"
        )
      else:
        each.show()


def _await_end(
  main: Running, services: list[Running], asked: threading.Event
) -> int:
  """Waits for the main command and returns its exit code.

  A service that is restarted meanwhile is replaced in the list.
  """
  while (code := main.code) is None:
    for place, each in enumerate(services):
      if each.failed and each.part.restarts and not asked.is_set():
        services[place] = each.again()
    _check(services, asked)
    main.show()
    time.sleep(_POLL)
  if code:
    main.say(main.with_log(f"failed with code {code} after {main.took}"))
  else:
    main.show(now=True)
    main.say(f"ended after {main.took}")
  return code


def _check(services: Sequence[Running], asked: threading.Event) -> None:
  """Raises if a signal arrived or a service has ended."""
  if asked.is_set():
    raise _SignalError
  for each in services:
    if each.failed:
      raise each.failure(
        f"ended with code {each.code} after {each.took}, expected it to serve "
        "until the end"
      )


class Child:
  """A running command whose output goes to a log.

  Its children belong to it, except those with a session of their own. `env` is
  added to the environment, and `heading` is written to the log first. With
  `append` the log is kept; `text` and `tail` skip what was in it.

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
    return stopping.patience(self.tail(_ANNOUNCED))

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

    Those that wait for a device cannot be killed; `runs` is then still true.
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


_C = TypeVar("_C", bound=Child)


def stop(
  children: Sequence[_C],
  *,
  limit: Callable[[Child], float] = Child.patience,
  urged: Callable[[], bool] = lambda: False,
  poll: Callable[[], None] = lambda: None,
) -> list[_C]:
  """Stops children by SIGTERM, and by SIGKILL after the limit or when urged.

  `limit` returns the seconds that a child may take, as known so far, and
  `urged` whether SIGKILL must be sent at once. `poll` is called meanwhile.
  Returns the children that were killed.
  """
  began = time.monotonic()
  killed: list[_C] = []
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


class Running(Child):
  """A started part, with the lines that are printed of it.

  Raises:
    PartError: it cannot be started, or its port is another process's, which
      could pass for it.
  """

  def __init__(self, part: Part, logs: pathlib.Path, every: float = 2.0):
    self.part = part
    self.ready = threading.Event()
    self._every = every
    self._last, self._shown = "", time.monotonic()
    address = urllib.parse.urlsplit(part.health)
    if address.hostname:
      with contextlib.suppress(OSError):
        socket.create_connection((address.hostname, address.port), 1).close()
        raise PartError(
          f"[{part.name}] found another process at {address.netloc}, expected "
          "a free port; stop that process or choose other ports."
        )
    log = logs / f"{part.name}.log"
    self.say(f"starts; log: {log}")
    heading = f"$ {part.shown()}\n"
    try:
      super().__init__(
        part.command, log, env=part.env, heading=heading, append=True
      )
    except OSError as error:
      raise PartError(f"[{part.name}] could not start: {error}.") from error
    if part.health:
      threading.Thread(target=self._await_health, daemon=True).start()
    else:
      self.ready.set()

  @property
  def failed(self) -> bool:
    """Whether it ended, although it should not have."""
    well = (None, 0, stopping.RESUME) if self.part.ends else (None,)
    return self.code not in well

  def say(self, what: str) -> None:
    _say(f"[{self.part.name}] {what}")

  def show(self, *, now: bool = False) -> None:
    """Prints the last line of the log, if it is a new one."""
    if not now and time.monotonic() - self._shown < self._every:
      return
    self._shown = time.monotonic()
    last = "".join(self.tail(1))
    if last and last != self._last:
      self._last = last
      self.say(last[:200])

  def with_log(self, what: str) -> str:
    """Returns `what` with the end of the log."""
    end = "".join(f"\n  {line}" for line in self.tail(_TAIL)) or " empty."
    return f"{what}; the end of {self.log}:{end}"

  def failure(self, what: str) -> PartError:
    return PartError(f"[{self.part.name}] {self.with_log(what)}")

  def again(self) -> Running:
    """Restarts the part after it ended, with one restart less."""
    left = self.part.restarts
    self.say(
      f"ended with code {self.code} after {self.took}; it is started again, "
      f"{left} of that left"
    )
    self.kill()  # Its children may still hold its port or GPUs.
    part = dataclasses.replace(self.part, restarts=left - 1)
    return Running(part, self.log.parent, self._every)

  def _await_health(self) -> None:
    while self.code is None:
      if _answers(self.part.health):
        self.ready.set()
        return
      time.sleep(_POLL)


def _answers(url: str, seconds: float = 30.0) -> bool:
  """Returns whether a service of this machine or of its cluster answers."""
  # So proxies of the environment are ignored.
  opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
  with contextlib.suppress(OSError, ValueError):
    opener.open(url, timeout=seconds).close()
    return True
  return False


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
