"""What all measurements share: clocks, turns, ratios, tables, JSON, processes.

A bench is a module with a `main` that returns its numbers:

    def main():
      sides = {"ours": f, "theirs": g}
      found = harness.in_turns(
        sides, lambda side: {"seconds": harness.seconds(sides[side])}, rounds=5
      )
      print(found.ratio("seconds", "theirs", "ours"))
      return found.each

    if __name__ == "__main__":
      harness.run(main)

Sides are measured in turns, so that other work on the machine disturbs all of
them; a ratio is the median of the rounds' ratios.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import (
  Awaitable,
  Callable,
  Iterable,
  Iterator,
  Mapping,
  Sequence,
)
from typing import Any, NamedTuple, TypeVar

import numpy as np
from absl import flags

from launch import flags as launch_flags

Numbers = Mapping[str, float]
T = TypeVar("T")
_LAST = 2000  # Characters of a failed process's errors.
_COPIES = 7
_POST = (
  b"POST %b HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
  b"content-length: %d\r\n\r\n%b"
)


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


def units(vectors: np.ndarray) -> np.ndarray:
  """Returns vectors `[..., D]` scaled to length 1."""
  return vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)


def cpu_of(pid: int) -> float:
  """Returns the CPU seconds that a process has used."""
  with open(f"/proc/{pid}/stat") as stat:
    values = stat.read().rpartition(")")[2].split()
  return (int(values[11]) + int(values[12])) / os.sysconf("SC_CLK_TCK")


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


class Connection:
  """A connection of HTTP/1.1 that is kept alive, with one request at a time.

  httpx2 takes about a millisecond of CPU for a request, more than a server
  does, and loads share the server's cores.
  """

  def __init__(self, port: int):
    self._port = port

  async def __aenter__(self) -> Connection:
    self._reader, self._writer = await asyncio.open_connection(
      "127.0.0.1", self._port
    )
    return self

  async def __aexit__(self, *error: object) -> None:
    self._writer.close()

  async def post(self, path: str, value: object, until: bytes = b"") -> bytes:
    """Posts JSON and returns the body of the answer.

    Args:
      path: of the URL.
      value: what JSON knows.
      until: returns when this is read, of an answer that comes in pieces.

    Raises:
      RuntimeError: the status is not 200.
    """
    body = json.dumps(value).encode()
    self._writer.write(_POST % (path.encode(), len(body), body))
    head = (await self._reader.readuntil(b"\r\n\r\n")).lower()
    if b" 200 " not in head.partition(b"\r\n")[0]:
      raise RuntimeError(head.decode())
    if until:
      return await self._reader.readuntil(until)
    length = int(head.partition(b"content-length:")[2].split()[0])
    return await self._reader.readexactly(length)


async def in_parallel(
  port: int, clients: int, ask: Callable[[Connection], Awaitable[object]]
) -> None:
  """Runs `ask` with a connection of each of some clients."""

  async def one() -> None:
    async with Connection(port) as connection:
      await ask(connection)

  await asyncio.gather(*(one() for _ in range(clients)))


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


@contextlib.contextmanager
def served(command: Sequence[str]) -> Iterator[tuple[int, int]]:
  """Runs a command that serves over HTTP; yields its port and process id.

  Args:
    command: prints a line that ends in the port when it listens.
  """
  with (
    tempfile.TemporaryFile("w+") as said,
    subprocess.Popen(
      command, stdout=subprocess.PIPE, stderr=said, text=True
    ) as process,
  ):
    try:
      line = process.stdout.readline() if process.stdout else ""
      if "http://" not in line:
        said.seek(0)
        sys.exit(f"{' '.join(command)} failed:\n{said.read()[-_LAST:]}")
      yield int(line.rpartition(":")[2].strip("/\n")), process.pid
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
    sys.exit(f"{name} failed:\n{done.stderr[-_LAST:]}")
  return json.loads(done.stdout.splitlines()[-1])
