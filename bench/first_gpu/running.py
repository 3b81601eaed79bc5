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
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from anysearch_jax.host import json_files
from anysearch_jax.launch import supervisor
from bench import harness

Figures = Mapping[str, Any]
RESULTS, TABLE = "first_gpu.json", "first_gpu.txt"
DONE, FAILED, LATE = "done", "failed", "timed out"
SKIPPED, UNTIMED = "skipped", "no time left"
# A stage with one of these is not run again.
_FINAL = (DONE, SKIPPED)
_POLL = 0.2
_TAIL = 15
# A rehearsal compiles more than it computes.
_QUICK = "--xla_backend_optimization_level=0"
# The share of memory that plans assume.
_MEMORY = "XLA_PYTHON_CLIENT_MEM_FRACTION"


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
    folder: of the run.
    traces: folder for profiler traces of the stage.
  """

  def __init__(self, folder: pathlib.Path, stage: str, *, rehearse: bool):
    self.rehearse = rehearse
    self.folder = folder
    self.traces = folder / "traces" / stage
    self.figures: dict[str, Any] = {}
    self._path = _notes(folder, stage)
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
    # Only the sentence is kept: a traceback would keep the arrays of its
    # frames, and the next case could not have their memory.
    found: Figures
    try:
      found = measure()
    except SkippedError as error:
      found = {"skipped": str(error)}
    except Exception as error:
      found = {"failed": sentence(error)}
    gc.collect()
    self.add({name: dict(found)})

  def check(self) -> None:
    """Raises RuntimeError if every case failed."""
    cases = [f for f in self.figures.values() if isinstance(f, Mapping)]
    if cases and all("failed" in case for case in cases):
      raise RuntimeError(cases[0]["failed"])

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
  seconds: that it should take at most.
  options: keyword arguments of the function.
  xla_flags: that its process adds to XLA_FLAGS.
  extra: whether it only has the time that others leave.
  """

  name: str
  measures: str
  function: str
  seconds: float
  options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  xla_flags: str = ""
  extra: bool = False

  def measure(self, folder: pathlib.Path, *, rehearse: bool) -> None:
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
      traceback.print_exc()
      raise
    else:
      notes.write(status=DONE)


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
    minutes: for all stages together, see `limit`.
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
  for i, stage in enumerate(stages):
    before = earlier.get(stage.name)
    if before is not None and before.status in _FINAL:
      print(f"{stage.name}: {before.status} before", flush=True)
      continue
    left = end - time.monotonic()
    # Rehearsals find mistakes, on machines that may be slow.
    seconds = limit(stages[i:], left) if not rehearse else max(left, 1.0)
    if seconds is None:
      reason = f"needs {stage.seconds:.0f} s of {max(left, 0):.0f}"
      result = Result(stage.name, stage.measures, UNTIMED, 0.0, reason, {})
    else:
      print(f"{stage.name}: {stage.measures} ({seconds:.0f} s)", flush=True)
      flags = f"{stage.xla_flags} {_QUICK if rehearse else ''}"
      result = _run_one(stage, folder, command(stage), seconds, flags)
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


def limit(stages: Sequence[Stage], left: float) -> float | None:
  """Returns the limit of the first stage in seconds; None if too few are left.

  A stage has its own `seconds`. What is left beyond those of all main stages
  may double them.
  """
  first = stages[0]
  if left < first.seconds:
    return None
  kept = sum(stage.seconds for stage in stages if not stage.extra)
  return first.seconds + min(first.seconds, max(0.0, left - kept))


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
  memory = os.environ.get(_MEMORY, "0.92")
  child = supervisor.Child(
    command, log, env={"XLA_FLAGS": flags, _MEMORY: memory}
  )
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
  return "\n".join([*lines, "", f"next: {advice(results)}"]) + "\n"


def _best(figures: Figures) -> tuple[str, Figures]:
  """Returns the case with most tokens a second, or the stage's own figures."""
  cases = {k: v for k, v in figures.items() if isinstance(v, Mapping)}
  found = {k: v for k, v in {"": figures, **cases}.items() if SHARE in v}
  if not found:
    return "", {}
  return max(found.items(), key=lambda item: item[1].get("tokens/s", 0.0))


def highlights(figures: Mapping[str, Figures]) -> Iterator[str]:
  """Yields the best of a stage beside its floor, and the paper's step."""
  paper = {}
  for name, found in figures.items():
    case, best = _best(found)
    if not best:
      continue
    yield (
      f"{name}: {best[MS]:,.4g} ms{f' ({case})' if case else ''}, "
      f"{best[SHARE]:.0%} of the floor; a plan says {best[PLANNED]:,.4g} ms"
    )
    if PAPER in best:
      paper[name] = best[PAPER]
  if {"decode", "prefill", "step_full"} <= paper.keys():
    parts = {name: paper[name] for name in ("decode", "prefill", "step_full")}
    yield (
      f"512 trajectories of the paper, every weight: {sum(parts.values()):.0f} "
      f"s ({', '.join(f'{k} {v:.0f}' for k, v in parts.items())})"
    )


