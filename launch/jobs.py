"""Runs commands in the order of their dependencies and shows their progress.

A job whose result exists is not run again; remove the result to repeat it.
"""

from __future__ import annotations

import dataclasses
import pathlib
import shlex
import signal
import sys
import threading
import time
from collections.abc import Sequence

from launch import children, stopping

_POLL = 0.2  # Seconds between polls of the running processes.
_SHOW = 5.0  # Seconds between progress lines of one process.


@dataclasses.dataclass
class Job:
  """One command of the Python interpreter.

  Attributes:
    name: the displayed name, also the name of its log.
    command: arguments of the interpreter.
    result: the file that exists once the job is done.
    after: names of the jobs that it needs.
    once: a file of another job; while others run, this one starts only when
      that file has content.
    again: whether to run it even if the result exists.
    shows: whether to print its output at the end.
    quiet: prefixes of arguments that are left out of the displayed command.
  """

  name: str
  command: list[str]
  result: pathlib.Path
  after: tuple[str, ...] = ()
  once: pathlib.Path | None = None
  again: bool = False
  shows: bool = False
  quiet: tuple[str, ...] = ()

  def held(self) -> bool:
    """Returns whether the file that it waits for is missing or empty."""
    return self.once is not None and not (
      self.once.is_file() and self.once.stat().st_size
    )

  def shown(self) -> str:
    """Returns the command as a user would type it."""
    brief = [a for a in self.command if not a.startswith(self.quiet or ("\0",))]
    return shlex.join(["python", *brief])


@dataclasses.dataclass
class Running:
  """A started job, and when a line of it was last shown."""

  job: Job
  child: children.Child
  shown: float = 0.0


def run(jobs: Sequence[Job], logs: pathlib.Path, *, at_once: int) -> None:
  """Runs the jobs when the jobs that they need are done, in the given order.

  Args:
    jobs: all jobs, including those that others need.
    logs: folder of their output; created if missing.
    at_once: the most processes at a time.

  Raises:
    SystemExit: a command failed or a signal arrived. The other commands are
      stopped and may save first; a second signal kills them.
  """
  asked, urged = threading.Event(), threading.Event()

  def first(number: int) -> None:
    stopping.say(f"stopping on {signal.Signals(number).name}")
    asked.set()

  with stopping.heard(first, lambda number: urged.set()):
    _run(jobs, logs, at_once, asked, urged)


def _run(
  jobs: Sequence[Job],
  logs: pathlib.Path,
  at_once: int,
  asked: threading.Event,
  urged: threading.Event,
) -> None:
  logs.mkdir(parents=True, exist_ok=True)
  done = {j.name for j in jobs if j.result.is_file() and not j.again}
  if done:
    print(f"Results stand in {logs.parent}; remove it to start over.")
  for name in sorted(done):
    print(f"already there, not run again: {name}", flush=True)
  waiting = [job for job in jobs if job.name not in done]
  running: list[Running] = []
  try:
    while waiting or running:
      for job in [j for j in waiting if set(j.after) <= done]:
        if len(running) < at_once and not (running and job.held()):
          waiting.remove(job)
          running.append(_start(job, logs))
      if not running:
        needed = {name for job in waiting for name in job.after} - done
        sys.exit(f"Nothing can run: {', '.join(sorted(needed))} is not there.")
      if asked.wait(_POLL):
        raise stopping.StoppedError(stopping.RESUME)
      for each in list(running):
        if _poll(each):
          running.remove(each)
          done.add(each.job.name)
  finally:
    children.stop([each.child for each in running], urged=urged.is_set)


def _start(job: Job, logs: pathlib.Path) -> Running:
  print(f"\n[{job.name}] starts:\n  {job.shown()}", flush=True)
  log = logs / f"{job.name.replace(' ', '-')}.log"
  return Running(job, children.Child([sys.executable, *job.command], log))


def _poll(each: Running) -> bool:
  """Prints progress; returns whether the job is done."""
  code = each.child.code
  if code is None:
    now = time.monotonic()
    if now - each.shown >= _SHOW:
      each.shown = now
      last = "".join(each.child.tail(1)) or "setting up"
      print(f"[{each.job.name}] {last}", flush=True)
    return False
  if code == stopping.RESUME:
    stopping.say(f"[{each.job.name}] was stopped, and so are the others")
    raise stopping.StoppedError(code)
  if code:
    end = each.child.text()[-3000:]
    sys.exit(f"[{each.job.name}] failed with code {code}:\n{end}")
  print(f"[{each.job.name}] done in {each.child.took}", flush=True)
  if each.job.shows:
    print(each.child.text(), flush=True)
  return True
