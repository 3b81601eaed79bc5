"""Reads cells of question files: texts, lists, objects, accepted answers.

Files store a list as a list, as a NumPy array or as printed text, and the tools
that wrote them damaged some values. Each kind of repair has a name, so that
`preparing` can count it.
"""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

ANSWER_SPLIT = "<|answer_split|>"

Row = Mapping[str, Any]

# An item in the text of a list. NumPy prints no commas between items, and
# Python would concatenate adjacent strings, so items are parsed one at a time.
_ITEM = re.compile(
  r"'(?:[^'\\]|\\.)*'" r'|"(?:[^"\\]|\\.)*"' r"|-?\d+(?:\.\d+)?", re.DOTALL
)
_MISSING = frozenset(("nan", "none", "null"))
# Prefixes of lists and objects that a program printed as text.
_NOT_TEXT = ("{'", '{"', "array([", "['", '["')


class MalformedError(ValueError):
  """A row is not a question. Rows are counted by the message: keep it short."""


class Answers(NamedTuple):
  """Accepted answers, and the names of the repairs that reading them took."""

  texts: tuple[str, ...]
  mended: tuple[str, ...] = ()


def without_numpy(value: Any) -> Any:
  """Returns a cell with NumPy values as plain ones."""
  if isinstance(value, np.ndarray | np.generic):
    return value.tolist()
  return value


def answers(value: Any) -> Answers:
  """Reads accepted answers from a list, an array, a string or joined strings.

  Raises:
    MalformedError: the value has another type, or is the text of a damaged
      list.
  """
  value = without_numpy(value)
  if value is None:
    return Answers(())
  whole = not isinstance(value, list | tuple)
  texts: list[str] = []
  mended: list[str] = []
  for item in [value] if whole else value:
    if isinstance(item, float) and item.is_integer():
      mended.append("a whole number written with a fraction")
    for part in text(item).split(ANSWER_SPLIT):
      # Inside a list, text in brackets but without quotes is an answer itself.
      found = _items(part) if whole or set(part) & {"'", '"'} else None
      if found is None:
        if whole and part.lstrip().startswith(_NOT_TEXT):
          raise MalformedError("an answer that is the text of a list or object")
        texts.append(part)
      else:
        mended.append("answers in the text of a list")
        texts += map(text, found)
  return Answers(tuple(texts), tuple(dict.fromkeys(mended)))


def mapping(row: Row, name: str) -> Row:
  """Returns a column of named values; some files store it as JSON text."""
  value = row.get(name)
  if value is None or value == "":
    return {}
  if isinstance(value, str):
    return parsed(value, dict)
  if not isinstance(value, Mapping):
    raise MalformedError(f"{name} that is a {type(value).__name__}")
  return value


def parsed(text: Any, kind: type) -> Any:
  """Parses JSON text; raises MalformedError if the value is not a `kind`."""
  try:
    value = json.loads(text)
  except (ValueError, TypeError, RecursionError):
    value = None
  if not isinstance(value, kind):
    raise MalformedError(f"text that is no JSON {kind.__name__}")
  return value


def listed(row: Row, name: str) -> list[Any]:
  """Returns a column of lists or arrays as a list; [] if it is missing."""
  value = without_numpy(row.get(name))
  if value is None:
    return []
  if not isinstance(value, list | tuple):
    raise MalformedError(f"{name} that is a {type(value).__name__}")
  return list(value)


def dicts(row: Row, name: str) -> list[Row]:
  """Returns a column of lists of objects; [] if it is missing."""
  value = listed(row, name)
  if not all(isinstance(each, Mapping) for each in value):
    raise MalformedError(f"{name} that holds something else than objects")
  return value


def plain(value: Any) -> bool:
  """Whether a value is a string, a finite number or a boolean."""
  if isinstance(value, float):
    return math.isfinite(value)
  return isinstance(value, str | int | bool)


def text(value: Any) -> str:
  """Returns an answer as text; it may be a string or a finite number."""
  if isinstance(value, str):
    return value
  # Some files store years and counts as numbers; a boolean is an error.
  if isinstance(value, bool) or not isinstance(value, int | float):
    raise MalformedError(f"an answer that is a {type(value).__name__}")
  if not math.isfinite(value):
    raise MalformedError(f"an answer that is {value}")
  # Pandas writes 1912.0 if other rows have no year; the normalisation of
  # answers would turn that into 19120.
  return str(int(value) if value == int(value) else value)


def _items(written: str) -> Sequence[Any] | None:
  """Returns the items in the text of a list; None if it is not a list."""
  written = written.strip()
  if not (written.startswith("[") and written.endswith("]")):
    return None
  try:
    value = json.loads(written)
  except (ValueError, RecursionError):
    value = None
  if isinstance(value, list):
    return value
  inside = written[1:-1]
  between = set(_ITEM.sub(" ", inside).replace(",", " ").lower().split())
  if between - _MISSING:
    return None
  if between:
    raise MalformedError("an answer that is missing in the text of a list")
  try:
    return [ast.literal_eval(item) for item in _ITEM.findall(inside)]
  except (ValueError, SyntaxError):
    return None
