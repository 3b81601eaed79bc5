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
import pathlib
import shlex
import signal
import socket
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping, Sequence

from launch import children, stopping

_POLL = 0.1  # Seconds between polls of the processes.
_PATIENCE = 15.0  # Seconds between lines of a service that is not ready.
_TAIL = 20  # Lines of a log that are shown after a failure.


@dataclasses.dataclass(frozen=True)
class Part:
  """One command.

  Attributes:
    name: prefix of its printed lines, and name of its log: `<name>.log`.
    command: the program and its arguments.
    env: variables that are added to the environment.
    health: URL that answers without error when it is ready; "": ready at once.
    restarts: how often it is restarted if it ends before the main command.
  """

  name: str
  command: tuple[str, ...]
  env: Mapping[str, str] = dataclasses.field(default_factory=dict)
  health: str = ""
  restarts: int = 0

  def shown(self) -> str:
    """Returns the command with its environment, quoted for a shell."""
    words = [f"{name}={shlex.quote(x)}" for name, x in self.env.items()]
    for word in self.command:
      line = "\\\n    " if word.startswith("--") else ""
      words.append(line + shlex.quote(word))
    return " ".join(words)


class PartError(RuntimeError):
  """A part has failed; the message says how."""


def say_at_once(line: str) -> None:
  """Prints a line and flushes, because a pipe would buffer it."""
  print(line, flush=True)


class _SignalError(Exception):
  """A signal asks to stop."""


