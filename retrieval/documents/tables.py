"""Reads tables and records: CSV, spreadsheets, JSON, JSON lines and Parquet.

python-calamine (Rust, MIT) reads workbooks of Excel and OpenDocument.
"""

from __future__ import annotations

import collections
import csv
import datetime
import io
import itertools
import json
import pathlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from anysearch_jax.retrieval.documents import parts

# Names of the fields of a row that hold its title, and its text.
_TITLES = ("title", "name", "question")
_TEXTS = ("text", "contents", "content", "body")
_DELIMITERS = ",;\t|"
# The delimiter of a file is that of its first lines.
_SAMPLE_LINES = 100
_SAMPLE_CHARACTERS = 1 << 16
_SEPARATOR_LINE = re.compile(r'"?sep=(.)"?\n', re.I)
# Numbers and dates, such as -1.234,5 %, 2027-03-31 or 31.3.27.
_QUANTITY = re.compile(r"[-+]?[$€£]? ?\d[\d.,:/' -]*\s?[%€$£]?")
# Integers that head columns, as of a table of years.
_YEAR = re.compile(r"(?:1[89]|20|21)\d\d")
csv.field_size_limit(parts.LARGEST)

Row = tuple[int, Sequence[str]]


def separated(path: pathlib.Path) -> Iterator[parts.Part]:
  """Yields the rows of a CSV or TSV file."""
  text = parts.read_text(path)
  separator_line = _SEPARATOR_LINE.match(text)
  if separator_line:
    delimiter = separator_line[1]
    text = text[separator_line.end() :]
  else:
    delimiter = _delimiter(text)
  lines = _parse(text, delimiter)
  rows = (row for row in lines if any(row))
  number = 0
  for part in _table(enumerate(rows)):
    if part.heading.startswith("row "):
      number += 1
      part = part._replace(heading=f"row {number}")
    yield part


def _parse(text: str, delimiter: str) -> Iterator[list[str]]:
  file = io.StringIO(text, newline="")
  return csv.reader(file, delimiter=delimiter, skipinitialspace=True)


def _delimiter(text: str) -> str:
  """Returns the delimiter by which most lines have the same number of cells."""
  sample = text.lstrip("\n")[:_SAMPLE_CHARACTERS]
  cut, _, _ = sample.rpartition("\n")
  if len(sample) == _SAMPLE_CHARACTERS and cut:
    sample = cut

  def score(delimiter: str) -> tuple[int, int]:
    rows = itertools.islice(_parse(sample, delimiter), _SAMPLE_LINES)
    widths = collections.Counter(len(row) for row in rows if len(row) > 1)
    if not widths:
      return 0, 0
    width, count = max(widths.items(), key=lambda item: item[::-1])
    return count, width

  return max(_DELIMITERS, key=score)


def workbook(path: pathlib.Path) -> Iterator[parts.Part]:
  """Yields the rows of all sheets of a workbook."""
  import python_calamine

  # Without the name of the file, whose ending may be wrong.
  file = io.BytesIO(parts.check_size(path).read_bytes())
  try:
    book = python_calamine.CalamineWorkbook.from_filelike(file)
  except python_calamine.PasswordError as error:
    raise parts.ReadError(
      "is protected by a password; save it without one"
    ) from error
  except python_calamine.CalamineError as error:
    raise parts.ReadError(
      f"is no whole workbook ({error}); copy it again"
    ) from error
  damaged = []
  for name in book.sheet_names:
    try:
      sheet = book.get_sheet_by_name(name)
    except python_calamine.CalamineError:
      damaged.append(name)
      continue
    rows = (
      (number, [_cell(value) for value in row])
      for number, row in enumerate(sheet.iter_rows(), start=1)
    )
    filled_rows = ((number, row) for number, row in rows if any(row))
    for part in _table(filled_rows):
      yield part._replace(heading=f"{name} > {part.heading}")
  if damaged:
    yield parts.Part("", lost=f"has damaged sheets: {', '.join(damaged)}")


def _cell(value: Any) -> str:
  if isinstance(value, float) and value.is_integer():
    return str(int(value))
  if isinstance(value, datetime.datetime):
    if value.time() == datetime.time():
      return value.date().isoformat()
    return value.isoformat(" ", "minutes")
  return str(value).strip()


def _table(rows: Iterable[Row]) -> Iterator[parts.Part]:
  """Yields the numbered rows of a table, each with the names of its columns.

  Lines above the header, with a single cell, are a part of their own.
  """
  rows = iter(rows)
  first_rows = list(itertools.islice(rows, _SAMPLE_LINES))
  is_wide = sum(_count(row) > 1 for _, row in first_rows) > 1
  top = []
  if is_wide:
    while _count(first_rows[0][1]) == 1:
      top.append(first_rows.pop(0)[1])
  if top:
    lines = [" ".join(filter(None, row)) for row in top]
    yield parts.Part("\n".join(lines), heading="above the table")
  if len(first_rows) == 1:
    number, row = first_rows[0]
    yield parts.Part("\n".join(filter(None, row)), heading=f"row {number}")
    return
  header: Sequence[str] = ()
  if first_rows and _is_header(first_rows):
    header = first_rows.pop(0)[1]
  empty_columns = dict.fromkeys(filter(None, header))
  for number, row in itertools.chain(first_rows, rows):
    fields: dict[str, str] = {}
    cells = itertools.zip_longest(header, row, fillvalue="")
    for column, (name, value) in enumerate(cells, start=1):
      is_new = name and name not in fields
      fields[name if is_new else f"{name or 'column'} {column}"] = value
      if value:
        empty_columns.pop(name, None)
    part, _ = record(number, fields)
    yield part
  if empty_columns:
    yield parts.Part("\n".join(empty_columns), heading="columns without values")


