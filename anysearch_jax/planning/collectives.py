"""Counts the bytes that a compiled program sends between devices, by kind.

A collective counts as a ring algorithm: in a group of n devices, each sends
(n - 1) / n of the whole array, twice that for an all-reduce. See
https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md. Bodies of
loops count once for each iteration.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from anysearch_jax.planning import hlo

# Ratio of the bytes that a device sends to the bytes of its operand, for n
# devices in a group.
_RINGS = {
  "all-gather": lambda n: n - 1,
  "reduce-scatter": lambda n: (n - 1) / n,
  "all-reduce": lambda n: 2 * (n - 1) / n,
  "all-to-all": lambda n: (n - 1) / n,
  "ragged-all-to-all": lambda n: (n - 1) / n,
  "collective-permute": lambda n: 1,
  "collective-broadcast": lambda n: 1,
}
# The TPU compiler fuses an all-reduce and the slicing of its result into a
# computation of this name; it is a reduce-scatter.
_SCATTER_FUSION = "all-reduce-scatter"
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_GROUPS = re.compile(
  r"replica_groups=(?:\{\{(?P<first>[\d,]+)\}|\[\d+,(?P<size>\d+)\]"
  r"|mesh\[(?P<mesh>[^\]]*)\][^{]*\{(?P<axes>[^}]*)\})"
)
_MESH_AXIS = re.compile(r"'([^']+)'=(\d+)")
_GROUP_AXIS = re.compile(r"'([^']+)'(?::\(\d+\)(\d+))?")
_INDEX = re.compile(r"\bindex=(\d+)")
_PASSED_ON = ("copy", "bitcast", "copy-start", "copy-done")


class Traffic(NamedTuple):
  """Traffic of one kind in one call: operations run, bytes a device sends."""

  operations: int
  bytes: float


def count(text: str, *, trips: int = 1) -> dict[str, Traffic]:
  """Counts the traffic of a compiled module by kind of collective.

  Args:
    text: the optimized HLO, as `compiled.as_text()` returns it.
    trips: iterations of a loop whose bound the text does not show.
  """
  module = hlo.parse(text)
  return _computation(module, module.entry, trips)


def total(traffic: Mapping[str, Traffic]) -> float:
  """Returns the bytes that a device sends in one call."""
  return sum(t.bytes for t in traffic.values())


def group_size(attributes: str, partitions: int) -> int:
  """Returns the number of devices in a group of a collective.

  XLA writes groups as lists `{{0,1},{2,3}}`, as a reshaped count `[2,2]<=[4]`,
  or as axes of a mesh `mesh['a'=2,'b'=2] {'a'}`. Without groups, all
  `partitions` devices are one group.
  """
  found = _GROUPS.search(attributes)
  if not found:
    return partitions
  if found["first"]:
    return len(found["first"].split(","))
  if found["size"]:
    return int(found["size"])
  sizes = dict(_MESH_AXIS.findall(found["mesh"]))
  # A part of an axis is written 'name':(parts before it)size.
  axes = _GROUP_AXIS.findall(found["axes"])
  return math.prod(int(part or sizes[name]) for name, part in axes)


def _computation(
  module: hlo.Module, name: str, trips: int
) -> dict[str, Traffic]:
  sums: dict[str, Traffic] = {}
  for instruction in module.computations[name].values():
    for kind, new in _instruction(module, name, instruction, trips).items():
      old = sums.get(kind, Traffic(0, 0.0))
      sums[kind] = Traffic(
        old.operations + new.operations, old.bytes + new.bytes
      )
  return sums


def _instruction(
  module: hlo.Module, within: str, i: hlo.Instruction, trips: int
) -> dict[str, Traffic]:
  kind = i.opcode.removesuffix("-start")
  if kind in _RINGS:
    return _collective(module, within, kind, i)
  if i.opcode == "while":
    n = _loop_trips(module, within, i, trips)
    body = _computation(module, i.called("body")[0], trips)
    return {k: Traffic(n * t.operations, n * t.bytes) for k, t in body.items()}
  if i.opcode == "conditional":
    branches = i.called(
      "branch_computations", "true_computation", "false_computation"
    )
    return max((_computation(module, b, trips) for b in branches), key=total)
  if i.opcode in ("fusion", "call", "async-start"):
    return _computation(module, i.called("calls", "to_apply")[0], trips)
  return {}


def _collective(
  module: hlo.Module, within: str, kind: str, i: hlo.Instruction
) -> dict[str, Traffic]:
  """Sizes a collective by its operands.

  The result of a `-start` operation contains operands and results, so its size
  cannot be used.
  """
  if kind == "all-reduce" and within.startswith(_SCATTER_FUSION):
    kind = "reduce-scatter"
  computation = module.computations[within]
  given = sum(hlo.size(computation[name].type) for name in i.operands)
  n = group_size(i.attributes, module.partitions)
  return {kind: Traffic(1, _RINGS[kind](n) * given)}


def _loop_trips(
  module: hlo.Module, within: str, loop: hlo.Instruction, trips: int
) -> int:
  """Returns a loop's iterations: as XLA annotates them, or its constant bound.

  JAX's loops of fixed length count from 0. The bound is a constant in the
  condition or in the loop's initial state. A loop without either gets `trips`.
  """
  known = _TRIPS.search(loop.attributes)
  if known:
    return int(known[1])
  (condition,) = loop.called("condition")
  test = module.computations[condition]
  if not _counts_up(module, test):
    return trips
  bounds = _numbers(test.values()) or _numbers(
    _at_start(module.computations[within], loop, test)
  )
  return bounds[0] if len(bounds) == 1 else trips


def _counts_up(module: hlo.Module, computation: hlo.Computation) -> bool:
  """Whether the condition is `<`, directly or in a fusion."""
  root = next(i for i in computation.values() if i.root)
  if root.opcode == "fusion":
    return _counts_up(module, module.computations[root.called("calls")[0]])
  return root.opcode == "compare" and "direction=LT" in root.attributes


def _numbers(instructions: Iterable[hlo.Instruction]) -> list[int]:
  """Returns the positive constants; 0 is where a loop starts, not its bound."""
  numbers = [
    int(i.inside)
    for i in instructions
    if i.opcode == "constant" and i.inside.isdecimal()
  ]
  return [n for n in numbers if n > 0]


def _at_start(
  computation: hlo.Computation, loop: hlo.Instruction, test: hlo.Computation
) -> list[hlo.Instruction]:
  """Returns the initial values of the state that the condition reads."""

  def source(name: str) -> hlo.Instruction:
    i = computation[name]
    return source(i.operands[0]) if i.opcode in _PASSED_ON else i

  state = source(loop.operands[0])
  if state.opcode != "tuple":
    return []
  indices = (
    _INDEX.search(i.attributes)
    for i in test.values()
    if i.opcode == "get-tuple-element"
  )
  return [source(state.operands[int(index[1])]) for index in indices if index]
