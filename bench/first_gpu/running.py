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

# The file of all results, by whether sizes are tiny.
RESULTS = {False: "first_gpu.json", True: "rehearsal.json"}
# Statuses of a stage.
DONE = "done"
FAILED = "failed"
LATE = "timed out"
_POLL_SECONDS = 0.2
# A rehearsal finds mistakes on machines that may be slow, and compiles more
# than it computes.
_REHEARSAL_SECONDS = 1200.0
_QUICK_FLAGS = "--xla_backend_optimization_level=0"
# The variable of the share of memory that JAX takes; plans assume 0.92.
_MEMORY_VARIABLE = "XLA_PYTHON_CLIENT_MEM_FRACTION"

# The seconds that each stage may take; the most useful stages come first. Each
# is a function of `stages`.
STAGES = {
  "doctor": 100.0,
  "decode": 260.0,
  "step": 260.0,
  "published": 220.0,
  "loop": 360.0,
  "server": 120.0,
  "vectors": 150.0,
}


@dataclasses.dataclass(frozen=True)
class Result:
  """How a stage ended.

  Attributes:
    name: name of the stage.
    status: `done`, `failed` or `timed out`.
    seconds: seconds that it took.
    reason: why it is not done; empty if it is done.
    figures: figures by name; those of a case are below the case's name.
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
  except Exception as error:
    notes.write(status=FAILED, reason=notes_lib.sentence(error))
    traceback.print_exc()
    raise
  notes.write(status=DONE)


def run(
  stages: Mapping[str, float],
  folder: pathlib.Path,
  *,
  rehearse: bool,
  command: Callable[[str], Sequence[str]],
) -> list[Result]:
  """Runs the stages that are not done and writes all results.

  Args:
    stages: by stage, in order, the seconds that it may take.
    folder: folder of the results.
    rehearse: whether sizes are tiny; then stages may take longer.
    command: returns the command of a stage's process.

  Returns:
    The results, also those of other stages in earlier runs.
  """
  for name in ("stages", "logs"):
    (folder / name).mkdir(parents=True, exist_ok=True)
  path = folder / RESULTS[rehearse]
  earlier = json_files.read(path, missing={"stages": []})["stages"]
  results = {stage["name"]: Result(**stage) for stage in earlier}
  for name, seconds in stages.items():
    if name in results and results[name].status == DONE:
      print(f"{name}: done before", flush=True)
      continue
    limit = _REHEARSAL_SECONDS if rehearse else seconds
    print(f"{name}: at most {limit:.0f} s", flush=True)
    flags = _QUICK_FLAGS if rehearse else ""
    results[name] = _run_one(name, folder, command(name), limit, flags)
    print(f"  {results[name].status} {results[name].reason}", flush=True)
    written = [dataclasses.asdict(result) for result in results.values()]
    json_files.write(path, {"stages": written})
  print(path, flush=True)
  return [*results.values()]


def _run_one(
  name: str,
  folder: pathlib.Path,
  command: Sequence[str],
  limit: float,
  flags: str,
) -> Result:
  """Runs a stage in a process; returns what it found until its end."""
  notes = folder / "stages" / f"{name}.json"
  notes.unlink(missing_ok=True)
  environment = {
    "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip(),
    _MEMORY_VARIABLE: os.environ.get(_MEMORY_VARIABLE, "0.92"),
  }
  started = time.monotonic()
  part = supervisor.Part(name, tuple(command), environment)
  child = supervisor.Running(part, folder / "logs")
  try:
    while child.code is None and time.monotonic() < started + limit:
      time.sleep(_POLL_SECONDS)
    code = child.code
  finally:
    child.kill()
  written: dict[str, Any] = {"figures": {}}
  with contextlib.suppress(OSError, ValueError):
    written = json_files.read(notes)
  if code is None:
    status = LATE
    reason = f"not done after {limit:.0f} s"
  elif code == 0 and "status" in written:
    status = DONE
    reason = ""
  else:
    status = FAILED
    last_line = (child.tail(1) or ["it wrote nothing"])[-1]
    cause = f"with {code}"
    if code > 128:
      cause = f"by {signal.Signals(code - 128).name}"
    reason = written.get("reason") or f"ended {cause}: {last_line}"
  return Result(
    name=name,
    status=status,
    seconds=round(time.monotonic() - started, 1),
    reason=reason,
    figures=written["figures"],
  )
