"""Reads what the loops of an optimized program write to memory."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) .*\{\s*$")
_INSTRUCTION = re.compile(
  r"^\s+(?:ROOT )?%?([\w.\-]+) = ([a-z]\w*)\[([\d,]*)\](\S*) ([\w\-]+)\("
)
_CALLS = re.compile(r"(?:body|to_apply|branch_computations|calls)=\{?([^,}]+)")
# These name buffers instead of writing them.
_NAMES = ("get-tuple-element", "parameter", "bitcast", "tuple", "while")


class Written(NamedTuple):
  """A result that an instruction writes: its name, opcode and elements."""

  name: str
  opcode: str
  dtype: str
  elements: int


def written(text: str) -> list[Written]:
  """Returns what the loops of a program write to a device's main memory.

  What happens inside a fused kernel is not written. A TPU's prefetches into its
  vector memory, S(1), are reads.
  """
  computations = _computations(text)
  bodies = re.findall(r"body=%?([\w.\-]+)", text)
  out, seen, todo = [], set(), list(bodies)
  while todo:
    name = todo.pop()
    if name in seen or name not in computations:
      continue
    seen.add(name)
    for line in computations[name]:
      found = _INSTRUCTION.match(line)
      if not found:
        continue
      label, dtype, shape, layout, opcode = found.groups()
      if opcode in ("call", "conditional", "async-start"):
        todo += _called(line)
      if opcode in _NAMES or "S(1)" in layout or opcode == "copy-done":
        continue
      sizes = [int(size) for size in shape.split(",") if size]
      out.append(Written(label, opcode, dtype, math.prod(sizes)))
  return out


def _computations(text: str) -> dict[str, list[str]]:
  out: dict[str, list[str]] = {}
  lines: list[str] = []
  for line in text.splitlines():
    found = _COMPUTATION.match(line)
    if found:
      lines = out.setdefault(found[1], [])
    else:
      lines.append(line)
  return out


def _called(line: str) -> Iterator[str]:
  for names in _CALLS.findall(line):
    yield from re.findall(r"[\w.\-]+", names)
