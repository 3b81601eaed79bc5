"""Reads question files as numbered rows.

JSON lines, CSV, TSV (each also as `.gz`) and Parquet are streamed; a JSON array
is loaded into memory.
"""

from __future__ import annotations

import csv
import gzip
import io
import itertools
import pathlib
import re
import zlib
from collections.abc import Iterator
from typing import IO, Any

import pyarrow as pa
import pyarrow.parquet as pq

from anysearch_jax.data import formats
from anysearch_jax.host import git_lfs, json_files

SUFFIXES = (".jsonl", ".json", ".csv", ".tsv", ".parquet")
# A cell may be a whole passage; the limit of Python is 131,072 characters.
_MAX_CELL_CHARACTERS = 1 << 26
# A question and its printed answers: DPR's nq-test.qa.csv has no header.
_DPR_LINE = re.compile(r"""[^\t]+\t"?\[["'][^\t]*\]"?\s*""")

Numbered = tuple[int, dict[str, Any] | formats.MalformedError]


def kind(path: pathlib.Path) -> str:
  """Returns the suffix that selects a file's parser, "" if unknown."""
  name = path.name.lower()
  suffix = pathlib.Path(name.removesuffix(".gz")).suffix
  is_known = suffix in SUFFIXES and not name.endswith(".parquet.gz")
  return suffix if is_known else ""


def rows(path: pathlib.Path) -> Iterator[Numbered]:
  """Yields the rows of a file with their numbers.

  A number is a line number or a position in an array, from 1. A row that cannot
  be parsed is yielded as a MalformedError.

  Raises:
    formats.DataError: the file is missing or damaged, or its suffix is unknown.
  """
  if not path.is_file():
    raise formats.DataError(f"{path}: found no file.")
  git_lfs.refuse_pointer(path, formats.DataError)
  try:
    match kind(path):
      case ".parquet":
        yield from _parquet(path)
      case ".csv" | ".tsv" as suffix:
        with _open(path) as file:
          yield from _table(file, "\t" if suffix == ".tsv" else ",")
      case ".jsonl":
        with _open(path) as file:
          yield from _lines(file)
      case ".json":
        yield from _json(path)
      case _:
        raise formats.DataError(
          f"{path}: expected a name that ends in {', '.join(SUFFIXES)} (.gz)."
        )
  except json_files.RepeatedNameError as error:
    raise formats.DataError(
      f"{path}: found {error}, expected each name once; rename one."
    ) from error
  except UnicodeDecodeError as error:
    raise formats.DataError(f"{path}: not UTF-8 text ({error}).") from error
  except (OSError, EOFError, zlib.error, csv.Error, pa.ArrowException) as error:
    raise formats.DataError(
      f"{path}: {error}. Expected a whole file; copy it again."
    ) from error


def _open(path: pathlib.Path) -> IO[str]:
  opener = gzip.open if path.suffix.lower() == ".gz" else open
  # utf-8-sig: spreadsheets write a byte order mark at the start of a table.
  return opener(path, "rt", encoding="utf-8-sig", newline="")


def _lines(file: IO[str]) -> Iterator[Numbered]:
  for number, line in enumerate(file, start=1):
    if line.strip():
      try:
        yield number, _object(json_files.parse(line))
      except json_files.RepeatedNameError as error:
        yield number, formats.MalformedError(f"the key {error}")
      except (ValueError, RecursionError):
        yield number, formats.MalformedError("not JSON")


def _table(file: IO[str], delimiter: str) -> Iterator[Numbered]:
  csv.field_size_limit(_MAX_CELL_CHARACTERS)  # Of the whole process.
  first_line = file.readline()
  names: list[str] | None = None
  if _DPR_LINE.fullmatch(first_line):
    names = ["question", "answers"]
    delimiter = "\t"
  lines = itertools.chain([first_line], file)
  table = csv.reader(lines, delimiter=delimiter, strict=True)
  if names is None:
    names = next(table, [])
  # A spreadsheet may have several columns without a name.
  json_files.distinct(list(filter(None, names)))
  while True:
    last_line = table.line_num
    try:
      row = next(table, None)
    except csv.Error:
      # An unterminated quote swallowed the following lines. The number of their
      # rows is unknown, so the rows of the file cannot be counted.
      if table.line_num > last_line + 1:
        raise
      yield table.line_num, formats.MalformedError("not a row of a table")
      continue
    if row is None:
      return
    if len(row) == len(names):
      yield table.line_num, dict(zip(names, row))
    elif row:
      error = formats.MalformedError("another number of columns")
      yield table.line_num, error


def _parquet(path: pathlib.Path) -> Iterator[Numbered]:
  with pq.ParquetFile(path) as file:
    json_files.distinct(file.schema_arrow.names)
    columns = map(file.schema.column, range(len(file.schema)))
    json_files.distinct([column.path for column in columns])
    batches = (batch.to_pylist() for batch in file.iter_batches(64))
    yield from enumerate(itertools.chain.from_iterable(batches), start=1)


def _json(path: pathlib.Path) -> Iterator[Numbered]:
  """Reads an array of objects, alone or under `data`, or JSON lines."""
  with _open(path) as file:
    text = file.read()
  try:
    value = json_files.parse(text)
  except json_files.RepeatedNameError:
    raise
  except (ValueError, RecursionError) as error:
    lines = _lines(io.StringIO(text))
    first = next(lines, None)
    if first is None or isinstance(first[1], formats.MalformedError):
      raise formats.DataError(f"{path}: not JSON ({error}).") from error
    yield from itertools.chain([first], lines)
    return
  if isinstance(value, dict):
    value = value.get("Data", value.get("data", value))
  objects = value if isinstance(value, list) else [value]
  yield from enumerate(map(_object, objects), start=1)


def _object(value: Any) -> dict[str, Any] | formats.MalformedError:
  if isinstance(value, dict):
    return value
  return formats.MalformedError("not a JSON object")
