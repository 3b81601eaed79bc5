"""What figures are compared with: the floor, and what a plan predicts."""

from __future__ import annotations

import dataclasses
import functools

import jax

from anysearch_jax.host import hardware, json_files
from anysearch_jax.planning import targets, whole_step
from bench.first_gpu import running
from configs import qwen3_4b

_CONFIG = qwen3_4b.get_config()
EPISODES = whole_step.episodes_of(_CONFIG)
_PROMPTS = whole_step.PROMPT * (1 - 1 / _CONFIG.group)
# Tokens of an episode that the engine prefills.
PREFILLED = EPISODES.tokens - EPISODES.generated - _PROMPTS


def beside(
  notes: running.Notes,
  seconds: float,
  *,
  flops: float,
  read: float,
  paper: float,
  planned_flops: float = 0.0,
) -> dict[str, float]:
  """Returns measured milliseconds with their floor and a plan's prediction.

  Args:
    notes: of the stage, beside those of `peaks`.
    seconds: measured.
    flops: of the mathematics.
    read: bytes that have to be read.
    paper: the same work in seconds for each episode of the paper's step.
    planned_flops: those that the program computes; 0: as `flops`.
  """
  out = {
    running.MS: 1e3 * seconds,
    "TFLOP/s": flops / seconds / 1e12,
    running.PAPER: EPISODES.trajectories * paper,
  }
  if (found := _hardware(notes)) is None:
    return out
  predict = functools.partial(
    targets.predict, targets.Target(found, (1,)), read=read, traffic={}
  )
  floor = predict(flops=flops).floor
  planned = predict(flops=planned_flops or flops)
  sixty = predict(flops=planned_flops or flops, assumed=whole_step.SIXTY)
  return out | {
    "floor, ms": 1e3 * floor,
    running.PLANNED: 1e3 * planned.total,
    "planned at 60 % of the peaks, ms": 1e3 * sixty.total,
    running.SHARE: floor / seconds,
  }


def _hardware(notes: running.Notes) -> hardware.Hardware | None:
  """Returns the data sheet of the device, or what `peaks` measured."""
  device = jax.local_devices()[0]
  if known := hardware.of_kind(device.device_kind):
    return known
  path = notes.folder / "stages/peaks.json"
  figures = json_files.read(path)["figures"] if path.is_file() else {}
  flops, moved = (
    max((case.get(unit, 0.0) for case in figures.values()), default=0.0)
    for unit in ("TFLOP/s", "GB/s")
  )
  if not flops or not moved:
    return None
  return dataclasses.replace(
    hardware.HARDWARE["h100"],
    name=device.device_kind,
    flops=1e12 * flops,
    memory_bandwidth=1e9 * moved,
    source="measured",
  )
