"""The values of a plan: what a configuration needs on a target.

Bytes are those of one device.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from anysearch_jax import config as config_lib
from anysearch_jax.host import hardware
from anysearch_jax.planning import compilation, targets
from anysearch_jax.policy import sharding
from anysearch_jax.report import tables

Cells = Sequence[Sequence[str]]


class Phase(NamedTuple):
  """Seconds of one phase of a step.

  predicted: as assumed. sixty: with 60 % of every peak. floor: at the peaks.
  """

  name: str
  predicted: float
  sixty: float
  floor: float


class Step(NamedTuple):
  """One optimizer step, with the sampling of its episodes.

  overlapped: whether it samples while it trains.
  """

  sampling: tuple[Phase, ...]
  training: tuple[Phase, ...]
  overlapped: bool

  @property
  def phases(self) -> list[Phase]:
    """All phases, and the whole step as the last one."""
    sampled, trained = (
      [sum(seconds) for seconds in zip(*(phase[1:] for phase in phases))]
      for phases in (self.sampling, self.training)
    )
    both = max if self.overlapped else lambda x, y: x + y
    whole = Phase("whole step", *map(both, sampled, trained))
    return [*self.sampling, *self.training, whole]


@dataclasses.dataclass(frozen=True)
class Plan:
  """A configuration on a target.

  parameters, trained: numbers of all and of trained parameters. advice: changes
  that would make it fit; empty if it fits. step: None if a program did not
  compile. sized: share of the KV cache that `engine.kv_tokens` sizes.
  """

  config: config_lib.ExperimentConfig
  target: targets.Target
  parameters: int
  trained: int
  parts: tuple[compilation.Part, ...]
  assumptions: tuple[str, ...]
  advice: tuple[str, ...] = ()
  step: Step | None = None
  sized: float = 1.0

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
  def hours(self) -> list[float]:
    """Hours of all optimizer steps: predicted, with 60 % and at the peaks."""
    steps = self.config.curriculum.total_steps
    step = self.step.phases[-1][1:] if self.step else ()
    return [steps * seconds / 3600 for seconds in step]

  @property
  def fits(self) -> bool:
    return not self.too_large

  @property
  def verdict(self) -> str:
    """Whether the plan fits, as a sentence."""
    capacity = gib(self.target.capacity)
    if self.fits:
      return (
        f"fits: at most {gib(self.largest.total)} of {capacity} GiB a device, "
        f"in the {self.largest.name}."
      )
    found = ", ".join(f"{p.name} {gib(p.total)}" for p in self.too_large)
    return f"does not fit: {found} of {capacity} GiB a device."


def gib(size: float) -> str:
  """Formats bytes in GiB, with one decimal."""
  return f"{size / hardware.GIB:.1f}"


def to_json(plan: Plan) -> str:
  """Formats a plan as JSON; FLOPs are those of all devices."""
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
    "advice": plan.advice,
    "memory_bytes": plan.target.hardware.memory,
    "capacity_bytes": plan.target.capacity,
    "programs": {part.name: _part_values(part) for part in plan.parts},
    "step_seconds": plan.step
    and {phase.name: phase._asdict() for phase in plan.step.phases},
    "run_hours": plan.step and dict(zip(Phase._fields[1:], plan.hours)),
    "assumptions": plan.assumptions,
  }
  return json.dumps(values, indent=2) + "\n"


def _part_values(part: compilation.Part) -> dict[str, Any]:
  kinds = {**part.kinds, "activations": part.activations}
  if part.gradients:
    kinds["gradients"] = part.gradients
  return {
    "devices": part.devices,
    "tokens": part.tokens,
    "kinds_bytes": kinds,
    "held_bytes": part.held,
    "offloaded_bytes": part.offloaded,
    "argument_bytes": part.arguments,
    "temporary_bytes": part.temporary,
    "peak_bytes": part.peak,
    "total_bytes": part.total,
    "refused_by_compiler": part.traffic is None,
    "flops": part.flops,
    "read_bytes": part.read,
    "collectives": {
      kind: traffic._asdict() for kind, traffic in (part.traffic or {}).items()
    },
    "full_rematerializations": part.replications,
    "predicted_seconds": part.predicted and part.predicted._asdict(),
    "predicted_tokens_per_second": part.tokens_per_second,
  }


def text(plan: Plan, *, before: Mapping[str, Any] | None = None) -> str:
  """Formats a plan for a terminal: tables, verdict and what is assumed.

  `before` has another plan's `step_seconds` of `to_json`, which stand beside
  this plan's.
  """
  lines = [_title(plan), "", *tables.aligned(_rows(plan)), ""]
  if plan.step:
    lines += [*tables.aligned(_step_rows(plan, plan.step, before)), ""]
  lines += [f"Verdict: {plan.verdict}"]
  for title, sentences in (
    ("What would make it fit:", plan.advice),
    ("Assumed:", plan.assumptions),
  ):
    if sentences:
      lines += ["", title, *("  " + sentence for sentence in sentences)]
  return "\n".join(lines)


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


def _rows(plan: Plan) -> Cells:
  """Returns table rows with a column for each program, without empty rows."""
  parts, capacity = plan.parts, plan.target.capacity

  def row(
    name: str, cell: Callable[[compilation.Part], float | None], form: str
  ) -> list[str]:
    values = [cell(part) for part in parts]
    return [name, *("" if v is None else form.format(v) for v in values)]

  def gib(name: str, cell: Callable[[compilation.Part], int]) -> list[str]:
    return row(name, lambda p: cell(p) / hardware.GIB or None, "{:.2f}")

  def heading(name: str) -> list[str]:
    return [name, *[""] * len(parts)]

  def sent(kind: str) -> list[str]:
    """Returns what a device sends in a kind of collective."""
    found = [(part.traffic or {}).get(kind) for part in parts]
    return [f"  {kind}", *(f"{t.bytes / 1e9:.2f}" if t else "" for t in found)]

  def seconds(name: str) -> list[str]:
    return row(
      f"  {name}",
      lambda p: p.predicted and getattr(p.predicted, name),
      "{:.3f}",
    )

  kinds = dict.fromkeys(
    name for part in parts for name in (*part.kinds, *part.held)
  )
  traffic = dict.fromkeys(kind for part in parts for kind in part.traffic or {})
  found = [
    ["", *(part.name for part in parts)],
    row("devices", lambda p: p.devices, "{}"),
    row("tokens a call", lambda p: p.tokens, "{:,}"),
    heading("GiB a device"),
    *(["  " + kind, *(_kind_cell(p, kind) for p in parts)] for kind in kinds),
    gib("  gradients", lambda p: p.gradients),
    gib("  activations, temporaries", lambda p: p.activations),
    gib("  in host memory meanwhile", lambda p: p.offloaded),
    gib("  compiler's peak", lambda p: p.peak),
    gib("  peak and what is held", lambda p: p.total),
    gib("  capacity", lambda p: capacity),
    row("  filled", lambda p: p.total / capacity, "{:.0%}"),
    row("PFLOP a call, all devices", lambda p: p.flops / 1e15, "{:.3f}"),
    row("GB a device reads at least", lambda p: p.read / 1e9, "{:.1f}"),
    heading("GB a device sends"),
    *map(sent, traffic),
    row("involuntary rematerializations", lambda p: p.replications, "{}"),
    heading("predicted seconds a call"),
    *map(seconds, targets.Prediction._fields),
    row("predicted tokens a second", lambda p: p.tokens_per_second, "{:,.0f}"),
  ]
  return [row for row in found if any(row[1:]) or not row[0].startswith("  ")]


def _kind_cell(part: compilation.Part, kind: str) -> str:
  """Returns GiB of a kind, in parentheses if other programs keep it."""
  if kind in part.kinds:
    return f"{part.kinds[kind] / hardware.GIB:.2f}"
  return f"({part.held[kind] / hardware.GIB:.2f})" if kind in part.held else ""


def _step_rows(
  plan: Plan, step: Step, before: Mapping[str, Any] | None
) -> Cells:
  """Returns table rows of the phases of a step, and of the whole run."""
  together = ", sampling beside training" if step.overlapped else ""
  heads, fields = ["predicted", "at 60 %", "floor"], Phase._fields[1:]
  found = {phase.name: phase[1:] for phase in step.phases}
  earlier: dict[str, tuple[float, ...]] = {}
  if before is not None:
    earlier = {
      name: tuple(phase[field] for field in fields)
      for name, phase in before.items()
    }
    heads += [f"{head}, before" for head in heads]
  # The last phase of both is the whole step.
  names = dict.fromkeys([*list(found)[:-1], *earlier, "whole step"])
  nothing = (0.0,) * len(fields) if earlier else ()
  rows = {
    name: (*found.get(name, nothing), *earlier.get(name, nothing))
    for name in names
  }
  hours = f"hours of {plan.config.curriculum.total_steps:,} steps"
  rows[hours] = tuple(plan.hours)
  width = len(heads)
  return [
    [f"seconds of a step{together}", *heads],
    *(
      [name, *(f"{x:.1f}" for x in values), *[""] * (width - len(values))]
      for name, values in rows.items()
    ),
  ]
