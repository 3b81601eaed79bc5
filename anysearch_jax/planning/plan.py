"""Plans: what a configuration needs on a target, and how long a step takes.

Bytes are those of one device.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from anysearch_jax import config as config_lib
from anysearch_jax.host import captured_stderr, hardware
from anysearch_jax.planning import compilation, programs, targets, whole_step
from anysearch_jax.policy import architecture as architecture_lib
from anysearch_jax.policy import lora, sharding, table
from anysearch_jax.policy import parameters as weights
from anysearch_jax.report import tables


@dataclasses.dataclass(frozen=True)
class Plan:
  """A configuration on a target.

  Attributes:
    config: the whole configuration.
    target: the hardware.
    parameters: number of all parameters.
    trained: number of parameters that are trained.
    parts: the measured programs.
    assumptions: sentences on what the plan assumes.
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
    largest = max(self.parts, key=lambda part: part.total)
    return (
      f"fits: at most {gib(largest.total)} of {capacity} GiB a device, in the "
      f"{largest.name}. A step takes about {self.step.seconds:.1f} "
      "s, if it is as efficient as MaxText's published steps."
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
    "parameters": plan.parameters,
    "trained_parameters": plan.trained,
    "fits": plan.fits,
    "verdict": plan.verdict,
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
  }


def text(plan: Plan) -> str:
  """Formats a plan for a terminal: tables, verdict and assumptions."""
  curriculum = plan.config.curriculum
  together = ", sampling beside training" if plan.step.overlapped else ""
  step = [
    [f"predicted seconds of a step{together}", ""],
    *([name, f"{size:.1f}"] for name, size in plan.step.phases.items()),
    [f"hours of {curriculum.total_steps:,} steps", f"{plan.hours:.1f}"],
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
  sampling_devices = "the same devices"
  if plan.config.mesh.rollout:
    sampling_devices = "devices of its own"
  trained = (
    "all trained"
    if plan.trained == plan.parameters
    else f"{plan.trained / 1e9:.3f} B trained"
  )
  return (
    f"{plan.config.name} on {plan.target}: mesh {mesh}, sampling on "
    f"{sampling_devices}; {plan.parameters / 1e9:.3f} B parameters, {trained}"
  )


def _rows(plan: Plan) -> list[list[str]]:
  """Returns table rows with a column for each program, without empty rows."""
  parts = plan.parts
  capacity = plan.target.capacity

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
  ]
  return [row for row in rows if any(row[1:]) or not row[0].startswith("  ")]


def _kind_cell(part: compilation.Part, kind: str) -> str:
  """Returns GiB of a kind, in parentheses if other programs keep it."""
  if kind in part.kinds:
    return f"{part.kinds[kind] / hardware.GIB:.2f}"
  return f"({part.held[kind] / hardware.GIB:.2f})" if kind in part.held else ""


def make(
  config: config_lib.ExperimentConfig,
  a: architecture_lib.Architecture,
  target: targets.Target,
  *,
  expected: whole_step.Episodes | None = None,
  log: Callable[[str], None] = lambda line: None,
) -> Plan:
  """Compiles the programs of a configuration for a target.

  Args:
    config: its training mesh is on the target's devices. If its rollout devices
      have larger indices, sampling has another target of the same kind.
    a: the policy's architecture, without adapters.
    target: the hardware to plan for.
    expected: the episodes; by default those of `whole_step.episodes_of`.
    log: called with a sentence before each program is compiled.

  Raises:
    ValueError: the mesh does not suit the target or the policy.
    ModuleNotFoundError: a compiler is not installed.
  """
  expected = expected or whole_step.episodes_of(config)
  mesh = config.mesh
  filled = expected.micro_batches(config.batch, mesh.rows)
  all_programs = programs.programs(config, a, devices=devices(mesh, target))
  parts = []
  for program in all_programs:
    log(f"compiling the {program.name} for {target}")
    parts.append(compilation.measure(program, all_programs, target))
  decode = parts[-1]
  parts.append(
    compilation.hand_over(
      all_programs, itemsize=jnp.dtype(config.compute_dtype).itemsize
    )
  )
  step = whole_step.predict(config, a, expected, decode=decode, target=target)
  adapted = lora.attach(a, config.lora)
  return Plan(
    config=config,
    target=target,
    parameters=weights.count(table.rows(adapted)),
    trained=weights.count(table.trainable_rows(adapted)),
    parts=tuple(parts),
    assumptions=(
      f"An optimizer step packs {expected.trajectories} episodes of "
      f"{expected.tokens:,} tokens on average, spread by "
      f"{whole_step.SPREAD:.0%}, into {filled} micro-batches.",
      _memory_sentence(target.hardware),
      *targets.sentences(target),
      _prime_rl_sentence(config, a, expected, target),
      *whole_step.sentences(config, expected),
      *_servers_sentence(config, decode, target),
      *sent_bytes_sentence(config, a),
    ),
    step=step,
  )


