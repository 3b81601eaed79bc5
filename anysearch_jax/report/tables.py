"""A table: columns that measure lines, and its forms as text, CSV and JSON.

A column is a heading, a format, and the value that it takes from each line;
`make_table` fills the cells. The page draws the same value (`template.html`).
"""

from __future__ import annotations

import csv
import dataclasses
import html
import io
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class Cell:
  """A number, its interval and its sample size; None: undefined."""

  value: float | None
  low: float | None = None
  high: float | None = None
  n: int | None = None


@dataclasses.dataclass(frozen=True)
class Column:
  """A column's heading, format and measurement.

  Attributes:
    name: heading; group and name together are unique in the table.
    of: what it shows of a line's subject, an attribute or the key of a mapping:
      a number, an `inference.Estimate`, a `Cell`, or None.
    group: heading over neighbouring columns with an equal group.
    digits: number of decimals on the page and in the terminal.
    signed: whether a plus sign is shown.
    best: whether the largest values of a block are marked.
    n: whether the subject's `n` is its sample size.
    optional: whether a table leaves it out if no line has a number for it.
  """

  name: str
  of: Any = None
  group: str = ""
  digits: int = 3
  signed: bool = False
  best: bool = False
  n: bool = False
  optional: bool = False

  @property
  def full_name(self) -> str:
    return f"{self.group} {self.name}".strip()

  def cell(self, subject: Any) -> Cell | None:
    """Returns what the column shows of a line's subject."""
    mapped = isinstance(subject, Mapping)
    found = subject.get(self.of) if mapped else getattr(subject, self.of)
    if isinstance(found, tuple):  # An estimate.
      value, low, high = found
      return Cell(value, low, high, subject.n if self.n else None)
    return found if found is None or isinstance(found, Cell) else Cell(found)


@dataclasses.dataclass(frozen=True)
class Line:
  """A line: its leading texts, and its numbers."""

  keys: tuple[str, ...]
  cells: tuple[Cell | None, ...]


@dataclasses.dataclass(frozen=True)
class Table:
  """A table of the report.

  Attributes:
    name: name of its CSV file and its key in the JSON.
    title: heading.
    note: explains the numbers and their intervals.
    keys: names of the leading text columns.
    columns: the columns of numbers.
    lines: the lines.
  """

  name: str
  title: str
  note: str
  keys: tuple[str, ...]
  columns: tuple[Column, ...]
  lines: tuple[Line, ...]


def make_table(
  name: str,
  title: str,
  note: str,
  keys: str,
  columns: Iterable[Column],
  lines: Iterable[tuple[Iterable[object], Any]],
) -> Table:
  """Fills a table; `keys` are divided by commas, `lines` (keys, subject)."""
  made = list(lines)
  filled = [(column, [column.cell(of) for _, of in made]) for column in columns]
  shown = [
    (column, cells)
    for column, cells in filled
    if not column.optional or any(c and c.value is not None for c in cells)
  ]
  return Table(
    name,
    title,
    note,
    tuple(keys.split(", ")),
    tuple(column for column, _ in shown),
    tuple(
      Line(tuple(map(str, at)), tuple(cells[i] for _, cells in shown))
      for i, (at, _) in enumerate(made)
    ),
  )


def blocks(table: Table) -> list[list[Line]]:
  """Groups neighbouring lines that agree in every key but the last."""
  grouped = itertools.groupby(table.lines, lambda line: line.keys[:-1])
  return [list(lines) for _, lines in grouped]


def ranks(block: Sequence[Line], columns: Sequence[Column]) -> list[list[int]]:
  """Returns 1 for the best of a block and column, 2 for the second, else 0.

  Equal values share a rank; a column without two different ones has no ranks.
  """
  places = []
  for cells, column in zip(zip(*(line.cells for line in block)), columns):
    values = [None if cell is None else cell.value for cell in cells]
    told = sorted({v for v in values if v is not None}, reverse=True)[:2]
    ranked = told if column.best and len(told) == 2 else []
    places.append([1 + ranked.index(v) if v in ranked else 0 for v in values])
  return [list(line) for line in zip(*places)] or [[] for _ in block]


def to_csv(table: Table) -> str:
  """Returns CSV with full precision: value, and low, high, n if present."""
  heads, columns = [], []
  for place, column in enumerate(table.columns):
    cells = [line.cells[place] or Cell(None) for line in table.lines]
    heads.append(column.full_name)
    columns.append([cell.value for cell in cells])
    for part in ("low", "high", "n"):
      values = [getattr(cell, part) for cell in cells]
      if any(value is not None for value in values):
        heads.append(f"{column.full_name} {part}")
        columns.append(values)
  out = io.StringIO()
  writer = csv.writer(out, lineterminator="\n")
  writer.writerow([*table.keys, *heads])
  for place, line in enumerate(table.lines):
    numbers = (column[place] for column in columns)
    writer.writerow([*map(_text, line.keys), *numbers])
  return out.getvalue()


def _text(key: str) -> str:
  """Quotes text that a spreadsheet would run as a formula."""
  return f"'{key}" if key[:1] in ("=", "+", "-", "@", "\t", "\r") else key


def escaped(text: str) -> str:
  """Escapes text for one line of Markdown, so that it is shown literally.

  HTML becomes entities, because not every Markdown renderer removes it. An
  underscore inside a word is not escaped, as CommonMark does not interpret it;
  nor are brackets without an address after them:
  https://spec.commonmark.org/0.31.2/#links
  """
  text = re.sub(r"[\\`*|~$]|(?<![^\W_])_|_(?![^\W_])", r"\\\g<0>", text)
  text = html.escape(text, quote=False).replace("](", "]\\(")
  return " ".join(text.split())


def to_text(table: Table) -> str:
  """Returns the table as aligned plain text, half an interval after ±."""
  heads = [*table.keys, *(column.full_name for column in table.columns)]
  lines = [
    [*line.keys, *map(_brief, line.cells, table.columns)]
    for line in table.lines
  ]
  return "\n".join(aligned([heads, *lines], len(table.keys)))


def _brief(cell: Cell | None, column: Column) -> str:
  """Returns a cell's number, and half of its interval after ±."""
  if cell is None or cell.value is None:
    return "–"
  text = f"{cell.value:{'+' if column.signed else ''}.{column.digits}f}"
  if cell.low is None or cell.high is None:
    return text
  return f"{text}±{(cell.high - cell.low) / 2:.{column.digits}f}"


def aligned(lines: Sequence[Sequence[str]], left: int = 1) -> list[str]:
  """Aligns columns of text: the first `left` to the left, all others right."""
  columns = []
  for place, texts in enumerate(zip(*lines, strict=True)):
    side, width = "<" if place < left else ">", max(map(len, texts))
    columns.append([f"{text:{side}{width}}" for text in texts])
  return ["  ".join(line).rstrip() for line in zip(*columns)]


def to_json(table: Table) -> dict[str, Any]:
  """Returns the table as plain JSON values."""
  formats = ("name", "full_name", "group", "digits", "signed", "best")
  return {
    "name": table.name,
    "title": table.title,
    "note": table.note,
    "keys": table.keys,
    "columns": [{f: getattr(c, f) for f in formats} for c in table.columns],
    "lines": [dataclasses.asdict(line) for line in table.lines],
  }
