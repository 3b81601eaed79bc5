"""Runs stages one after the other, each in a process with a time limit.

A stage that fails, is killed or runs out of time does not end the others. What
is done stays done: the same command continues. The folder of a run has

    first_gpu.json, first_gpu.txt    the results
    stages/NAME.json                 what a stage found so far
    logs/NAME.log, traces/NAME/      what it printed, and its profiles
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import importlib
import os
import pathlib
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from anysearch_jax.host import json_files
from bench import harness
from launch import supervisor

Figures = Mapping[str, Any]
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


class SkippedError(Exception):
  """The stage does not suit this machine; the message says why."""


@dataclasses.dataclass(frozen=True)
class Result:
  """How a stage ended. reason: why, if it is not done."""

  name: str
  measures: str
  status: str
  seconds: float
  reason: str
  figures: Figures


class Notes:
  """The figures of one stage, by case.

  Args:
    folder: of the run; the stage's file is replaced after each figure.
    stage: its name.
    rehearse: whether sizes are tiny.

  Attributes:
    traces: folder for profiler traces of the stage.
  """

  def __init__(self, folder: pathlib.Path, stage: str, *, rehearse: bool):
    self.rehearse = rehearse
    self.traces = folder / "traces" / stage
    self.figures: dict[str, Any] = {}
    self._path = _notes(folder, stage)
    self._failed: list[str] = []
    self._cases = 0
    self.write()

  def add(self, figures: Figures) -> None:
    """Adds figures that belong to no case."""
    self.figures |= figures
    harness.print_numbers(figures)
    self.write()

  def case(self, name: str, measure: Callable[[], Figures]) -> None:
    """Measures one case; if it fails, its figure says why.

    Memory that only the case used is free afterwards.
    """
    print(f"-- {name}", flush=True)
    self._cases += 1
    # Only the sentence is kept: a traceback would keep the arrays of its
    # frames, and the next case could not have their memory.
    found: Figures
    try:
      found = measure()
    except SkippedError as error:
      found = {"skipped": str(error)}
    except Exception as error:
      found = {"failed": sentence(error)}
      self._failed.append(name)
    gc.collect()
    self.add({name: dict(found)})

  def check(self) -> None:
    """Raises RuntimeError if every case failed."""
    if self._cases and len(self._failed) == self._cases:
      raise RuntimeError(self.figures[self._failed[0]]["failed"])

  def write(self, **outcome: str) -> None:
    """Writes the figures, and how the stage ended."""
    json_files.write(self._path, {**outcome, "figures": self.figures})


def _notes(folder: pathlib.Path, stage: str) -> pathlib.Path:
  return folder / "stages" / f"{stage}.json"


@dataclasses.dataclass(frozen=True)
class Stage:
  """One measurement.

  name: a word, also of its files.
  measures: what, as a phrase.
  function: `module.function` of this package.
  seconds: limit.
  options: keyword arguments of the function.
  xla_flags: that its process adds to XLA_FLAGS.
  """

  name: str
  measures: str
  function: str
  seconds: float
  options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  xla_flags: str = ""

  def measure(self, folder: pathlib.Path, *, rehearse: bool) -> Figures:
    """Measures in this process; notes what it finds and how it ends."""
    notes = Notes(folder, self.name, rehearse=rehearse)
    module, _, function = self.function.partition(".")
    try:
      imported = importlib.import_module(f"bench.first_gpu.{module}")
      getattr(imported, function)(notes, **self.options)
      notes.check()
    except SkippedError as error:
      notes.write(status=SKIPPED, reason=str(error))
    except Exception as error:
      notes.write(status=FAILED, reason=sentence(error))
      raise
    else:
      notes.write(status=DONE)
    return notes.figures


def sentence(error: BaseException) -> str:
  """Returns an error's kind and the first line of its message.

  Of a group of errors it takes the first.
  """
  while isinstance(error, BaseExceptionGroup):
    error = error.exceptions[0]
  lines = str(error).strip().splitlines() or [""]
  return f"{type(error).__name__}: {lines[0][:300]}"


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
    minutes: for all stages together; a stage that begins gets what is left.
    command: returns the command of a stage's process.

  Raises:
    ValueError: the folder has results of a rehearsal and this is none, or the
      other way round.
  """
  for name in ("stages", "logs"):
    (folder / name).mkdir(parents=True, exist_ok=True)
  end = time.monotonic() + 60 * minutes
  earlier = _read(folder, rehearse=rehearse)
  results = dict(earlier)
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
    # In the order of worth, whatever ran first.
    order = [n for n in dict.fromkeys([*BY_NAME, *results]) if n in results]
    results = {name: results[name] for name in order}
    values = [dataclasses.asdict(each) for each in results.values()]
    json_files.write(
      folder / RESULTS,
      {"rehearsal": rehearse, "minutes": minutes, "stages": values},
    )
    (folder / TABLE).write_text(table([*results.values()]))
  return [*results.values()]


def _read(folder: pathlib.Path, *, rehearse: bool) -> dict[str, Result]:
  """Returns the results of earlier runs by stage."""
  path = folder / RESULTS
  if not path.is_file():
    return {}
  found = json_files.read(path)
  if found["rehearsal"] != rehearse:
    raise ValueError(
      f"--output: {path} is {'a' if found['rehearsal'] else 'no'} rehearsal, "
      f"and this run is {'one' if rehearse else 'none'}; name another folder."
    )
  return {each["name"]: Result(**each) for each in found["stages"]}


