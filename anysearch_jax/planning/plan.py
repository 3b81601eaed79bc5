"""The values of a plan: what a configuration needs on a target.

Bytes are those of one device.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from anysearch_jax.host import hardware
from anysearch_jax.planning import compilation, targets

Cells = Sequence[Sequence[str]]


@dataclasses.dataclass(frozen=True)
class Part:
  """One program of a plan.

  devices: number of devices. tokens: that a call processes. read: bytes that a
  call reads from a device's memory at least. kinds: bytes of its arguments by
  kind. gradients: bytes of gradients among the temporary ones. held: bytes that
  other programs keep meanwhile, by kind. predicted: None if it did not compile.
  offloaded: bytes of other programs that are in host memory meanwhile.
  """

  name: str
  devices: int
  tokens: int
  read: int
  kinds: Mapping[str, int]
  gradients: int
  held: Mapping[str, int]
  compiled: compilation.Compilation
  predicted: targets.Prediction | None
  offloaded: int = 0

  @property
  def activations(self) -> int:
    """Temporary bytes other than gradients."""
    return max(0, self.compiled.temporary - self.gradients)

  @property
  def total(self) -> int:
    """Peak bytes in use, those of other programs included."""
    return self.compiled.peak + sum(self.held.values())

  @property
  def tokens_per_second(self) -> float | None:
    """Predicted tokens a second; None for a program without tokens."""
    if not self.predicted or not self.tokens:
      return None
    return self.tokens / self.predicted.total

  def fits(self, target: targets.Target) -> bool:
    return not self.compiled.refused and self.total <= target.capacity

  def to_dict(self) -> dict[str, Any]:
    c = self.compiled
    kinds = {**self.kinds, "activations": self.activations}
    if self.gradients:
      kinds["gradients"] = self.gradients
    return {
      "devices": self.devices,
      "tokens": self.tokens,
      "kinds_bytes": kinds,
      "held_bytes": dict(self.held),
      "offloaded_bytes": self.offloaded,
      "argument_bytes": c.arguments,
      "temporary_bytes": c.temporary,
      "peak_bytes": c.peak,
      "total_bytes": self.total,
      "refused_by_compiler": c.refused,
      "flops": c.flops,
      "read_bytes": self.read,
      "collectives": {
        kind: traffic._asdict() for kind, traffic in (c.traffic or {}).items()
      },
      "full_rematerializations": c.replications,
      "predicted_seconds": self.predicted and self.predicted._asdict(),
      "predicted_tokens_per_second": self.tokens_per_second,
      "compile_seconds": c.seconds,
    }


class Phase(NamedTuple):
  """Seconds of one phase of a step.

  predicted: as assumed. sixty: with 60 % of every peak. floor: at the peaks.
  """

  name: str
  predicted: float
  sixty: float
  floor: float


@dataclasses.dataclass(frozen=True)
class Step:
  """One optimizer step, with the sampling of its episodes.

  overlapped: whether it samples while it trains.
  """

  sampling: tuple[Phase, ...]
  training: tuple[Phase, ...]
  overlapped: bool

  @property
  def phases(self) -> list[Phase]:
    """All phases, and the whole step as the last one."""
    return [
      *self.sampling,
      *self.training,
      Phase(
        "whole step",
        self._whole(lambda phase: phase.predicted),
        self._whole(lambda phase: phase.sixty),
        self._whole(lambda phase: phase.floor),
      ),
    ]

  def _whole(self, seconds: Callable[[Phase], float]) -> float:
    sampled = sum(map(seconds, self.sampling))
    trained = sum(map(seconds, self.training))
    return max(sampled, trained) if self.overlapped else sampled + trained


@dataclasses.dataclass(frozen=True)
class Plan:
  """A configuration on a target.

  mesh: sizes of the training mesh's axes. own_rollout: whether sampling has its
  own devices. parameters, trained: numbers of all and of trained parameters.
  advice: changes that would make it fit; empty if it fits. step: None if a
  program did not compile.
  """

  name: str
  policy: str
  target: targets.Target
  mesh: Mapping[str, int]
  own_rollout: bool
  parameters: int
  trained: int
  parts: tuple[Part, ...]
  assumptions: tuple[str, ...]
  advice: tuple[str, ...] = ()
  step: Step | None = None

  @property
  def too_large(self) -> list[Part]:
    """The programs that exceed a device's capacity."""
    return [part for part in self.parts if not part.fits(self.target)]

  @property
  def fits(self) -> bool:
    return not self.too_large

  @property
  def verdict(self) -> str:
    """Whether the plan fits, as a sentence."""
    capacity = gib(self.target.capacity)
    if self.fits:
      most = max(self.parts, key=lambda part: part.total)
      return (
        f"fits: at most {gib(most.total)} of {capacity} GiB a device, in the "
        f"{most.name}."
      )
    found = ", ".join(f"{p.name} {gib(p.total)}" for p in self.too_large)
    return f"does not fit: {found} of {capacity} GiB a device."

  def to_dict(self) -> dict[str, Any]:
    """Returns the plan as JSON values; FLOPs are those of all devices."""
    return {
      "name": self.name,
      "policy": self.policy,
      "target": str(self.target),
      "mesh": dict(self.mesh),
      "own_rollout_devices": self.own_rollout,
      "parameters": self.parameters,
      "trained_parameters": self.trained,
      "fits": self.fits,
      "verdict": self.verdict,
      "advice": list(self.advice),
      "memory_bytes": self.target.hardware.memory,
      "capacity_bytes": self.target.capacity,
      "programs": {part.name: part.to_dict() for part in self.parts},
      "step_seconds": self.step
      and {phase.name: phase._asdict() for phase in self.step.phases},
      "assumptions": list(self.assumptions),
    }


