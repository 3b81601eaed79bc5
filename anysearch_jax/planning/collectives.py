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

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
# An attribute over several lines may also have a line that begins with a brace.
_END = re.compile(r"^\}(, execution_thread=.*)?$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%([\w.\-]+) = (.*)$")
_OPCODE = re.compile(r"([a-z][\w\-]*)\(")
_ARRAY = re.compile(r"\b(pred|[a-z]+(\d+)\w*)\[([\d,]*)\]")
_NAME = re.compile(r"%([\w.\-]+(?:#\d+)?)")
# An element of a tuple as an operand, which newer compilers write in place of
# a get-tuple-element.
_ELEMENT = re.compile(r"%(([\w.\-]+)#(\d+))")
_PARTITIONS = re.compile(r"\bnum_partitions=(\d+)")
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


def total(traffic: Mapping[str, Traffic]) -> float:
  """Returns the bytes that a device sends in one call."""
  return sum(t.bytes for t in traffic.values())


def count(text: str, *, trips: int = 1) -> dict[str, Traffic]:
  """Counts the traffic of a compiled module by kind of collective.

  `text` is the optimized HLO, as `compiled.as_text()` or XLA's dump has it, and
  `trips` are the iterations of a loop whose bound it does not show.

  Raises:
    ValueError: the text has no entry computation, or an instruction is
      malformed.
  """
  module = _parse(text, trips)
  return module.traffic(module.entry)


class _Instruction(NamedTuple):
  """`%name = type opcode(inside), attributes`."""

  type: str
  opcode: str
  inside: str
  attributes: str
  root: bool

  @property
  def operands(self) -> list[str]:
    """The names of its operands, instructions of the same computation."""
    return _NAME.findall(self.inside)

  def called(self, *keys: str) -> list[str]:
    """Returns the computations that the attributes `keys` name."""
    names = []
    for key in keys:
      pattern = rf"\b{key}=(?:(%[\w.\-]+)|\{{([^}}]*)\}})"
      for one, several in re.findall(pattern, self.attributes):
        names += _NAME.findall(one or several)
    return names


_Computation = Mapping[str, _Instruction]


class _Module(NamedTuple):
  """A module: computations by name, each with its instructions by name.

  trips: iterations of a loop whose bound the text does not show.
  """

  entry: str
  computations: Mapping[str, _Computation]
  partitions: int
  trips: int

  def traffic(self, name: str) -> dict[str, Traffic]:
    """Returns the traffic of a computation, with those that it calls."""
    sums: dict[str, Traffic] = {}
    for i in self.computations[name].values():
      for kind, new in self._of_instruction(name, i).items():
        old = sums.get(kind, Traffic(0, 0.0))
        sums[kind] = Traffic(
          old.operations + new.operations, old.bytes + new.bytes
        )
    return sums

  def _of_instruction(self, within: str, i: _Instruction) -> dict[str, Traffic]:
    kind = i.opcode.removesuffix("-start")
    if kind in _RINGS:
      if kind == "all-reduce" and within.startswith(_SCATTER_FUSION):
        kind = "reduce-scatter"
      # Sized by its operands: the result of a `-start` operation contains them
      # and the results.
      known = self.computations[within]
      given = sum(size(known[name].type) for name in i.operands)
      n = group_size(i.attributes, self.partitions)
      return {kind: Traffic(1, _RINGS[kind](n) * given)}
    if i.opcode == "while":
      n = self._loop_trips(within, i)
      body = self.traffic(i.called("body")[0])
      return {
        k: Traffic(n * t.operations, n * t.bytes) for k, t in body.items()
      }
    if i.opcode == "conditional":
      branches = i.called(
        "branch_computations", "true_computation", "false_computation"
      )
      return max(map(self.traffic, branches), key=total)
    if i.opcode in ("fusion", "call", "async-start"):
      return self.traffic(i.called("calls", "to_apply")[0])
    return {}

  def _loop_trips(self, within: str, loop: _Instruction) -> int:
    """Returns a loop's iterations: those that XLA notes, or its constant bound.

    JAX's loops of fixed length count from 0. The bound is a constant in the
    condition or in the loop's initial state. A loop without either gets
    `trips`.
    """
    known = _TRIPS.search(loop.attributes)
    if known:
      return int(known[1])
    (condition,) = loop.called("condition")
    test = self.computations[condition]
    if not self._counts_up(test):
      return self.trips
    bounds = _numbers(test.values()) or _numbers(
      _at_start(self.computations[within], loop, test)
    )
    return bounds[0] if len(bounds) == 1 else self.trips

  def _counts_up(self, computation: _Computation) -> bool:
    """Whether the condition is `<`, directly or in a fusion."""
    root = next(i for i in computation.values() if i.root)
    if root.opcode == "fusion":
      return self._counts_up(self.computations[root.called("calls")[0]])
    return root.opcode == "compare" and "direction=LT" in root.attributes