def _run_one(
  stage: Stage,
  folder: pathlib.Path,
  command: Sequence[str],
  limit: float,
  flags: str,
) -> Result:
  """Runs a stage in a process; returns what it found until its end."""
  notes = _notes(folder, stage.name)
  notes.unlink(missing_ok=True)
  flags = f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()
  started = time.monotonic()
  log = folder / "logs" / f"{stage.name}.log"
  child = supervisor.Child(command, log, env={"XLA_FLAGS": flags})
  try:
    while child.code is None and time.monotonic() < started + limit:
      time.sleep(_POLL)
    code = child.code
  finally:
    child.kill()
  found: dict[str, Any] = {"figures": {}}
  with contextlib.suppress(OSError, ValueError):
    found = json_files.read(notes)
  if code is None:
    status, reason = LATE, f"not done after {limit:.0f} s"
  elif code == 0 and "status" in found:
    status, reason = found["status"], found.get("reason", "")
  else:
    last = (child.tail(_TAIL) or ["it wrote nothing"])[-1]
    how = (
      f"by {signal.Signals(code - 128).name}" if code > 128 else f"with {code}"
    )
    status, reason = FAILED, found.get("reason") or f"ended {how}: {last}"
  return Result(
    name=stage.name,
    measures=stage.measures,
    status=status,
    seconds=round(time.monotonic() - started, 1),
    reason=reason,
    figures=found["figures"],
  )


def table(results: Sequence[Result]) -> str:
  """Formats the results: a line for each stage, then the figures of each."""
  lines = [f"{result.name:<18}{_verdict(result)}" for result in results]
  lines += [*highlights({r.name: r.figures for r in results})]
  for result in results:
    lines += ["", f"{result.name}: {result.measures}", *_lines(result.figures)]
  return "\n".join(lines) + "\n"


def highlights(figures: Mapping[str, Figures]) -> Iterator[str]:
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


def _lines(figures: Figures, indent: int = 2) -> Iterator[str]:
  """Yields a line for each figure; a case's are indented below its name."""
  for name, value in figures.items():
    if isinstance(value, Mapping):
      yield f"{'':{indent}}{name}"
      yield from _lines(value, indent + 2)
    else:
      width = 46 - indent
      yield f"{'':{indent}}{name:<{width}}{harness.shown(value)}"


# XLA chooses between its own Triton kernels and cuBLAS for matrix products.
_CUBLAS = "--xla_gpu_enable_triton_gemm=false"
# Command buffers (CUDA graphs) save launches, which dominate small programs.
_NO_GRAPHS = "--xla_gpu_enable_command_buffer="
_DECODE, _STEP = "engine.decode", "rollouts.step"
_4B = {"policy": "Qwen3-4B"}
_LORA = {"lora": True, "remat": "dots", "rows": 2}
_FULL = {"lora": False, "remat": "full", "rows": 1}
_7B, _TRACED = {"policy": "Qwen2.5-7B-Instruct"}, {"profile": True}

# In the order of worth.
STAGES = (
  Stage("doctor", "installation and devices", "machine.doctor", 90),
  Stage("peaks", "matrix products and copies", "machine.peaks", 90),
  Stage("kernels", "attention against float32", "machine.attention", 180),
  Stage("small", "the quickstart's policy, twice", "rollouts.small", 180),
  Stage("decode", "decode, Qwen3-4B", _DECODE, 300, _4B),
  Stage("step", "train step, 4B, adapters, remat dots", _STEP, 240, _LORA),
  Stage("prefill", "prefill of passages, 4B", "engine.prefill", 150, _4B),
  Stage(
    "gaps",
    "sampled against trained log-probabilities, Qwen3-0.6B",
    "engine.gaps",
    200,
    {"policy": "Qwen3-0.6B"},
  ),
  Stage(
    "colocated",
    "rollout, step and hand-over on one device, 4B with adapters",
    "rollouts.colocated",
    240,
    _4B,
  ),
  Stage("vectors", "exact search of 21 M x 768", "machine.search", 120),
  Stage("step_full", "train step, 4B, all weights", _STEP, 240, _FULL),
  Stage(
    "step_remat",
    "train step, 4B, adapters, remat full",
    _STEP,
    200,
    _LORA | {"remat": "full"},
  ),
  Stage("trace_decode", "profile of a decode", _DECODE, 120, _4B | _TRACED),
  Stage("trace_step", "profile of a step", _STEP, 180, _LORA | _TRACED),
  Stage("decode_cublas", "decode by cuBLAS", _DECODE, 300, _4B, _CUBLAS),
  Stage("step_cublas", "train step by cuBLAS", _STEP, 200, _LORA, _CUBLAS),
  Stage(
    "decode_no_graphs",
    "decode, Qwen3-4B, without command buffers",
    _DECODE,
    300,
    _4B,
    _NO_GRAPHS,
  ),
  Stage(
    "decode_lora", "decode, 4B, adapters", _DECODE, 300, _4B | {"rank": 32}
  ),
  Stage("decode_7b", "decode, Qwen2.5-7B", _DECODE, 300, _7B),
)
BY_NAME = {stage.name: stage for stage in STAGES}