def gib(size: float) -> str:
  """Formats bytes in GiB, with one decimal."""
  return f"{size / hardware.GIB:.1f}"


def text(plan: Plan) -> str:
  """Formats a plan for a terminal."""
  lines = [_title(plan), "", *_aligned(_rows(plan)), ""]
  if plan.step:
    lines += [*_aligned(_step_rows(plan.step)), ""]
  return "\n".join([*lines, *_sentences(plan, "  ")])


def _aligned(rows: Cells) -> list[str]:
  """Returns lines with aligned columns."""
  widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]

  def line(row: Sequence[str]) -> str:
    first, *rest = (
      cell.ljust(width) if i == 0 else cell.rjust(width)
      for i, (cell, width) in enumerate(zip(row, widths, strict=True))
    )
    return "  ".join([first, *rest]).rstrip()

  return list(map(line, rows))


def markdown(plan: Plan) -> str:
  """Formats a plan as Markdown."""
  lines = [f"**{_title(plan)}**", "", *_markdown_table(_rows(plan)), ""]
  if plan.step:
    lines += [*_markdown_table(_step_rows(plan.step)), ""]
  return "\n".join([*lines, *_sentences(plan, "* ")])


def _markdown_table(cells: Cells) -> list[str]:
  head, *rows = ["| " + " | ".join(row) + " |" for row in cells]
  return [head, "|---" + "|---:" * (len(cells[0]) - 1) + "|", *rows]


def to_json(plan: Plan) -> str:
  """Formats a plan as JSON."""
  return json.dumps(plan.to_dict(), indent=2) + "\n"


def _title(plan: Plan) -> str:
  mesh = " x ".join(f"{axis} {size}" for axis, size in plan.mesh.items())
  sampling = (
    "sampling on devices of its own"
    if plan.own_rollout
    else "sampling on the same devices"
  )
  trained = (
    "all trained"
    if plan.trained == plan.parameters
    else f"{plan.trained / 1e9:.3f} B trained"
  )
  return (
    f"{plan.name} on {plan.target}: mesh {mesh}, {sampling}; "
    f"{plan.parameters / 1e9:.3f} B parameters, {trained}"
  )


