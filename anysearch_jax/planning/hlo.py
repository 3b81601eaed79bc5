"""Parses the text of a compiled HLO module, as far as the planner needs it."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
# An attribute over several lines may also have a line that begins with a brace.
_END = re.compile(r"^\}(, execution_thread=.*)?$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%([\w.\-]+) = (.*)$")
_OPCODE = re.compile(r"([a-z][\w\-]*)\(")
_ARRAY = re.compile(r"\b(pred|[a-z]+\d+\w*)\[([\d,]*)\]")
_NAME = re.compile(r"%([\w.\-]+)")
_BITS = re.compile(r"[a-z]+(\d+)")
_PARTITIONS = re.compile(r"\bnum_partitions=(\d+)")


@dataclasses.dataclass(frozen=True)
class Instruction:
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


Computation = Mapping[str, Instruction]


@dataclasses.dataclass(frozen=True)
class Module:
  """A module: computations by name, each with its instructions by name."""

  entry: str
  computations: Mapping[str, Computation]
  partitions: int


def parse(text: str) -> Module:
  """Parses a module as `compiled.as_text()` or XLA's dump writes it.

  Raises:
    ValueError: the text has no entry computation, or an instruction is
      malformed.
  """
  computations: dict[str, dict[str, Instruction]] = {}
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
      current[found[2]] = _instruction(found[3], root=bool(found[1]))
  if entry is None:
    raise ValueError("The compiler's text holds no ENTRY computation.")
  partitions = _PARTITIONS.search(text)
  return Module(entry, computations, int(partitions[1]) if partitions else 1)


def size(kind: str) -> int:
  """Returns the bytes of an array's type, or of all arrays in a tuple's."""
  return sum(
    math.prod(int(n) for n in dims.split(",") if n) * _bits(element) // 8
    for element, dims in _ARRAY.findall(kind)
  )


def _bits(element: str) -> int:
  found = _BITS.match(element)
  return int(found[1]) if found else 8  # `pred` takes a byte.


def _instruction(text: str, *, root: bool) -> Instruction:
  # A tuple's type is in parentheses and contains spaces.
  start = _closing(text, 0) if text.startswith("(") else 0
  opcode = _OPCODE.search(text, text.index(" ", start))
  if opcode is None:
    raise ValueError(f"An instruction has no operation: {text[:80]!r}")
  end = _closing(text, opcode.end() - 1)
  return Instruction(
    type=text[: opcode.start()].strip(),
    opcode=opcode[1],
    inside=text[opcode.end() : end],
    attributes=text[end + 1 :],
    root=root,
  )


def _closing(text: str, start: int) -> int:
  """Returns the index that closes the parenthesis that opens at `start`."""
  depth = 0
  for found in re.finditer(r"[()]", text[start:]):
    depth += 1 if found[0] == "(" else -1
    if depth == 0:
      return start + found.start()
  raise ValueError(f"Unbalanced parentheses: {text[:80]!r}")
