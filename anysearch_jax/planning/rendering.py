"""Formats a plan as text for a terminal, as Markdown or as JSON."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence

from anysearch_jax.host import hardware
from anysearch_jax.planning import plan as plan_lib
from anysearch_jax.planning import roofline

Cells = Sequence[Sequence[str]]


def text(plan: plan_lib.Plan) -> str:
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


def markdown(plan: plan_lib.Plan) -> str:
  """Formats a plan as Markdown."""
  lines = [f"**{_title(plan)}**", "", *_markdown_table(_rows(plan)), ""]
  if plan.step:
    lines += [*_markdown_table(_step_rows(plan.step)), ""]
  return "\n".join([*lines, *_sentences(plan, "* ")])


def _markdown_table(cells: Cells) -> list[str]:
  head, *rows = ["| " + " | ".join(row) + " |" for row in cells]
  return [head, "|---" + "|---:" * (len(cells[0]) - 1) + "|", *rows]


def to_json(plan: plan_lib.Plan) -> str:
  """Formats a plan as JSON."""
  return json.dumps(plan.to_dict(), indent=2) + "\n"


def _title(plan: plan_lib.Plan) -> str:
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


def _rows(plan: plan_lib.Plan) -> Cells:
  """Returns table rows with a column for each program, without empty rows."""
  parts = plan.parts

  def row(
    name: str, cell: Callable[[plan_lib.Part], float | None], form: str
  ) -> list[str]:
    values = [cell(part) for part in parts]
    return [name, *("" if v is None else form.format(v) for v in values)]

  def gib(name: str, cell: Callable[[plan_lib.Part], int]) -> list[str]:
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
      for name in roofline.Prediction._fields
    ),
    row("predicted tokens a second", lambda p: p.tokens_per_second, "{:,.0f}"),
  ]
  return [row for row in found if any(row[1:]) or not row[0].startswith("  ")]


def _step_rows(step: plan_lib.Step) -> Cells:
  """Returns table rows of the phases of a step."""
  together = ", sampling beside training" if step.overlapped else ""
  return [
    [f"seconds of a step{together}", "predicted", "at 60 %", "floor"],
    *(
      [name, *(f"{seconds:.1f}" for seconds in found)]
      for name, *found in step.phases
    ),
  ]


def _gigabytes(kind: str, part: plan_lib.Part) -> float | None:
  """Returns what a device sends in a kind of collective."""
  traffic = (part.compiled.traffic or {}).get(kind)
  return None if traffic is None else traffic.bytes / 1e9


def _seconds(resource: str, part: plan_lib.Part) -> float | None:
  return part.predicted._asdict()[resource] if part.predicted else None


def _kind_cell(part: plan_lib.Part, kind: str) -> str:
  if kind in part.kinds:
    return f"{part.kinds[kind] / hardware.GIB:.2f}"
  if kind in part.held:
    return f"({part.held[kind] / hardware.GIB:.2f})"
  return ""


def _sentences(plan: plan_lib.Plan, bullet: str) -> list[str]:
  lines = [f"Verdict: {plan.verdict}"]
  if plan.advice:
    lines += ["", "What would make it fit:"]
    lines += [bullet + sentence for sentence in plan.advice]
  lines += ["", "Assumed:"]
  return lines + [bullet + sentence for sentence in plan.assumptions]