def _rows(plan: Plan) -> Cells:
  """Returns table rows with a column for each program, without empty rows."""
  parts = plan.parts

  def row(
    name: str, cell: Callable[[Part], float | None], form: str
  ) -> list[str]:
    values = [cell(part) for part in parts]
    return [name, *("" if v is None else form.format(v) for v in values)]

  def gib(name: str, cell: Callable[[Part], int]) -> list[str]:
    return row(name, lambda p: cell(p) / hardware.GIB or None, "{:.2f}")

  names = dict.fromkeys(
    name for part in parts for name in (*part.kinds, *part.held)
  )
  kinds = [
    # Bytes that other programs keep are in parentheses.
    [kind, *(_kind_cell(part, kind) for part in parts)]
    for kind in names
  ]
  traffic = dict.fromkeys(
    kind for part in parts for kind in (part.compiled.traffic or {})
  )
  capacity = plan.target.capacity
  found = [
    ["", *(part.name for part in parts)],
    row("devices", lambda p: p.devices, "{}"),
    row("tokens a call", lambda p: p.tokens, "{:,}"),
    ["GiB a device", *[""] * len(parts)],
    *(["  " + name, *cells] for name, *cells in kinds),
    gib("  gradients", lambda p: p.gradients),
    gib("  activations, temporaries", lambda p: p.activations),
    gib("  in host memory meanwhile", lambda p: p.offloaded),
    gib("  compiler's peak", lambda p: p.compiled.peak),
    gib("  peak and what is held", lambda p: p.total),
    gib("  capacity", lambda p: capacity),
    row("  filled", lambda p: p.total / capacity, "{:.0%}"),
    row(
      "PFLOP a call, all devices", lambda p: p.compiled.flops / 1e15, "{:.3f}"
    ),
    row("GB a device reads at least", lambda p: p.read / 1e9, "{:.1f}"),
    ["GB a device sends", *[""] * len(parts)],
    *(
      row(f"  {kind}", functools.partial(_gigabytes, kind), "{:.2f}")
      for kind in traffic
    ),
    row(
      "involuntary rematerializations", lambda p: p.compiled.replications, "{}"
    ),
    ["predicted seconds a call", *[""] * len(parts)],
    *(
      row(f"  {name}", functools.partial(_seconds, name), "{:.3f}")
      for name in targets.Prediction._fields
    ),
    row("predicted tokens a second", lambda p: p.tokens_per_second, "{:,.0f}"),
  ]
  return [row for row in found if any(row[1:]) or not row[0].startswith("  ")]


def _step_rows(step: Step) -> Cells:
  """Returns table rows of the phases of a step."""
  together = ", sampling beside training" if step.overlapped else ""
  return [
    [f"seconds of a step{together}", "predicted", "at 60 %", "floor"],
    *(
      [name, *(f"{seconds:.1f}" for seconds in found)]
      for name, *found in step.phases
    ),
  ]


def _gigabytes(kind: str, part: Part) -> float | None:
  """Returns what a device sends in a kind of collective."""
  traffic = (part.compiled.traffic or {}).get(kind)
  return None if traffic is None else traffic.bytes / 1e9


def _seconds(resource: str, part: Part) -> float | None:
  return part.predicted._asdict()[resource] if part.predicted else None


def _kind_cell(part: Part, kind: str) -> str:
  if kind in part.kinds:
    return f"{part.kinds[kind] / hardware.GIB:.2f}"
  if kind in part.held:
    return f"({part.held[kind] / hardware.GIB:.2f})"
  return ""


def _sentences(plan: Plan, bullet: str) -> list[str]:
  lines = [f"Verdict: {plan.verdict}"]
  if plan.advice:
    lines += ["", "What would make it fit:"]
    lines += [bullet + sentence for sentence in plan.advice]
  lines += ["", "Assumed:"]
  return lines + [bullet + sentence for sentence in plan.assumptions]
