"""Cells of question files: texts, lists, objects and accepted answers.

Files hold lists as lists, as arrays of NumPy or as text; other tools read each
of them wrongly at times, so what is mended here is named, and counted later.
"""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

ANSWER_SPLIT = "<|answer_split|>"

Row = Mapping[str, Any]

# An item in the text of a list. NumPy writes no commas between items, which
# Python would read as one joined text, so the items are read one at a time.
_ITEM = re.compile(
  r"'(?:[^'\\]|\\.)*'" r'|"(?:[^"\\]|\\.)*"' r"|-?\d+(?:\.\d+)?", re.DOTALL
)
_MISSING = frozenset(("nan", "none", "null"))
# How a text begins that a program printed of a list or an object.
_NOT_TEXT = ("{'", '{"', "array([", "['", '["')


class MalformedError(ValueError):
  """A row that is no question; the text is short, rows are counted by it."""


class Answers(NamedTuple):
  """Accepted answers, and the names of what was mended to read them."""

  texts: tuple[str, ...]
  mended: tuple[str, ...] = ()


def answers(value: Any) -> Answers:
  """Reads accepted answers from a list, an array, a string or joined strings.

  Raises:
    MalformedError: something else, or a text that is a damaged list.
  """
  if hasattr(value, "tolist"):
    value = value.tolist()
  if value is None:
    return Answers(())
  whole = not isinstance(value, list | tuple)
  texts: list[str] = []
  mended: list[str] = []
  for item in [value] if whole else value:
    if isinstance(item, float) and item.is_integer():
      mended.append("a whole number written with a fraction")
    for part in text(item).split(ANSWER_SPLIT):
      # Inside a list, a text in brackets without quotes is an answer as it is.
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
  """A column of named values, which some files hold as JSON text."""
  value = row.get(name)
  if value is None or value == "":
    return {}
  if isinstance(value, str):
    return parsed(value, dict)
  if not isinstance(value, Mapping):
    raise MalformedError(f"{name} that is a {type(value).__name__}")
  return value


def parsed(text: Any, kind: type) -> Any:
  """A value of JSON text."""
  try:
    value = json.loads(text)
  except (ValueError, TypeError, RecursionError):
    value = None
  if not isinstance(value, kind):
    raise MalformedError(f"text that is no JSON {kind.__name__}")
  return value


def listed(row: Row, name: str) -> list[Any]:
  """A column that is a list, an array or nothing."""
  value = row.get(name)
  if hasattr(value, "tolist"):
    value = value.tolist()
  if value is None:
    return []
  if not isinstance(value, list | tuple):
    raise MalformedError(f"{name} that is a {type(value).__name__}")
  return list(value)


def dicts(row: Row, name: str) -> list[Row]:
  """A column that is a list of objects, or nothing."""
  value = listed(row, name)
  if not all(isinstance(each, Mapping) for each in value):
    raise MalformedError(f"{name} that holds something else than objects")
  return value


def plain(value: Any) -> bool:
  """Whether a value is a text, a finite number, true or false."""
  if isinstance(value, float):
    return math.isfinite(value)
  return isinstance(value, str | int | bool)


def text(value: Any) -> str:
  """An answer that is a text or a number."""
  if isinstance(value, str):
    return value
  # Years and counts stand as numbers in some files; true and false do not.
  if isinstance(value, bool) or not isinstance(value, int | float):
    raise MalformedError(f"an answer that is a {type(value).__name__}")
  if not math.isfinite(value):
    raise MalformedError(f"an answer that is {value}")
  # Pandas writes 1912.0 where other rows have no year; as an answer it would
  # normalise to 19120.
  return str(int(value) if value == int(value) else value)


def _items(written: str) -> Sequence[Any] | None:
  """The items in the text of a list; None for another text."""
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
