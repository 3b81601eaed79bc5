"""Runs several commands of one machine: starts, watches and stops them.

Services start first. When all of them answer, the main command starts; when it
ends, everything ends. Each command writes to its own log, and one line is
printed whenever something changes. A stop is passed on to the main command,
which may need its services while it saves, so they are stopped only after it
has ended, which may take an hour. Processes that a command leaves behind are
killed, except those with a session of their own.
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
from collections.abc import Iterator, Mapping, Sequence

import httpx2

from anysearch_jax.launch import progress, stopping

_POLL_SECONDS = 0.1  # Between polls of the processes.
_SHOW_SECONDS = 5.0  # Between the printed lines of a part.
_ANSWER_SECONDS = 5.0  # For an answer to a health check.
_TAIL_LINES = 20  # Of a log, shown after a failure.
_KILL_SECONDS = 2.0  # That killed processes may take to disappear.
# Seconds that a main command may take to save. The trainer ends before, because
# it has a limit of its own (`launch.train --grace`).
_SAVE_SECONDS = 3600.0


@dataclasses.dataclass(frozen=True)
class Part:
  """One command.

  Attributes:
    name: prefix of its printed lines, and name of its log: `<name>.log`.
    command: the program and its arguments.
    env: variables that are added to the environment.
    health: URL that answers without error when it is ready; "": ready at once.
    restarts: limit on its restarts, if it ends before the main command.
  """

  name: str
  command: tuple[str, ...]
  env: Mapping[str, str] = dataclasses.field(default_factory=dict)
  health: str = ""
  restarts: int = 0

  def shell_text(self) -> str:
    """Returns the command with its environment, quoted for a shell."""
    words = [f"{name}={shlex.quote(x)}" for name, x in self.env.items()]
    for word in self.command:
      line = "\\\n    " if word.startswith("--") else ""
      words.append(line + shlex.quote(word))
    return " ".join(words)


class PartError(RuntimeError):
  """A part has failed; the message says how."""


_say = functools.partial(print, flush=True)  # A pipe would buffer it.


@contextlib.contextmanager
def stop_events() -> Iterator[tuple[threading.Event, threading.Event]]:
  """Yields two events: a signal asks to stop, and a later one to kill."""
  stop_event = threading.Event()
  kill_event = threading.Event()

  def first(number: int) -> None:
    _say(f"stopping everything on {signal.Signals(number).name}")
    stop_event.set()

  with stopping.on_signals(first, lambda number: kill_event.set()):
    yield stop_event, kill_event


def run(
  services: Sequence[Part],
  main: Part,
  *,
  logs: pathlib.Path,
  deadline: float,
  grace: float = 30.0,
) -> int:
  """Runs `main` beside its services, and stops them all whatever happens.

  A signal stops everything, see `stopping`; a second signal kills what is left.

  Args:
    services: the commands that the main command needs.
    main: the main command; when it ends, everything is stopped.
    logs: folder of the logs; an existing log is appended to.
    deadline: seconds within which all services must answer.
    grace: seconds between SIGTERM and SIGKILL of a service; the main command
      may take longer, because it saves.

  Returns:
    The exit code of `main`, or 128 + the signal that killed it; 1 if a service
    failed; `stopping.RESUME` if a signal arrived before `main` was started.
  """
  logs.mkdir(parents=True, exist_ok=True)
  serving: list[Running] = []
  mains: list[Running] = []
  with stop_events() as (stop_event, kill_event):
    try:
      for part in services:
        serving.append(Running(part, logs))
      await_health(serving, stop_event, deadline)
      mains.append(Running(main, logs))
      return _await_end(mains[0], serving, stop_event)
    except PartError as error:
      _say(str(error))
      return 1
    except stopping.StoppedError:
      pass  # The exit code is known once all have ended.
    finally:
      stop(mains, kill_event)
      stop(serving, kill_event, grace)
  if not mains:
    return stopping.RESUME
  code = mains[0].code
  mains[0].say(f"ended with code {code} after {mains[0].took}")
  return 1 if code is None else code


def await_health(
  services: Sequence[Running], stop_event: threading.Event, deadline: float
) -> None:
  """Waits until all services that say when they are ready have answered.

  Args:
    services: the services.
    stop_event: is set when a signal arrived.
    deadline: seconds that all of them may take.

  Raises:
    PartError: a service ended or was not ready in time.
    stopping.StoppedError: a signal arrived.
  """
  end_time = time.monotonic() + deadline
  for service in [service for service in services if service.part.health]:
    url = service.part.health
    while not _answers(url):
      _check_services(services, stop_event)
      if time.monotonic() > end_time:
        raise service.failure(
          f"did not answer {url} within {deadline:g} seconds"
        )
      service.show()
      time.sleep(_POLL_SECONDS)
    service.say(f"ready after {service.took}")
  _check_services(services, stop_event)


def _await_end(
  main: Running, services: list[Running], stop_event: threading.Event
) -> int:
  """Waits for the main command and returns its exit code.

  A service that is restarted meanwhile is replaced in the list.
  """
  while (code := main.code) is None:
    for index, service in enumerate(services):
      if service.code is not None and service.part.restarts:
        services[index] = service.restart()
    _check_services(services, stop_event)
    main.show()
    time.sleep(_POLL_SECONDS)
  if code:
    main.say(main.with_log(f"failed with code {code} after {main.took}"))
  else:
    main.show(now=True)
    main.say(f"ended after {main.took}")
  return code


def _check_services(
  services: Sequence[Running], stop_event: threading.Event
) -> None:
  """Raises if a signal arrived or a service has ended."""
  if stop_event.is_set():
    raise stopping.StoppedError(stopping.RESUME)
  for service in services:
    if service.code is not None:
      raise service.failure(
        f"ended with code {service.code} after {service.took}, expected it to "
        "serve until the end"
      )


class Running:
  """A started part, its log, and the lines that report on it.

  Args:
    part: the command.
    logs: folder of its log, which is appended to.

  Raises:
    PartError: it cannot be started, or its port is another process's, which
      could pass for it.
  """

  def __init__(self, part: Part, logs: pathlib.Path):
    self.part = part
    self.log = logs / f"{part.name}.log"
    self._last_line = ""
    self._started_at = time.monotonic()
    self._shown_at = self._started_at
    address = urllib.parse.urlsplit(part.health)
    if address.hostname:
      with contextlib.suppress(OSError):
        socket.create_connection((address.hostname, address.port), 1).close()
        raise PartError(
          f"[{part.name}] found another process at {address.netloc}, expected "
          "a free port; stop that process or choose other ports."
        )
    self.say(f"starts; log: {self.log}")
    with self.log.open("ab") as file:
      file.write(f"$ {part.shell_text()}\n".encode())
      file.flush()
      self._log_start = file.tell()  # `text` and `tail` skip what is before it.
      try:
        self._process = subprocess.Popen(
          part.command,
          stdin=subprocess.DEVNULL,
          stdout=file,
          stderr=subprocess.STDOUT,
          env={**os.environ, **part.env},
          start_new_session=True,
        )
      except OSError as error:
        raise PartError(f"[{part.name}] could not start: {error}.") from error

  @property
  def code(self) -> int | None:
    """The exit code in a shell's convention; None while it runs."""
    code = self._process.poll()
    return code if code is None or code >= 0 else 128 - code

  @property
  def took(self) -> str:
    """The time since its start, in words."""
    return progress.duration(time.monotonic() - self._started_at)

  def text(self, max_bytes: int | None = None) -> str:
    """Returns its output so far, or its last `max_bytes`."""
    with self.log.open("rb") as file:
      size = file.seek(0, os.SEEK_END)
      start = self._log_start
      if max_bytes is not None:
        start = max(start, size - max_bytes)
      file.seek(start)
      return file.read().decode(errors="replace")

  def tail(self, count: int) -> list[str]:
    """Returns its last lines; a CR, as progress bars write it, ends a line."""
    text = self.text(400 * count + 4000)
    lines = [line.rstrip() for line in re.split(r"[\r\n]+", text)]
    return list(filter(None, lines))[-count:]

  def terminate(self) -> None:
    """Sends SIGTERM to the command, which ends its children in its own way."""
    self._process.terminate()

  def kill(self) -> None:
    """Kills the part and its children, and waits for their end for a moment.

    Processes that wait for a device cannot be killed.
    """
    end_time = time.monotonic() + _KILL_SECONDS
    with contextlib.suppress(ProcessLookupError):
      while time.monotonic() < end_time:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.poll()
        time.sleep(_POLL_SECONDS)

  def say(self, sentence: str) -> None:
    """Prints a line with the part's name."""
    _say(f"[{self.part.name}] {sentence}")

  def show(self, *, now: bool = False) -> None:
    """Prints the last line of the log, if it is a new one."""
    if not now and time.monotonic() - self._shown_at < _SHOW_SECONDS:
      return
    self._shown_at = time.monotonic()
    last_line = "".join(self.tail(1))
    if last_line and last_line != self._last_line:
      self._last_line = last_line
      self.say(last_line[:200])

  def with_log(self, sentence: str) -> str:
    """Returns the sentence with the end of the log."""
    log_end = (
      "".join(f"\n  {line}" for line in self.tail(_TAIL_LINES)) or " empty."
    )
    return f"{sentence}; the end of {self.log}:{log_end}"

  def failure(self, sentence: str) -> PartError:
    """Returns an error: the sentence, with the end of the log."""
    return PartError(f"[{self.part.name}] {self.with_log(sentence)}")

  def restart(self) -> Running:
    """Restarts the part after it ended, with one restart less."""
    restarts_left = self.part.restarts
    self.say(
      f"ended with code {self.code} after {self.took}; it is started again, "
      f"{restarts_left} of that left"
    )
    self.kill()  # Its children may still hold its port or GPUs.
    part = dataclasses.replace(self.part, restarts=restarts_left - 1)
    return Running(part, self.log.parent)


def stop(
  running: Sequence[Running],
  kill_event: threading.Event,
  limit: float | None = None,
) -> None:
  """Stops parts, with all that they started.

  Args:
    running: the parts.
    kill_event: is set when the remaining parts must be killed at once.
    limit: seconds between SIGTERM and SIGKILL.
  """
  end_time = time.monotonic() + (_SAVE_SECONDS if limit is None else limit)
  for part in running:
    part.terminate()
  while unfinished := [part for part in running if part.code is None]:
    if kill_event.is_set() or time.monotonic() > end_time:
      break
    for part in unfinished:
      part.show(now=True)  # It may say how long it takes.
    time.sleep(_POLL_SECONDS)
  for part in unfinished:
    part.say("did not end by itself; killed")
  for part in running:
    part.kill()


def _answers(url: str) -> bool:
  """Returns whether a service of this machine answers without an error."""
  try:
    # Proxies of the environment are ignored.
    return httpx2.get(url, timeout=_ANSWER_SECONDS, trust_env=False).is_success
  except httpx2.HTTPError:
    return False