def devices(
  mesh: config_lib.MeshConfig, target: targets.Target
) -> list[jax.Device]:
  """Returns the compile-only devices that the indices of a mesh refer to.

  Raises:
    ValueError: training needs more devices than the target has, or the rollout
      devices are not all in one copy of the target.
  """
  needed_counts = [mesh.size, *(i + 1 for i in mesh.trainer)]
  if max(needed_counts) > target.count:
    raise ValueError(
      f"The mesh of {mesh} (mesh.trainer {mesh.trainer}) needs more devices "
      f"than {target} has; plan for a larger target, or another mesh."
    )
  copies = {index // target.count for index in mesh.rollout} or {0}
  if len(copies) > 1:
    raise ValueError(
      f"mesh.rollout {mesh.rollout} are not all on one {target}: plan for a "
      "target that has all of them, or let sampling share those of training "
      "(mesh.rollout=())."
    )
  # Rollout devices behind the target's are those of another copy of it.
  with captured_stderr.standard_error():
    return [
      device
      for _ in range(max(copies) + 1)
      for device in targets.devices(target)
    ]


def _memory_sentence(device: hardware.Hardware) -> str:
  """States how much of a device's memory programs may fill."""
  size = gib(device.memory)
  share = device.head_room
  if not isinstance(device, hardware.Gpu):
    return f"A program may fill {size} GiB, its compiler's limit."
  return (
    f"Programs may fill {share} of {size} GiB: the rest is for the CUDA "
    "context, NCCL and libraries' workspaces, which the compiler does not "
    "count. JAX by itself takes 0.75: run with "
    f"XLA_PYTHON_CLIENT_MEM_FRACTION={share}."
  )


def _prime_rl_sentence(
  config: config_lib.ExperimentConfig,
  a: architecture_lib.Architecture,
  expected: whole_step.Episodes,
  target: targets.Target,
) -> str:
  """States how long training takes at the efficiency of another trainer."""
  slower = whole_step.training_seconds(
    config, a, expected, target=target, efficiency=targets.PRIME_RL
  )
  return (
    f"Training would take {slower:.1f} s a step if it were as efficient as "
    "prime-rl's published steps (docs/will_it_fit.md compares them)."
  )


def _servers_sentence(
  config: config_lib.ExperimentConfig,
  decode: compilation.Part,
  target: targets.Target,
) -> list[str]:
  """States the memory of servers on the training devices, if any."""
  if not config.servers_share:
    return []
  trainer_bytes = sum(decode.held.values())
  weight_bytes = decode.kinds["engine weights"]
  server_bytes = target.capacity - trainer_bytes
  share = max(0.0, server_bytes / target.hardware.memory)
  return [
    "The servers have these devices while they sample (servers.colocated), "
    f"beside {gib(trainer_bytes)} GiB of the trainer: weights "
    f"({gib(weight_bytes)} GiB), KV cache and CUDA graphs may take "
    f"{math.floor(100 * share) / 100} of a device, STATIC somewhat less. "
    "Prefill and decode are those of the in-process engine."
  ]


def sent_bytes_sentence(
  config: config_lib.ExperimentConfig, a: architecture_lib.Architecture
) -> list[str]:
  """States the bytes of a version that servers get, if any."""
  if not config.engine.has_servers:
    return []
  size = jnp.dtype(config.compute_dtype).itemsize
  whole = f"{size * weights.count(table.base_rows(a)) / 1e9:.1f} GB"
  if config.lora.rank:
    adapted = table.adapter_rows(lora.attach(a, config.lora))
    return [
      f"Servers get {size * weights.count(adapted) / 1e6:.0f} MB of "
      f"adapters a version, and once {whole} of the base."
    ]
  delta = (
    " at most, as deltas (servers.deltas)" if config.servers.deltas else ""
  )
  return [f"Servers get {whole} a version{delta}."]
