"""A table as a value, with its forms as Markdown, CSV and JSON."""

from __future__ import annotations

import csv
import dataclasses
import html
import io
import re
from collections.abc import Sequence
from typing import Any

from anysearch_jax.evaluation import intervals


@dataclasses.dataclass(frozen=True)
class Cell:
  """A number, its interval and its sample size; None: undefined."""

  value: float | None
  low: float | None = None
  high: float | None = None
  n: int | None = None


@dataclasses.dataclass(frozen=True)
class Column:
  """A column's heading and format.

  Attributes:
    name: heading; group and name together are unique in the table.
    group: heading over neighbouring columns with an equal group.
    digits: number of decimals on the page and in Markdown.
    signed: whether a plus sign is shown.
    best: whether the largest values of a block are marked.
  """

  name: str
  group: str = ""
  digits: int = 3
  signed: bool = False
  best: bool = False

  @property
  def full_name(self) -> str:
    return f"{self.group} {self.name}".strip()


@dataclasses.dataclass(frozen=True)
class Line:
  """A line; `index` is the colour index of its row, None for no colour."""

  keys: tuple[str, ...]
  cells: tuple[Cell | None, ...]
  index: int | None = None


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


def cell(estimate: intervals.Estimate, n: int | None = None) -> Cell:
  """Returns an estimate as a cell."""
  return Cell(estimate.value, estimate.low, estimate.high, n)


def blocks(table: Table) -> list[list[Line]]:
  """Groups neighbouring lines that agree in every key but the last."""
  found: list[list[Line]] = []
  for line in table.lines:
    if found and found[-1][0].keys[:-1] == line.keys[:-1]:
      found[-1].append(line)
    else:
      found.append([line])
  return found


def ranks(block: Sequence[Line], columns: Sequence[Column]) -> list[list[int]]:
  """Returns 1 for the best of a block and column, 2 for the second, else 0.

  Equal values share a rank. There are no ranks in a block with a single line or
  without two different values.
  """
  places = [[0] * len(columns) for _ in block]
  for number, column in enumerate(columns):
    cells = [line.cells[number] for line in block]
    values = [None if cell is None else cell.value for cell in cells]
    told = sorted({v for v in values if v is not None}, reverse=True)
    if not column.best or len(block) < 2 or len(told) < 2:
      continue
    for line, value in enumerate(values):
      if value is not None and value >= told[1]:
        places[line][number] = 1 + told.index(value)
  return places


def to_csv(table: Table) -> str:
  """Returns CSV with full precision: value, and low, high, n if present."""
  parts = ("value", "low", "high", "n")
  kept = [
    [
      part
      for part in parts
      if part == "value"
      or any(
        line.cells[i] is not None and getattr(line.cells[i], part) is not None
        for line in table.lines
      )
    ]
    for i in range(len(table.columns))
  ]
  out = io.StringIO()
  writer = csv.writer(out, lineterminator="\n")
  writer.writerow(
    [
      *table.keys,
      *(
        column.full_name if part == "value" else f"{column.full_name} {part}"
        for column, names in zip(table.columns, kept, strict=True)
        for part in names
      ),
    ]
  )
  for line in table.lines:
    writer.writerow(
      [
        *map(_text, line.keys),
        *(
          None if found is None else getattr(found, part)
          for found, names in zip(line.cells, kept, strict=True)
          for part in names
        ),
      ]
    )
  return out.getvalue()


def _text(key: str) -> str:
  """Quotes text that a spreadsheet would run as a formula."""
  return f"'{key}" if key[:1] in ("=", "+", "-", "@", "\t", "\r") else key


def to_markdown(table: Table) -> str:
  """Returns the table as Markdown, with intervals in brackets."""
  head = [*table.keys, *(column.full_name for column in table.columns)]
  lines = [f"### {escaped(table.title)}", "", _row(head)]
  lines.append(_row(["---"] * len(head)))
  lines += [
    _row(
      [
        *line.keys,
        *(
          _shown(found, column)
          for found, column in zip(line.cells, table.columns, strict=True)
        ),
      ]
    )
    for line in table.lines
  ]
  return "\n".join([*lines, "", escaped(table.note), ""])


def _row(texts: Sequence[str]) -> str:
  return f"| {' | '.join(map(escaped, texts))} |"


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


def _shown(found: Cell | None, column: Column) -> str:
  if found is None or found.value is None:
    return "–"
  sign = "+" if column.signed else ""
  text = f"{found.value:{sign}.{column.digits}f}"
  if found.low is not None and found.high is not None:
    text += f" [{found.low:.{column.digits}f}, {found.high:.{column.digits}f}]"
  return text if found.n is None else f"{text} n={found.n}"


def to_json(table: Table) -> dict[str, Any]:
  """Returns the table as plain JSON values."""
  return dataclasses.asdict(table) | {
    "columns": [
      dataclasses.asdict(c) | {"full_name": c.full_name} for c in table.columns
    ]
  }