def _count(row: Sequence[str]) -> int:
  return sum(map(bool, row))


def _is_header(rows: Sequence[Row]) -> bool:
  """Returns whether the first row has names instead of values.

  Rows of names only cannot be told from values that are words, but a number or
  a date above others is a value.
  """
  _, first = rows[0]
  for column, name in enumerate(first):
    if _QUANTITY.fullmatch(name) and not _YEAR.fullmatch(name):
      below = [row[column] for _, row in rows[1:] if column < len(row)]
      filled = [value for value in below if value]
      if not filled or all(map(_QUANTITY.fullmatch, filled)):
        return False
  return True


def record(number: int, row: Mapping[str, Any]) -> tuple[parts.Part, int]:
  """Returns a row as a part, and the number of its bytes that are no text."""
  lost_bytes = 0

  def plain(value: Any) -> Any:
    nonlocal lost_bytes
    if isinstance(value, Mapping):
      return {str(name): plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
      return [plain(item) for item in value]
    if not isinstance(value, bytes | bytearray):
      return value
    try:
      text = value.decode()
    except UnicodeDecodeError:
      text = "\0"
    if "\0" in text:
      lost_bytes += len(value)
      return None
    return text

  values = {
    str(name): value
    if isinstance(value, str)
    else json.dumps(value, ensure_ascii=False, default=str)
    for name, value in ((name, plain(value)) for name, value in row.items())
    if value not in (None, "")
  }
  title = next((values.pop(name) for name in _TITLES if name in values), "")
  texts = [values.pop(name) for name in _TEXTS if name in values]
  lines = [*(f"{name}: {value}" for name, value in values.items()), *texts]
  text = "\n".join(lines) or title
  return parts.Part(text, title, heading=f"row {number}"), lost_bytes


def json_document(path: pathlib.Path) -> Iterator[parts.Part]:
  """Yields the items of a JSON array, alone or beside other fields.

  A file with several values is read as JSON lines.
  """
  text = parts.read_text(path)
  try:
    value = json.loads(text)
  except (ValueError, RecursionError) as error:
    first_line, _, further = text.strip().partition("\n")
    if not further or not _is_json(first_line):
      raise parts.ReadError(f"is not JSON ({error})") from error
    yield from _lines(text.split("\n"))
    return
  if isinstance(value, Mapping):
    rows = {
      name: items
      for name, items in value.items()
      if isinstance(items, list)
      and items
      and all(isinstance(item, Mapping) for item in items)
    }
    if len(rows) == 1:
      ((name, items),) = rows.items()
      fields = {key: item for key, item in value.items() if key != name}
      if fields:
        part, _ = record(0, fields)
        yield part._replace(heading="fields")
      value = items
    else:
      value = [value]
  elif not isinstance(value, list):
    value = [value]
  for number, item in enumerate(value, start=1):
    yield _item(number, item)


def _is_json(text: str) -> bool:
  try:
    json.loads(text)
  except (ValueError, RecursionError):
    return False
  return True


def _item(number: int, item: Any) -> parts.Part:
  if isinstance(item, Mapping):
    part, _ = record(number, item)
    return part
  text = item if isinstance(item, str) else json.dumps(item, ensure_ascii=False)
  return parts.Part(text, heading=f"row {number}")


def json_lines(path: pathlib.Path) -> Iterator[parts.Part]:
  """Yields the values of JSON lines; lines that are none are counted."""
  if path.stat().st_size <= parts.LARGEST:
    yield from _lines(parts.read_text(path).split("\n"))
    return
  with path.open(encoding="utf-8-sig", errors="replace") as lines:
    yield from _lines(lines)


def _lines(lines: Iterable[str]) -> Iterator[parts.Part]:
  broken = []
  for number, line in enumerate(lines, start=1):
    if line.strip():
      try:
        value = json.loads(line)
      except (ValueError, RecursionError):
        broken.append(number)
        continue
      yield _item(number, value)
  if broken:
    noun = "line that is" if len(broken) == 1 else "lines that are"
    # A file of another kind has a broken line for each of its lines.
    numbers = parts.name_ranges(broken[:_SAMPLE_LINES])
    yield parts.Part("", lost=f"has {len(broken)} {noun} not JSON: {numbers}")


def parquet(path: pathlib.Path) -> Iterator[parts.Part]:
  """Yields the rows of a Parquet file; bytes that are no text are counted."""
  try:
    from pyarrow import parquet as pyarrow_parquet
  except ModuleNotFoundError as error:
    raise parts.ReadError(
      "needs a package; pip install 'anysearch_jax[train]'"
    ) from error
  lost_bytes = 0
  with pyarrow_parquet.ParquetFile(path) as file:
    batches = (batch.to_pylist() for batch in file.iter_batches(64))
    rows = itertools.chain.from_iterable(batches)
    for number, row in enumerate(rows, start=1):
      part, bytes_of_row = record(number, row)
      lost_bytes += bytes_of_row
      yield part
  if lost_bytes:
    yield parts.Part("", lost=f"has {lost_bytes:,} bytes that are no text")


READERS: dict[str, Callable[[pathlib.Path], Iterator[parts.Part]]] = {
  **dict.fromkeys((".csv", ".tsv"), separated),
  **dict.fromkeys((".xlsx", ".xlsm", ".xlsb", ".xls", ".ods"), workbook),
  ".json": json_document,
  **dict.fromkeys((".jsonl", ".ndjson"), json_lines),
  ".parquet": parquet,
}
