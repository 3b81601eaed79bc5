"""The part of `--help` that lists the values of a configuration.

The texts come from the docstrings of the configuration groups, in which each
value's name is followed by a colon (`window: ...`, `b1, b2: ...`).
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import textwrap
from collections.abc import Iterator
from typing import Any

_WIDTH = 80


def text(config: Any, source: str) -> str:
  """Returns every value of a configuration as a flag, group by group.

  Args:
    config: a configuration dataclass; its fields that are dataclasses are
      groups.
    source: name of the source of the values, for the first line.
  """
  parts = [f"configuration flags, with the values of {source}:"]
  for path, group in _groups(config, "--config"):
    head, meanings = described(type(group))
    parts += ["", textwrap.fill(f"{path}: {head}", _WIDTH)]
    values = [
      (field.name, value)
      for field in dataclasses.fields(group)
      if not dataclasses.is_dataclass(value := getattr(group, field.name))
    ]
    following = [meanings.get(name) for name, _ in values[1:]] + [None]
    for (name, value), after in zip(values, following):
      parts.append(f"  {path}.{name}={_typed(value)}")
      meaning = meanings.get(name)
      # Values that share a text are listed together above it.
      if meaning and meaning != after:
        parts.append(textwrap.indent(textwrap.fill(meaning, 74), " " * 6))
  return "\n".join(parts)


def described(group: type) -> tuple[str, dict[str, str]]:
  """Returns a group's summary and the text of each value, by name."""
  # Longest first, because `attention` is a prefix of `attention_chunk`.
  fields = sorted((f.name for f in dataclasses.fields(group)), key=len)[::-1]
  # A name may be followed by its unit in brackets.
  name = rf"(?:{'|'.join(fields)})(?: \([^)]*\))?"
  docstring = " ".join((inspect.getdoc(group) or "").split())
  head, *rest = re.split(
    rf"(?:^|(?<=[.;)] ))({name}(?:,? (?:x )?{name})*): ", docstring
  )
  meanings = {}
  for names, meaning in zip(rest[::2], rest[1::2]):
    units = dict(re.findall(r"(\w+) \(([^)]*)\)", names))
    for each in re.findall(r"\w+", re.sub(r"\([^)]*\)", "", names)):
      unit = f"({units[each]}) " if each in units else ""
      meanings[each] = unit + meaning.strip(" ;")
  return head.strip(), meanings


def _groups(node: Any, path: str) -> Iterator[tuple[str, Any]]:
  yield path, node
  for field in dataclasses.fields(node):
    value = getattr(node, field.name)
    if dataclasses.is_dataclass(value):
      yield from _groups(value, f"{path}.{field.name}")


def _typed(value: Any) -> str:
  """Returns a value in the form that its flag accepts."""
  if isinstance(value, bool):
    return str(value).lower()
  if isinstance(value, tuple):
    return ",".join(map(str, value)) or "()"
  return str(value)
