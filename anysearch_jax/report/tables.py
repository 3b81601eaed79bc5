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
    of: the attribute or key of a line's subject that the column shows. Its
      value is a number, an `inference.Estimate`, a `Cell`, or None.
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
    if isinstance(subject, Mapping):
      value = subject.get(self.of)
    else:
      value = getattr(subject, self.of)
    if isinstance(value, tuple):  # An estimate.
      number, low, high = value
      return Cell(number, low, high, n=subject.n if self.n else None)
    if value is None or isinstance(value, Cell):
      return value
    return Cell(value)


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
  """Fills a table.

  Args:
    name: name of its CSV file and its key in the JSON.
    title: heading.
    note: explains the numbers and their intervals.
    keys: names of the leading text columns, joined by ", ".
    columns: the columns of numbers.
    lines: (keys, subject) of each line; columns measure the subject.
  """
  lines = list(lines)
  filled = [
    (column, [column.cell(subject) for _, subject in lines])
    for column in columns
  ]
  used = [
    (column, cells)
    for column, cells in filled
    if not column.optional or any(c and c.value is not None for c in cells)
  ]
  return Table(
    name=name,
    title=title,
    note=note,
    keys=tuple(keys.split(", ")),
    columns=tuple(column for column, _ in used),
    lines=tuple(
      Line(tuple(map(str, line_keys)), tuple(cells[i] for _, cells in used))
      for i, (line_keys, _) in enumerate(lines)
    ),
  )


def blocks(table: Table) -> list[list[Line]]:
  """Groups neighbouring lines that agree in every key but the last."""
  grouped = itertools.groupby(table.lines, lambda line: line.keys[:-1])
  return [list(lines) for _, lines in grouped]


def ranks(block: Sequence[Line], columns: Sequence[Column]) -> list[list[int]]:
  """Ranks the cells of each column within a block, `[lines][columns]`.

  The rank is 1 for the best value, 2 for the second, otherwise 0. Equal values
  share a rank; a column without two different ones has no ranks.
  """
  column_ranks = []
  for cells, column in zip(zip(*(line.cells for line in block)), columns):
    values = [None if cell is None else cell.value for cell in cells]
    best = sorted({v for v in values if v is not None}, reverse=True)[:2]
    if not column.best or len(best) < 2:
      best = []
    column_ranks.append([1 + best.index(v) if v in best else 0 for v in values])
  return [list(line) for line in zip(*column_ranks)] or [[] for _ in block]


def to_csv(table: Table) -> str:
  """Returns CSV with full precision: value, and low, high, n if present."""
  headings: list[str] = []
  columns: list[list[float | None]] = []
  for i, column in enumerate(table.columns):
    cells = [line.cells[i] or Cell(None) for line in table.lines]
    headings.append(column.full_name)
    columns.append([cell.value for cell in cells])
    for part in ("low", "high", "n"):
      values = [getattr(cell, part) for cell in cells]
      if any(value is not None for value in values):
        headings.append(f"{column.full_name} {part}")
        columns.append(values)
  out = io.StringIO()
  writer = csv.writer(out, lineterminator="\n")
  writer.writerow([*table.keys, *headings])
  for i, line in enumerate(table.lines):
    numbers = (column[i] for column in columns)
    writer.writerow([*map(_quoted, line.keys), *numbers])
  return out.getvalue()


def _quoted(key: str) -> str:
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
  headings = [*table.keys, *(column.full_name for column in table.columns)]
  lines = [
    [*line.keys, *map(_brief, line.cells, table.columns)]
    for line in table.lines
  ]
  return "\n".join(aligned([headings, *lines], len(table.keys)))


def _brief(cell: Cell | None, column: Column) -> str:
  """Returns a cell's number, and half of its interval after ±."""
  if cell is None or cell.value is None:
    return "–"
  text = f"{cell.value:{'+' if column.signed else ''}.{column.digits}f}"
  if cell.low is None or cell.high is None:
    return text
  return f"{text}±{(cell.high - cell.low) / 2:.{column.digits}f}"


def aligned(lines: Sequence[Sequence[str]], left_columns: int = 1) -> list[str]:
  """Aligns text in columns: the first `left_columns` left, others right."""
  columns = []
  for i, texts in enumerate(zip(*lines, strict=True)):
    side = "<" if i < left_columns else ">"
    width = max(map(len, texts))
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
