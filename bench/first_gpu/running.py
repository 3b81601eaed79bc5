"""Runs stages one after the other, each in a process with a time limit.

A stage that fails, is killed or runs out of time does not end the others. What
is done stays done: the same command continues.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from anysearch_jax.host import json_files
from bench import harness
from bench.first_gpu import notes as notes_lib
from bench.first_gpu import stages as stages_lib
from launch import children

RESULTS, TABLE = "first_gpu.json", "first_gpu.txt"
DONE, FAILED, LATE, SKIPPED, UNTIMED = (
  "done",
  "failed",
  "timed out",
  "skipped",
  "no time left",
)
# A stage with one of these is not run again.
_FINAL = (DONE, SKIPPED)
_POLL = 0.2
# A stage with fewer seconds left would hardly compile.
_LEAST = 20.0
_TAIL = 15
# A rehearsal compiles more than it computes.
_QUICK = "--xla_backend_optimization_level=0"


@dataclasses.dataclass(frozen=True)
class Result:
  """How a stage ended. reason: why, if it is not done."""

  name: str
  measures: str
  status: str
  seconds: float
  reason: str
  figures: Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Folder:
  """The folder of a run, `--output`."""

  path: pathlib.Path

  def notes(self, stage: str) -> pathlib.Path:
    return self.path / "stages" / f"{stage}.json"

  def log(self, stage: str) -> pathlib.Path:
    return self.path / "logs" / f"{stage}.log"

  def traces(self, stage: str) -> pathlib.Path:
    return self.path / "traces" / stage

  @property
  def cache(self) -> pathlib.Path:
    return self.path / "jax_cache"

  def make(self) -> None:
    for name in ("stages", "logs"):
      (self.path / name).mkdir(parents=True, exist_ok=True)


def run(
  stages: Sequence[stages_lib.Stage],
  folder: Folder,
  *,
  rehearse: bool,
  minutes: float,
  command: Callable[[stages_lib.Stage], Sequence[str]],
) -> list[Result]:
  """Runs the stages that are not done and writes all results.

  Args:
    stages: in the order to run them.
    folder: of the results.
    rehearse: whether sizes are tiny.
    minutes: for all stages together; a stage that begins gets what is left.
    command: returns the command of a stage's process.

  Raises:
    ValueError: the folder has results of a rehearsal and this is none, or the
      other way round.
  """
  folder.make()
  end = time.monotonic() + 60 * minutes
  earlier = {r.name: r for r in _read(folder, rehearse=rehearse)}
  results: dict[str, Result] = dict(earlier)
  for stage in stages:
    before = earlier.get(stage.name)
    if before is not None and before.status in _FINAL:
      print(f"{stage.name}: {before.status} before", flush=True)
      continue
    left = end - time.monotonic()
    if left < min(_LEAST, stage.seconds):
      result = Result(stage.name, stage.measures, UNTIMED, 0.0, "", {})
    else:
      limit = min(stage.seconds, left)
      print(f"{stage.name}: {stage.measures} ({limit:.0f} s)", flush=True)
      flags = f"{stage.xla_flags} {_QUICK if rehearse else ''}"
      result = _run_one(stage, folder, command(stage), limit, flags)
      print(f"  {_verdict(result)}", flush=True)
    results[stage.name] = result
    _write(list(_ordered(results)), folder, rehearse=rehearse, minutes=minutes)
  return list(_ordered(results))


def _ordered(results: Mapping[str, Result]) -> Iterator[Result]:
  """Yields results in the order of worth, whatever ran first."""
  order = [*stages_lib.BY_NAME, *results]
  for name in dict.fromkeys(order):
    if name in results:
      yield results[name]


def _run_one(
  stage: stages_lib.Stage,
  folder: Folder,
  command: Sequence[str],
  limit: float,
  flags: str,
) -> Result:
  """Runs a stage in a process; returns what it found until its end.

  Args:
    stage: the stage.
    folder: of the results.
    command: of the process.
    limit: its seconds.
    flags: that are added to XLA_FLAGS.
  """
  folder.notes(stage.name).unlink(missing_ok=True)
  flags = f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()
  started = time.monotonic()
  child = children.Child(
    command, folder.log(stage.name), env={"XLA_FLAGS": flags}
  )
  try:
    while child.code is None and time.monotonic() < started + limit:
      time.sleep(_POLL)
    code = child.code
  finally:
    child.kill()
  found = notes_lib.read(folder.notes(stage.name))
  if code is None:
    status, reason = LATE, f"not done after {limit:.0f} s"
  elif code == 0 and "status" in found:
    status, reason = found["status"], found.get("reason", "")
  else:
    status, reason = FAILED, found.get("reason") or _died(code, child)
  return Result(
    name=stage.name,
    measures=stage.measures,
    status=status,
    seconds=round(time.monotonic() - started, 1),
    reason=reason,
    figures=found["figures"],
  )


def _died(code: int, child: children.Child) -> str:
  """Returns how a process ended, and the last line that it wrote."""
  last = (child.tail(_TAIL) or ["it wrote nothing"])[-1]
  if code > 128:
    return f"ended by {signal.Signals(code - 128).name}: {last}"
  return f"ended with {code}: {last}"


def measure(
  stage: stages_lib.Stage, folder: Folder, *, rehearse: bool
) -> Mapping[str, Any]:
  """Runs a stage in this process; notes how it ended."""
  notes = notes_lib.Notes(
    folder.notes(stage.name),
    traces=folder.traces(stage.name),
    rehearse=rehearse,
  )
  try:
    stage.run(notes)
  except notes_lib.SkippedError as error:
    notes.close(status=SKIPPED, reason=str(error))
  except Exception as error:
    notes.close(status=FAILED, reason=notes_lib.sentence(error))
    raise
  else:
    notes.close(status=DONE)
  return notes.figures


def _read(folder: Folder, *, rehearse: bool) -> list[Result]:
  """Returns the results of earlier runs."""
  path = folder.path / RESULTS
  if not path.is_file():
    return []
  found = json_files.read(path)
  if found["rehearsal"] != rehearse:
    raise ValueError(
      f"--output: {path} is {'a' if found['rehearsal'] else 'no'} rehearsal, "
      f"and this run is {'one' if rehearse else 'none'}; name another folder."
    )
  return [Result(**each) for each in found["stages"]]


def _write(
  results: Sequence[Result], folder: Folder, *, rehearse: bool, minutes: float
) -> None:
  json_files.write(
    folder.path / RESULTS,
    {
      "rehearsal": rehearse,
      "minutes": minutes,
      "stages": [dataclasses.asdict(result) for result in results],
    },
  )
  (folder.path / TABLE).write_text(table(results))


def table(results: Sequence[Result]) -> str:
  """Formats the results: a line for each stage, then the figures of each."""
  lines = [f"{result.name:<18}{_verdict(result)}" for result in results]
  lines += [*highlights({r.name: r.figures for r in results})]
  for result in results:
    lines += ["", f"{result.name}: {result.measures}", *_lines(result.figures)]
  return "\n".join(lines) + "\n"


def highlights(figures: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
  """Yields train steps as shares of the measured peak, and the best decode."""
  peak = figures.get("peaks", {}).get("training bfloat16", {}).get("TFLOP/s")
  for name, found in figures.items():
    if peak and (speed := found.get("TFLOP/s by 6 N")):
      yield (
        f"{name}: {speed:.0f} TFLOP/s by 6 N, {speed / peak:.0%} of the matrix "
        "products measured here"
      )
    cases = [(k, v) for k, v in found.items() if isinstance(v, Mapping)]
    shares = [(k, v) for k, v in cases if "share of the limit" in v]
    if shares:
      case, best = max(shares, key=lambda item: item[1]["tokens/s"])
      yield (
        f"{name}: at most {best['tokens/s']:,.0f} tokens/s ({case}), "
        f"{best['share of the limit']:.0%} of the limit by bytes"
      )


def _verdict(result: Result) -> str:
  words = f"{result.status:<14}{result.seconds:>7.1f} s"
  return f"{words}  {result.reason}".rstrip()


def _lines(figures: Mapping[str, Any], indent: int = 2) -> Iterator[str]:
  """Yields a line for each figure; a case's are indented below its name."""
  for name, value in figures.items():
    if isinstance(value, Mapping):
      yield f"{'':{indent}}{name}"
      yield from _lines(value, indent + 2)
    else:
      width = 46 - indent
      yield f"{'':{indent}}{name:<{width}}{harness.shown(value)}"
