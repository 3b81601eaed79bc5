"""What all measurements share: clocks, turns, ratios, tables, JSON, processes.

A bench is a module with a `main` that returns its numbers:

    def main():
      found = harness.timed_in_turns({"ours": f, "theirs": g}, rounds=5)
      print(found.ratio("seconds", "theirs", "ours"))
      return found.each

    if __name__ == "__main__":
      harness.run(main)

Sides are measured in turns, so that other work on the machine disturbs all of
them; a ratio is the median of the rounds' ratios.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import resource
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from absl import flags

from launch import flags as launch_flags

Numbers = Mapping[str, float]
T = TypeVar("T")
_LAST_LINES = 2000  # Characters of a failed process's errors.


class Timing(NamedTuple):
  """Wall-clock and CPU seconds of this process."""

  seconds: float
  cpu: float


class Spread(NamedTuple):
  """A quantity that was measured several times."""

  median: float
  low: float
  high: float

  @classmethod
  def of(cls, values: Sequence[float]) -> Spread:
    return cls(statistics.median(values), min(values), max(values))

  def __str__(self) -> str:
    """Formats a ratio."""
    return f"{self.median:.2f}x [{self.low:.2f}, {self.high:.2f}]"


@dataclasses.dataclass(frozen=True)
class Rounds:
  """Measurements of several sides, taken in turns."""

  each: Sequence[Mapping[str, Numbers]]

  def values(self, side: str, name: str) -> list[float]:
    return [found[side][name] for found in self.each]

  def medians(self, side: str) -> dict[str, float]:
    """Returns the median of each number of a side."""
    return {
      name: statistics.median(self.values(side, name))
      for name in self.each[0][side]
    }

  def ratios(self, name: str, over: str, under: str) -> list[float]:
    """Returns a number of `over`, divided by that of `under`, by round."""
    return [found[over][name] / found[under][name] for found in self.each]

  def ratio(self, name: str, over: str, under: str) -> Spread:
    return Spread.of(self.ratios(name, over, under))


class Table:
  """Prints rows as they are measured; the first column is left-aligned."""

  def __init__(self, *columns: str, first: int = 28, least: int = 11):
    self._first = first
    self._widths = [max(len(column) + 2, least) for column in columns[1:]]
    self.row(*columns)

  def row(self, name: str, *cells: object) -> None:
    """Prints a row; numbers have four digits."""
    padded = (
      f"{shown(cell):>{width}}"
      for cell, width in zip(cells, self._widths, strict=False)
    )
    line = f"{name:<{self._first}}" + "".join(padded)
    print(line.rstrip(), flush=True)


def shown(value: object) -> str:
  """Formats a cell: numbers with four digits, the rest as they are."""
  return f"{value:.4g}" if isinstance(value, float) else str(value)


def print_numbers(numbers: Mapping[str, object]) -> None:
  """Prints a line for each number."""
  for name, value in numbers.items():
    print(f"{name:32} {shown(value)}", flush=True)


def timed(call: Callable[[], T]) -> tuple[T, Timing]:
  """Calls a function; returns its result and the seconds that it took."""
  wall, cpu = time.perf_counter(), time.process_time()
  result = call()
  return result, Timing(time.perf_counter() - wall, time.process_time() - cpu)


def seconds(call: Callable[[], object]) -> float:
  return timed(call)[1].seconds


def in_turns(
  sides: Iterable[str], measure: Callable[[str], Numbers], *, rounds: int
) -> Rounds:
  """Measures each side once a round."""
  names = list(sides)
  return Rounds(
    [{name: measure(name) for name in names} for _ in range(rounds)]
  )


def timed_in_turns(
  sides: Mapping[str, Callable[[], object]], *, rounds: int
) -> Rounds:
  """Times each side once a round; the numbers are those of `Timing`."""
  return in_turns(
    sides, lambda name: timed(sides[name])[1]._asdict(), rounds=rounds
  )


@contextlib.contextmanager
def deadline(seconds: int) -> Iterator[None]:
  """Raises TimeoutError if the block takes longer than `seconds`."""

  def late(*_):
    raise TimeoutError(f"not done after {seconds} s")

  before = signal.signal(signal.SIGALRM, late)
  signal.alarm(seconds)
  try:
    yield
  finally:
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def peak_memory() -> int:
  """Returns the largest resident size of this process so far, in bytes."""
  return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def cpu_of(pid: int) -> float:
  """Returns the CPU seconds that a process has used."""
  with open(f"/proc/{pid}/stat") as stat:
    values = stat.read().rpartition(")")[2].split()
  return (int(values[11]) + int(values[12])) / os.sysconf("SC_CLK_TCK")


def resident_of(pid: int) -> int:
  """Returns the resident bytes of a process."""
  with open(f"/proc/{pid}/statm") as statm:
    return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def children_cpu() -> float:
  """Returns the CPU seconds of all child processes that have ended."""
  used = resource.getrusage(resource.RUSAGE_CHILDREN)
  return used.ru_utime + used.ru_stime


def run(
  main: Callable[[], object],
  *,
  workers: Mapping[str, Callable[..., object]] | None = None,
) -> None:
  """Runs a bench as a command; `--json=FILE` keeps what `main` returns.

  Args:
    main: the measurement. It returns values that JSON knows.
    workers: functions that `in_worker` calls in processes of their own, with
      strings as arguments.
  """
  flags.DEFINE_string("json", None, "File for the numbers.")
  flags.DEFINE_list("worker", [], "A part of the bench; internal.")

  def command(argv: Sequence[str]) -> None:
    if len(argv) > 1:
      raise launch_flags.app.UsageError(f"Unexpected argument {argv[1]!r}.")
    if flags.FLAGS.worker:
      name, *arguments = flags.FLAGS.worker
      print(json.dumps((workers or {})[name](*arguments)))
      return
    numbers = main()
    if flags.FLAGS.json:
      text = json.dumps(numbers, indent=2) + "\n"
      pathlib.Path(flags.FLAGS.json).write_text(text)

  launch_flags.run(command)


def worker_command(name: str, *arguments: object) -> list[str]:
  """Returns the command that runs a worker of this bench."""
  spec = sys.modules["__main__"].__spec__
  if spec is None:
    raise RuntimeError("A bench with workers must be run by python -m.")
  words = ",".join(map(str, [name, *arguments]))
  return [sys.executable, "-m", spec.name, f"--worker={words}"]


@contextlib.contextmanager
def served(
  command: Sequence[str], env: Mapping[str, str] | None = None
) -> Iterator[int]:
  """Runs a command that serves over HTTP; yields the port that it prints.

  Args:
    command: prints a line that ends in the port when it listens.
    env: added to the environment.
  """
  with subprocess.Popen(
    command,
    env={**os.environ, **(env or {})},
    stdout=subprocess.PIPE,
    text=True,
  ) as process:
    try:
      line = process.stdout.readline() if process.stdout else ""
      if "http://" not in line:
        sys.exit(f"{' '.join(command)}: found {line!r}, expected an address.")
      yield int(line.rpartition(":")[2])
    finally:
      process.terminate()
      process.communicate()  # It says that it stops.


def in_worker(
  name: str, *arguments: object, env: Mapping[str, str] | None = None
) -> Any:
  """Runs a worker of this bench in a process; returns its numbers."""
  done = subprocess.run(
    worker_command(name, *arguments),
    env=None if env is None else {**os.environ, **env},
    capture_output=True,
    text=True,
    check=False,
  )
  if done.returncode:
    sys.exit(f"{name} failed:\n{done.stderr[-_LAST_LINES:]}")
  return json.loads(done.stdout.splitlines()[-1])
