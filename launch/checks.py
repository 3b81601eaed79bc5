"""Checks with a deadline, and the line that reports each finding."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

OK, WARNING, PROBLEM = "ok", "warning", "problem"


class Finding(NamedTuple):
  """The result of a check; `todo` says what to do about it."""

  level: str
  found: str
  todo: str = ""


def ok(found: str) -> Finding:
  return Finding(OK, found)


def warning(found: str, todo: str) -> Finding:
  return Finding(WARNING, found, todo)


def problem(found: str, todo: str = "") -> Finding:
  """Returns a finding that prevents a run; `todo` may be empty."""
  return Finding(PROBLEM, found, todo)


class Check(NamedTuple):
  """A named check; `look` may be slow and may raise."""

  name: str
  look: Callable[[], Finding | Iterable[Finding]]


def run(check: Check, *, deadline: float) -> list[Finding]:
  """Returns what a check finds; a timeout or an exception is a problem too.

  Args:
    check: runs on a daemon thread, which is abandoned if it hangs.
    deadline: seconds that the check may take.
  """
  outcome: queue.SimpleQueue[list[Finding]] = queue.SimpleQueue()

  def work() -> None:
    try:
      found = check.look()
      outcome.put([found] if isinstance(found, Finding) else list(found))
    except (ValueError, OSError) as error:
      outcome.put([problem(str(error) or type(error).__name__)])
    except BaseException as error:  # A broken installation may raise anything.
      outcome.put(
        [
          problem(
            f"found {type(error).__name__}: {error}",
            "look after what it names; where that is in order, report it.",
          )
        ]
      )

  threading.Thread(target=work, name=check.name, daemon=True).start()
  try:
    return outcome.get(timeout=deadline)
  except queue.Empty:
    return [
      problem(
        f"found no answer within {deadline:g} seconds",
        "see what it waits for (a device, a disk, a server), or raise "
        "--deadline.",
      )
    ]


def lines(name: str, findings: Iterable[Finding]) -> Iterator[str]:
  """Yields the printed lines of each finding."""
  for finding in findings:
    said = " ".join(finding.found.split())
    yield f"{finding.level:<8} {name:<11} {said}"
    if finding.todo:
      yield f"{'':<21}{finding.todo}"


def size(count: float) -> str:
  """Formats a number of bytes for people, as "1.5 GB"."""
  for unit in ("B", "KB", "MB"):
    if count < 1000:
      return f"{count:.3g} {unit}"
    count /= 1000
  return f"{count:,.1f} GB"
