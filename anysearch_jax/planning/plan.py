"""The values of a plan: what a configuration needs on a target.

Bytes are those of one device.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

from anysearch_jax import config as config_lib
from anysearch_jax.host import hardware
from anysearch_jax.planning import compilation, targets, whole_step
from anysearch_jax.policy import sharding
from anysearch_jax.report import tables


@dataclasses.dataclass(frozen=True)
class Plan:
  """A configuration on a target.

  Attributes:
    config: the whole configuration.
    target: the hardware.
    parameters: number of all parameters.
    trained: number of those that are trained.
    parts: the measured programs.
    assumptions: sentences.
    step: the predicted step.
  """

  config: config_lib.ExperimentConfig
  target: targets.Target
  parameters: int
  trained: int
  parts: tuple[compilation.Part, ...]
  assumptions: tuple[str, ...]
  step: whole_step.Step

  @property
  def mesh(self) -> dict[str, int]:
    """The sizes of the training mesh's axes."""
    return {axis: getattr(self.config.mesh, axis) for axis in sharding.AXES}

  @property
  def largest(self) -> compilation.Part:
    return max(self.parts, key=lambda part: part.total)

  @property
  def too_large(self) -> list[compilation.Part]:
    """The programs that exceed a device's capacity."""
    return [part for part in self.parts if not part.fits(self.target)]

  @property
  def hours(self) -> float:
    """Predicted hours of all optimizer steps."""
    return self.config.curriculum.total_steps * self.step.seconds / 3600

  @property
  def fits(self) -> bool:
    return not self.too_large

  @property
  def verdict(self) -> str:
    """Whether the plan fits and how long a step takes, as a sentence."""
    capacity = gib(self.target.capacity)
    if not self.fits:
      sizes = ", ".join(f"{p.name} {gib(p.total)}" for p in self.too_large)
      return f"does not fit: {sizes} of {capacity} GiB a device."
    return (
      f"fits: at most {gib(self.largest.total)} of {capacity} GiB a device, "
      f"in the {self.largest.name}. A step takes about {self.step.seconds:.1f} "
      f"s at {targets.ASSUMED.compute:.0%} of the devices' peak."
    )


def gib(size: float) -> str:
  """Formats bytes in GiB, with one decimal."""
  return f"{size / hardware.GIB:.1f}"


def to_json(plan: Plan) -> str:
  """Formats a plan as JSON."""
  values = {
    "name": plan.config.name,
    "policy": plan.config.policy,
    "target": str(plan.target),
    "mesh": plan.mesh,
    "own_rollout_devices": bool(plan.config.mesh.rollout),
    "parameters": plan.parameters,
    "trained_parameters": plan.trained,
    "fits": plan.fits,
    "verdict": plan.verdict,
    "memory_bytes": plan.target.hardware.memory,
    "capacity_bytes": plan.target.capacity,
    "programs": {part.name: _part_values(part) for part in plan.parts},
    "step_seconds": plan.step.phases,
    "run_hours": plan.hours,
    "assumptions": plan.assumptions,
  }
  return json.dumps(values, indent=2) + "\n"


def _part_values(part: compilation.Part) -> dict[str, Any]:
  kinds = {**part.kinds, "activations": part.activations}
  if part.gradients:
    kinds["gradients"] = part.gradients
  return {
    "devices": part.devices,
    "kinds_bytes": kinds,
    "held_bytes": part.held,
    "offloaded_bytes": part.offloaded,
    "argument_bytes": part.arguments,
    "temporary_bytes": part.temporary,
    "peak_bytes": part.peak,
    "total_bytes": part.total,
    "refused_by_compiler": part.refused,
    "full_rematerializations": part.replications,
  }


def text(plan: Plan) -> str:
  """Formats a plan for a terminal: tables, verdict and what is assumed."""
  together = ", sampling beside training" if plan.step.overlapped else ""
  step = [
    [f"predicted seconds of a step{together}", ""],
    *([name, f"{size:.1f}"] for name, size in plan.step.phases.items()),
    [
      f"hours of {plan.config.curriculum.total_steps:,} steps",
      f"{plan.hours:.1f}",
    ],
  ]
  return "\n".join(
    [
      _title(plan),
      "",
      *tables.aligned(_rows(plan)),
      "",
      *tables.aligned(step),
      "",
      f"Verdict: {plan.verdict}",
      "",
      "Assumed:",
      *("  " + sentence for sentence in plan.assumptions),
    ]
  )


def _title(plan: Plan) -> str:
  mesh = " x ".join(f"{axis} {size}" for axis, size in plan.mesh.items())
  own = "devices of its own" if plan.config.mesh.rollout else "the same devices"
  trained = (
    "all trained"
    if plan.trained == plan.parameters
    else f"{plan.trained / 1e9:.3f} B trained"
  )
  return (
    f"{plan.config.name} on {plan.target}: mesh {mesh}, sampling on {own}; "
    f"{plan.parameters / 1e9:.3f} B parameters, {trained}"
  )


def _rows(plan: Plan) -> list[list[str]]:
  """Returns table rows with a column for each program, without empty rows."""
  parts, capacity = plan.parts, plan.target.capacity

  def row(
    name: str, cell: Callable[[compilation.Part], float | None], form: str
  ) -> list[str]:
    values = [cell(part) for part in parts]
    return [name, *("" if v is None else form.format(v) for v in values)]

  def in_gib(name: str, cell: Callable[[compilation.Part], int]) -> list[str]:
    return row(f"  {name}", lambda p: cell(p) / hardware.GIB or None, "{:.2f}")

  kinds = dict.fromkeys(
    name for part in parts for name in (*part.kinds, *part.held)
  )
  rows = [
    ["", *(part.name for part in parts)],
    row("devices", lambda p: p.devices, "{}"),
    ["GiB a device", *[""] * len(parts)],
    *(["  " + kind, *(_kind_cell(p, kind) for p in parts)] for kind in kinds),
    in_gib("gradients", lambda p: p.gradients),
    in_gib("activations, temporaries", lambda p: p.activations),
    in_gib("in host memory meanwhile", lambda p: p.offloaded),
    in_gib("compiler's peak", lambda p: p.peak),
    in_gib("peak and what is held", lambda p: p.total),
    in_gib("capacity", lambda p: capacity),
    row("  filled", lambda p: p.total / capacity, "{:.0%}"),
    row("involuntary rematerializations", lambda p: p.replications, "{}"),
  ]
  return [row for row in rows if any(row[1:]) or not row[0].startswith("  ")]


def _kind_cell(part: compilation.Part, kind: str) -> str:
  """Returns GiB of a kind, in parentheses if other programs keep it."""
  if kind in part.kinds:
    return f"{part.kinds[kind] / hardware.GIB:.2f}"
  return f"({part.held[kind] / hardware.GIB:.2f})" if kind in part.held else ""