def run(
  services: Sequence[Part],
  main: Part,
  *,
  logs: pathlib.Path,
  deadline: float,
  grace: float = 30.0,
  every: float = 2.0,
  say: Callable[[str], None] = say_at_once,
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
    say: is called with each line.

  Returns:
    The exit code of `main`, or 128 + the signal that killed it; 1 if a service
    failed; `stopping.RESUME` if a signal arrived before `main` was started.
  """
  logs.mkdir(parents=True, exist_ok=True)
  serving: list[_Running] = []
  mains: list[_Running] = []
  asked, urged = threading.Event(), threading.Event()

  def first(number: int) -> None:
    say(f"stopping everything on {signal.Signals(number).name}")
    asked.set()

  with stopping.heard(first, lambda number: urged.set()):
    try:
      for part in services:
        serving.append(_Running(part, logs, say=say, every=_PATIENCE))
      _await_health(serving, asked, deadline)
      mains.append(_Running(main, logs, say=say, every=every))
      code = _await_end(mains[0], serving, asked)
    except PartError as error:
      say(str(error))
      code = 1
    except _SignalError:
      code = None
    finally:
      for each in mains:
        ended = each.child.code is not None
        _stop(mains, urged, grace=grace if ended else None, say=say)
      _stop(serving, urged, grace=grace, say=say)
    for each in mains if code is None else ():
      code = each.child.code
      each.say(f"ended with code {code} after {each.child.took}")
    return stopping.RESUME if code is None else code


class _Running:
  """A started part, with the lines that are printed of it."""

  def __init__(
    self,
    part: Part,
    logs: pathlib.Path,
    *,
    say: Callable[[str], None],
    every: float,
  ):
    self.part = part
    self.ready = threading.Event()
    self._say = say
    self._every = every
    self._last = ""
    self._shown = time.monotonic()
    if part.health:
      _expect_silence(part)
    log = logs / f"{part.name}.log"
    self.say(f"starts; log: {log}")
    try:
      self.child = children.Child(
        part.command,
        log,
        env=part.env,
        heading=f"$ {part.shown()}\n",
        append=True,
      )
    except OSError as error:
      raise PartError(f"[{part.name}] could not start: {error}.") from error
    if part.health:
      threading.Thread(target=self._await_health, daemon=True).start()
    else:
      self.ready.set()

  def say(self, what: str) -> None:
    self._say(f"[{self.part.name}] {what}")

  def show(self, *, now: bool = False) -> None:
    """Prints the last line of the log, if it is a new one."""
    if not now and time.monotonic() - self._shown < self._every:
      return
    self._shown = time.monotonic()
    last = "".join(self.child.tail(1))
    if last and last != self._last:
      self._last = last
      self.say(last[:200])

  def with_log(self, what: str) -> str:
    """Returns `what` with the end of the log."""
    lines = self.child.tail(_TAIL)
    end = "".join(f"\n  {line}" for line in lines) or " empty."
    return f"{what}; the end of {self.child.log}:{end}"

  def failure(self, what: str) -> PartError:
    return PartError(f"[{self.part.name}] {self.with_log(what)}")

  def again(self) -> _Running:
    """Restarts the part after it ended, with one restart less."""
    left = self.part.restarts
    self.say(
      f"ended with code {self.child.code} after {self.child.took}; it is "
      f"started again, {left} of that left"
    )
    self.child.kill()  # Its children may still hold its port or GPUs.
    part = dataclasses.replace(self.part, restarts=left - 1)
    logs = self.child.log.parent
    return _Running(part, logs, say=self._say, every=self._every)

  def _await_health(self) -> None:
    # Ignore proxies of the environment: the service is on this machine.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    while self.child.code is None:
      with contextlib.suppress(OSError, ValueError):
        opener.open(self.part.health, timeout=30).close()
        self.ready.set()
        return
      time.sleep(_POLL)


def _await_health(
  services: Sequence[_Running], asked: threading.Event, deadline: float
) -> None:
  """Waits until all services have answered."""
  end = time.monotonic() + deadline
  waiting = [each for each in services if each.part.health]
  while waiting:
    time.sleep(_POLL)
    _check(services, asked)
    for each in list(waiting):
      if each.ready.is_set():
        each.say(f"ready after {each.child.took}")
        waiting.remove(each)
      elif time.monotonic() > end:
        raise each.failure(
          f"did not answer {each.part.health} within {deadline:g} seconds"
        )
      else:
        each.show()


def _await_end(
  main: _Running, services: list[_Running], asked: threading.Event
) -> int:
  """Waits for the main command and returns its exit code.

  A service that is restarted meanwhile is replaced in the list.
  """
  while (code := main.child.code) is None:
    for place, each in enumerate(services):
      if (
        each.child.code is not None
        and each.part.restarts
        and not asked.is_set()
      ):
        services[place] = each.again()
    _check(services, asked)
    main.show()
    time.sleep(_POLL)
  if code:
    main.say(main.with_log(f"failed with code {code} after {main.child.took}"))
  else:
    main.show(now=True)
    main.say(f"ended after {main.child.took}")
  return code


def _check(services: Sequence[_Running], asked: threading.Event) -> None:
  """Raises if a signal arrived or a service has ended."""
  if asked.is_set():
    raise _SignalError
  for each in services:
    code = each.child.code
    if code is not None:
      raise each.failure(
        f"ended with code {code} after {each.child.took}, expected it to "
        "serve until the end"
      )


def _stop(
  running: Sequence[_Running],
  urged: threading.Event,
  *,
  grace: float | None,
  say: Callable[[str], None],
) -> None:
  """Stops all parts by SIGTERM, and by SIGKILL after the limit or when urged.

  Args:
    running: the parts to stop.
    urged: set when SIGKILL must be sent at once.
    grace: seconds that stopping may take; None: as long as each says.
    say: is called with each line.
  """

  def show() -> None:
    for each in running:
      each.show()

  killed = children.stop(
    [each.child for each in running],
    limit=children.Child.patience if grace is None else lambda _: grace,
    urged=urged.is_set,
    poll=show,
  )
  for each in running:
    if each.child in killed:
      each.say("did not end by itself; killed")
  if left := [each for each in running if each.child.runs()]:
    names = ", ".join(each.part.name for each in left)
    say(f"not even SIGKILL ended all of {names}; look for their processes")


def _expect_silence(part: Part) -> None:
  """Checks that the port is free: another process could pass for the part.

  Raises:
    PartError: another process listens at the address.
  """
  address = urllib.parse.urlsplit(part.health)
  with contextlib.suppress(OSError):
    socket.create_connection((address.hostname, address.port), 1).close()
    raise PartError(
      f"[{part.name}] found another process at {address.netloc}, expected a "
      "free port; stop that process or choose other ports."
    )
