"""What all measurements share: clocks, ratios, tables, JSON.

A bench is a module with a `main` that returns its numbers:

    def main():
      sides = {"ours": f, "theirs": g}
      found = harness.Rounds(
        [
          {name: {"seconds": harness.seconds(f)} for name, f in sides.items()}
          for _ in range(5)
        ]
      )
      print(found.ratio("seconds", "theirs", "ours"))
      return found.each

    if __name__ == "__main__":
      harness.run(main)

Sides are measured in turns, so that other work on the machine disturbs all of
them; a ratio is the median of the rounds' ratios.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeVar

from absl import flags

from launch import flags as launch_flags

Numbers = Mapping[str, float]
T = TypeVar("T")
_COPIES = 7


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

  def __init__(self, *columns: str, first: int = 28):
    self._first = first
    self._widths = [max(len(column) + 2, 11) for column in columns[1:]]
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


def timed(call: Callable[[], T]) -> tuple[T, float]:
  """Calls a function; returns its result and the seconds that it took."""
  began = time.perf_counter()
  result = call()
  return result, time.perf_counter() - began


def seconds(call: Callable[[], object]) -> float:
  return timed(call)[1]


def bandwidth(size: int) -> float:
  """Returns the bytes per second read and written by a copy of `size` bytes."""
  import jax
  import jax.numpy as jnp

  x = jnp.zeros(size // 4, jnp.float32)
  copy = jax.jit(lambda x: x + 1)

  def call() -> None:
    jax.block_until_ready(copy(x))

  call()
  return 2 * x.nbytes / min(seconds(call) for _ in range(_COPIES))


def run(
  main: Callable[[], object],
  *,
  workers: Mapping[str, Callable[..., object]] | None = None,
) -> None:
  """Runs a bench as a command; `--json=FILE` keeps what `main` returns.

  Args:
    main: the measurement. It returns values that JSON knows.
    workers: functions that `worker_command` runs in processes of their own,
      with strings as arguments.
  """
  flags.DEFINE_string("json", None, "File for the numbers.")
  flags.DEFINE_list("worker", [], "A part of the bench; internal.")

  def command(argv: Sequence[str]) -> None:
    del argv
    if flags.FLAGS.worker:
      name, *arguments = flags.FLAGS.worker
      print(json.dumps((workers or {})[name](*arguments)))
      return
    numbers = main()
    if flags.FLAGS.json:
      text = json.dumps(numbers, indent=2) + "\n"
      pathlib.Path(flags.FLAGS.json).write_text(text)

  launch_flags.run(command, sentences=False)


def worker_command(name: str, *arguments: object) -> list[str]:
  """Returns the command that runs a worker of this bench."""
  spec = sys.modules["__main__"].__spec__
  if spec is None:
    raise RuntimeError("A bench with workers must be run by python -m.")
  words = ",".join(map(str, [name, *arguments]))
  return [sys.executable, "-m", spec.name, f"--worker={words}"]
