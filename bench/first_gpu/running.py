"""Runs stages in processes with time limits, and writes what they find.

A crash, a device without memory or a hang ends one stage, not the others.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import signal
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from anysearch_jax.host import json_files
from anysearch_jax.launch import supervisor
from bench.first_gpu import notes as notes_lib

RESULTS = "first_gpu.json"
DONE, FAILED, LATE = "done", "failed", "timed out"
SKIPPED, UNTIMED = "skipped", "no time left"
_POLL = 0.2
_TAIL = 15
# A rehearsal compiles more than it computes.
_QUICK = "--xla_backend_optimization_level=0"
# The share of memory that plans assume.
_MEMORY = "XLA_PYTHON_CLIENT_MEM_FRACTION"


@dataclasses.dataclass(frozen=True)
class Stage:
  """One measurement, a function of `stages`.

  Attributes:
    name: that of the function, also of its files.
    measures: what, as a phrase.
    seconds: that it may take.
  """

  name: str
  measures: str
  seconds: float


# In the order of worth.
STAGES = (
  Stage("doctor", "installation, devices and their peaks", 120),
  Stage("decode", "decode, Qwen3-4B", 300),
  Stage("step", "train steps, Qwen3-4B", 300),
  Stage("loop", "a whole loop, Qwen3-4B", 400),
  Stage("server", "an SGLang server (--server)", 120),
  Stage("vectors", "exact search of 21 M x 768", 180),
)


@dataclasses.dataclass(frozen=True)
class Result:
  """How a stage ended.

  Attributes:
    name: of the stage.
    status: `done`, `failed`, `timed out`, `skipped` or `no time left`.
    seconds: that it took.
    reason: why it is not done; empty if it is.
    figures: by name, those of a case below the case's name.
  """

  name: str
  status: str
  seconds: float
  reason: str
  figures: notes_lib.Figures


def measure(name: str, notes: notes_lib.Notes) -> None:
  """Measures a stage in this process; notes its figures and how it ends."""
  from bench.first_gpu import stages

  try:
    getattr(stages, name)(notes)
    cases = [f for f in notes.figures.values() if isinstance(f, Mapping)]
    if cases and all("failed" in case for case in cases):
      raise RuntimeError(cases[0]["failed"])
  except notes_lib.SkippedError as error:
    notes.write(status=SKIPPED, reason=str(error))
  except Exception as error:
    notes.write(status=FAILED, reason=notes_lib.sentence(error))
    traceback.print_exc()
    raise
  else:
    notes.write(status=DONE)


def run(
  stages: Sequence[Stage],
  folder: pathlib.Path,
  *,
  rehearse: bool,
  minutes: float,
  command: Callable[[Stage], Sequence[str]],
) -> list[Result]:
  """Runs the stages that are not done and writes all results.

  Args:
    stages: in the order to run them.
    folder: of the results.
    rehearse: whether sizes are tiny.
    minutes: for all stages together; none begins with less than its seconds.
    command: returns the command of a stage's process.

  Raises:
    ValueError: the folder has results of a rehearsal and this is none, or the
      other way round.
  """
  for name in ("stages", "logs"):
    (folder / name).mkdir(parents=True, exist_ok=True)
  end = time.monotonic() + 60 * minutes
  results = _earlier(folder, rehearse=rehearse)
  for stage in stages:
    before = results.get(stage.name)
    if before is not None and before.status in (DONE, SKIPPED):
      print(f"{stage.name}: {before.status} before", flush=True)
      continue
    left = end - time.monotonic()
    # Rehearsals find mistakes, on machines that may be slow.
    seconds = max(left, 1.0) if rehearse else stage.seconds
    if left < seconds and not rehearse:
      reason = f"needs {stage.seconds:.0f} s of {max(left, 0):.0f}"
      result = Result(stage.name, UNTIMED, 0.0, reason, {})
    else:
      print(f"{stage.name}: {stage.measures} ({seconds:.0f} s)", flush=True)
      flags = _QUICK if rehearse else ""
      result = _run_one(stage, folder, command(stage), seconds, flags)
    print(f"  {result.status} {result.reason}", flush=True)
    results[stage.name] = result
    json_files.write(
      folder / RESULTS,
      {
        "rehearsal": rehearse,
        "minutes": minutes,
        "stages": [dataclasses.asdict(r) for r in results.values()],
      },
    )
  return [*results.values()]


def _earlier(folder: pathlib.Path, *, rehearse: bool) -> dict[str, Result]:
  """Returns the results of earlier runs by stage."""
  path = folder / RESULTS
  if not path.is_file():
    return {}
  values = json_files.read(path)
  if values["rehearsal"] != rehearse:
    raise ValueError(
      f"--output: {path} is {'a' if values['rehearsal'] else 'no'} rehearsal, "
      f"and this run is {'one' if rehearse else 'none'}; name another folder."
    )
  return {stage["name"]: Result(**stage) for stage in values["stages"]}


def _run_one(
  stage: Stage,
  folder: pathlib.Path,
  command: Sequence[str],
  limit: float,
  flags: str,
) -> Result:
  """Runs a stage in a process; returns what it found until its end."""
  notes = folder / "stages" / f"{stage.name}.json"
  notes.unlink(missing_ok=True)
  environment = {
    "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip(),
    _MEMORY: os.environ.get(_MEMORY, "0.92"),
  }
  started = time.monotonic()
  part = supervisor.Part(stage.name, tuple(command), environment)
  child = supervisor.Running(part, folder / "logs")
  try:
    while child.code is None and time.monotonic() < started + limit:
      time.sleep(_POLL)
    code = child.code
  finally:
    child.kill()
  written: dict[str, Any] = {"figures": {}}
  with contextlib.suppress(OSError, ValueError):
    written = json_files.read(notes)
  if code is None:
    status, reason = LATE, f"not done after {limit:.0f} s"
  elif code == 0 and "status" in written:
    status, reason = written["status"], written.get("reason", "")
  else:
    last = (child.tail(_TAIL) or ["it wrote nothing"])[-1]
    how = (
      f"by {signal.Signals(code - 128).name}" if code > 128 else f"with {code}"
    )
    status, reason = FAILED, written.get("reason") or f"ended {how}: {last}"
  return Result(
    name=stage.name,
    status=status,
    seconds=round(time.monotonic() - started, 1),
    reason=reason,
    figures=written["figures"],
  )
