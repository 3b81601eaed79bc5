"""Looking after something within a deadline, and one line about it."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

OK, WARNING, PROBLEM = "ok", "warning", "problem"


class Finding(NamedTuple):
  """What a check found; `todo` says what to do about it."""

  level: str
  found: str
  todo: str = ""


def ok(found: str) -> Finding:
  return Finding(OK, found)


def warning(found: str, todo: str) -> Finding:
  return Finding(WARNING, found, todo)


def problem(found: str, todo: str = "") -> Finding:
  """What a run cannot do with; a sentence that says all needs no todo."""
  return Finding(PROBLEM, found, todo)


class Check(NamedTuple):
  """What is looked after; `look` may take its time and may raise."""

  name: str
  look: Callable[[], Finding | Iterable[Finding]]


def run(check: Check, *, deadline: float) -> list[Finding]:
  """What a check finds; that it hangs or breaks is a problem too.

  Args:
    check: runs on a thread, which is left behind where it hangs.
    deadline: seconds that it may take.
  """
  outcome: queue.SimpleQueue[list[Finding]] = queue.SimpleQueue()

  def work() -> None:
    try:
      found = check.look()
      outcome.put([found] if isinstance(found, Finding) else list(found))
    except (ValueError, OSError) as error:
      outcome.put([problem(str(error) or type(error).__name__)])
    except BaseException as error:  # Whatever a broken installation raises.
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
  """Each finding as it is shown."""
  for finding in findings:
    said = " ".join(finding.found.split())
    yield f"{finding.level:<8} {name:<11} {said}"
    if finding.todo:
      yield f"{'':<21}{finding.todo}"


def size(count: float) -> str:
  """Bytes for people."""
  for unit in ("B", "KB", "MB"):
    if count < 1000:
      return f"{count:.3g} {unit}"
    count /= 1000
  return f"{count:,.1f} GB"