def _numbers(instructions: Iterable[_Instruction]) -> list[int]:
  """Returns the positive constants; 0 is where a loop starts, not its bound."""
  constants = (i.inside for i in instructions if i.opcode == "constant")
  return [int(x) for x in constants if x.isdecimal() and int(x) > 0]


def _at_start(
  computation: _Computation, loop: _Instruction, test: _Computation
) -> list[_Instruction]:
  """Returns the initial values of the state that the condition reads."""

  def source(name: str) -> _Instruction:
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


def size(kind: str) -> int:
  """Returns the bytes of an array's type, or of all arrays in a tuple's."""
  return sum(
    # `pred` takes a byte.
    math.prod(int(n) for n in dims.split(",") if n) * int(bits or 8) // 8
    for _, bits, dims in _ARRAY.findall(kind)
  )


def _parse(text: str, trips: int) -> _Module:
  computations: dict[str, dict[str, _Instruction]] = {}
  entry = current = None
  for line in text.splitlines():
    if current is None:
      opened = _COMPUTATION.match(line)
      if opened:
        current = computations.setdefault(opened[2], {})
        entry = opened[2] if opened[1] else entry
    elif _END.match(line):
      current = None
    elif found := _INSTRUCTION.match(line):
      new = _one_instruction(found[3], root=bool(found[1]))
      for name, whole, index in _ELEMENT.findall(new.inside):
        kind = _elements(current[whole].type)[int(index)]
        current[name] = _Instruction(
          kind, "get-tuple-element", f"%{whole}", f"index={index}", False
        )
      current[found[2]] = new
  if entry is None:
    raise ValueError("The compiler's text holds no ENTRY computation.")
  partitions = _PARTITIONS.search(text)
  count = int(partitions[1]) if partitions else 1
  return _Module(entry, computations, count, trips)


def _one_instruction(text: str, *, root: bool) -> _Instruction:
  # A tuple's type is in parentheses and contains spaces.
  start = _closing(text, 0) if text.startswith("(") else 0
  opcode = _OPCODE.search(text, text.index(" ", start))
  if opcode is None:
    raise ValueError(f"An instruction has no operation: {text[:80]!r}")
  end = _closing(text, opcode.end() - 1)
  return _Instruction(
    type=text[: opcode.start()].strip(),
    opcode=opcode[1],
    inside=text[opcode.end() : end],
    attributes=text[end + 1 :],
    root=root,
  )


def _elements(kind: str) -> list[str]:
  """Returns the types of a tuple's elements."""
  found, depth = [""], 0
  for c in kind.strip()[1:-1]:
    depth += (c in "([{") - (c in ")]}")
    if c == "," and depth == 0:
      found.append("")
    else:
      found[-1] += c
  return found


def _closing(text: str, start: int) -> int:
  """Returns the index that closes the parenthesis that opens at `start`."""
  depth = 0
  for found in re.finditer(r"[()]", text[start:]):
    depth += 1 if found[0] == "(" else -1
    if depth == 0:
      return start + found.start()
  raise ValueError(f"Unbalanced parentheses: {text[:80]!r}")