def advice(results: Sequence[Result]) -> str:
  """Returns what to do next: the first of these that applies."""
  for result in results:
    if result.status in (FAILED, LATE):
      return f"read logs/{result.name}.log: {result.reason}"
  figures = {result.name: result.figures for result in results}
  for case, found in figures.get("kernels", {}).items():
    for name, error in found.items():
      kind, _, of = name.partition(" ")
      if of.endswith("error") and error > 2 * found[f"xla {of}"]:
        return (
          f"do not use {kind} ({case}): its {of} is {error:.2g}, XLA's "
          f"{found[f'xla {of}']:.2g}; set engine.attention or batch.attention"
        )
  for name, least, what in _GOALS:
    _, best = _best(figures.get(name, {}))
    if best and best[SHARE] < least:
      return (
        f"{what}, because {name} reaches {best[SHARE]:.0%} of its floor; "
        f"{least:.0%} is the goal"
      )
  for result in results:
    if result.status == UNTIMED:
      return f"the same command again, for {result.name} and what follows"
  return "train: docs/training.md, One GPU"


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
# Names of figures: milliseconds of the best case, their floor's share, what a
# plan predicts, and the seconds of the paper's step.
MS, SHARE, PLANNED = "ms", "share of the floor", "planned, ms"
PAPER = "of the paper's step, s"
# By stage: the least share of the floor, and what to do below it.
_GOALS = (
  ("decode", 0.5, "open traces/trace_decode in XProf"),
  ("step_full", 0.4, "compare step_cublas, and open traces/trace_step"),
  ("step", 0.4, "compare step_cublas, and open traces/trace_step"),
  ("prefill", 0.3, "try other engine.prefill_lanes and prefill_chunk"),
)
_DECODE, _STEP, _GAPS = "engine.decode", "rollouts.step", "engine.gaps"
_4B = {"policy": "Qwen3-4B"}
_LORA = {"lora": True, "remat": "dots", "rows": 2}
_FULL = {"lora": False, "remat": "full", "rows": 1}
_FP8, _SMALL = {"kv_dtype": "float8"}, {"policy": "Qwen3-0.6B"}
_7B, _TRACED = {"policy": "Qwen2.5-7B-Instruct"}, {"profile": True}


def _extra(name: str, measures: str, *arguments: Any) -> Stage:
  return dataclasses.replace(Stage(name, measures, *arguments), extra=True)


# In the order of worth. The first five take 10 minutes at most, and all that
# are not extra take 25.
STAGES = (
  Stage("doctor", "installation and devices", "machine.doctor", 45),
  Stage("peaks", "matrix products and copies", "machine.peaks", 45),
  Stage("decode", "decode, Qwen3-4B", _DECODE, 150, _4B),
  Stage("step_full", "train step, 4B, all weights", _STEP, 150, _FULL),
  Stage("colocated", "a whole loop, 4B", "rollouts.colocated", 200, _4B),
  Stage("step", "train step, 4B, adapters, remat dots", _STEP, 120, _LORA),
  Stage("trace_decode", "profile of a decode", _DECODE, 70, _4B | _TRACED),
  Stage("trace_step", "profile of a step", _STEP, 90, _FULL | _TRACED),
  Stage("prefill", "prefill of passages, 4B", "engine.prefill", 100, _4B),
  Stage("gaps", "sampled against trained log-probs", _GAPS, 110, _SMALL),
  Stage("kernels", "attention at real sizes", "machine.attention", 140),
  Stage("vectors", "exact search of 21 M x 768", "machine.search", 90),
  _extra("decode_fp8", "decode, KV cache in float8", _DECODE, 150, _4B | _FP8),
  _extra("gaps_fp8", "gaps of float8", _GAPS, 110, _SMALL | _FP8),
  _extra("decode_cublas", "decode by cuBLAS", _DECODE, 150, _4B, _CUBLAS),
  _extra("step_cublas", "full step by cuBLAS", _STEP, 150, _FULL, _CUBLAS),
  _extra("decode_no_graphs", "no CUDA graphs", _DECODE, 150, _4B, _NO_GRAPHS),
  _extra("decode_7b", "decode, Qwen2.5-7B", _DECODE, 150, _7B),
)
BY_NAME = {stage.name: stage for stage in STAGES}
