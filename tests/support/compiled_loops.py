"""Reads what an optimized program writes to memory."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) .*\{\s*$")
# A result is an array, or a tuple of arrays.
_INSTRUCTION = re.compile(
  r"^\s+(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\("
)
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,]*)\](\{[^}]*\})?")
_CALLS = re.compile(r"(?:body|to_apply|branch_computations|calls)=\{?([^,}]+)")
# These name buffers instead of writing them.
_NAMES = (
  *("get-tuple-element", "parameter", "bitcast", "tuple", "while", "call"),
  # The starts of copies and slices, and the results of what has started.
  *("copy-start", "copy-done", "slice-start", "slice-done", "async-start"),
  *("async-update", "async-done", "conditional", "constant"),
)


class Written(NamedTuple):
  """A result that an instruction writes: its name, opcode and elements."""

  name: str
  opcode: str
  dtype: str
  elements: int


def written(text: str, *, everywhere: bool = False) -> list[Written]:
  """Returns what the loops of a program write to a device's main memory.

  With `everywhere`, what it writes outside of loops too.

  What happens inside a fused kernel is not written. A TPU's prefetches into its
  vector memory, S(1), are reads.
  """
  computations = _computations(text)
  todo = re.findall(r"body=%?([\w.\-]+)", text)
  if everywhere:
    todo += re.findall(r"^ENTRY %?([\w.\-]+)", text, re.MULTILINE)
  out, seen = [], set()
  while todo:
    name = todo.pop()
    if name in seen or name not in computations:
      continue
    seen.add(name)
    for line in computations[name]:
      found = _INSTRUCTION.match(line)
      if not found:
        continue
      label, results, opcode = found.groups()
      if opcode in ("call", "conditional", "async-start"):
        todo += _called(line)
      if opcode in _NAMES:
        continue
      for dtype, shape, layout in _ARRAY.findall(results):
        sizes = [int(size) for size in shape.split(",") if size]
        if "S(1)" not in layout:
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
