"""Reads files of many kinds as texts with their titles, pages and headings."""

from __future__ import annotations

import csv
import io
import itertools
import json
import logging
import os
import pathlib
import re
import zipfile
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from anysearch_jax.retrieval import decoding
from anysearch_jax.retrieval.documents import splitting

# The most bytes of a file, because most readers hold all of it in memory.
LARGEST = 64 << 20
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff]")
# Names of the fields of a row that hold its title, and its text.
_TITLES = ("title", "name", "question")
_TEXTS = ("text", "contents", "content", "body")
csv.field_size_limit(LARGEST)
# These libraries log whatever they repair in a file.
for _name in ("pypdf", "trafilatura"):
  logging.getLogger(_name).setLevel(logging.CRITICAL)


class ReadError(ValueError):
  """A file cannot be read; the message is a clause about the file."""


class Part(NamedTuple):
  """A part of a document.

  Attributes:
    text: the text of this part.
    title: title of the document or of this part; "" means the file's name.
    page: number of the page, from 1; 0 if the file has no pages.
    heading: heading of the part, such as `row 7` of a table.
    is_markdown: whether the text has Markdown's headings.
  """

  text: str
  title: str = ""
  page: int = 0
  heading: str = ""
  is_markdown: bool = False


def read(path: str) -> Iterator[Part]:
  """Yields the parts of a file that have text, by the reader of its ending.

  Raises:
    ReadError: the file cannot be read, or has no text.
  """
  reader = READERS[os.path.splitext(path)[1].lower()]
  is_empty = True
  try:
    for part in reader(pathlib.Path(path)):
      if text := _CONTROL.sub(" ", part.text).strip():
        is_empty = False
        title = " ".join(_CONTROL.sub(" ", part.title).split())
        yield part._replace(text=text, title=title)
  except ReadError:
    raise
  except OSError as error:
    raise ReadError(f"cannot be opened: {error.strerror or error}") from error
  # A file that breaks a parser costs its own text only.
  except Exception as error:
    reason = " ".join(f"{type(error).__name__}: {error}".split())
    raise ReadError(f"cannot be read ({reason:.200})") from error
  if is_empty:
    raise ReadError("has no text")


def _sized(path: pathlib.Path) -> pathlib.Path:
  if (size := path.stat().st_size) > LARGEST:
    raise ReadError(f"has {size >> 20} MB, expected at most {LARGEST >> 20}")
  return path


def _text(path: pathlib.Path) -> str:
  """Returns the text of a file, whose lines end in newlines."""
  data = _sized(path).read_bytes()
  try:
    text = decoding.decode(data)
  except ValueError as error:
    raise ReadError(f"{error}") from error
  return re.sub("\r\n?", "\n", text)


def _plain(path: pathlib.Path) -> Iterator[Part]:
  yield Part(_text(path))


def _markdown(path: pathlib.Path) -> Iterator[Part]:
  text = _text(path)
  yield Part(text, splitting.title(text), is_markdown=True)


def _html(path: pathlib.Path) -> Iterator[Part]:
  import trafilatura
  from lxml import etree

  tree = decoding.parse_html(_text(path))
  etree.strip_elements(tree, "script", "style", with_tail=False)
  # trafilatura keeps only the main part of a page; in a user's own file, all
  # but the menus matters.
  if tree.find(".//article") is None and tree.find(".//main") is None:
    for body in tree.findall("body"):
      body.tag = "article"
  text = trafilatura.extract(
    tree, output_format="markdown", include_comments=False, fast=True
  )
  # Inside a list, trafilatura begins a code block in the middle of a line.
  text = re.sub(r" ```$", "\n```", text or tree.text_content(), flags=re.M)
  title = tree.findtext(".//title") or splitting.title(text)
  yield Part(text, title, is_markdown=True)


def _row(number: int, row: Mapping[str, Any]) -> Part:
  """Returns a row of a table as a part: its fields, and its text below."""
  values = {
    str(name): value
    if isinstance(value, str)
    else json.dumps(value, ensure_ascii=False, default=str)
    for name, value in row.items()
    if value not in (None, "")
  }
  title = next((values.pop(name) for name in _TITLES if name in values), "")
  texts = [values.pop(name) for name in _TEXTS if name in values]
  lines = [*(f"{name}: {value}" for name, value in values.items()), *texts]
  return Part("\n".join(lines) or title, title, heading=f"row {number}")


def _csv(path: pathlib.Path) -> Iterator[Part]:
  text = _text(path).lstrip("\n")
  first = text.partition("\n")[0]
  delimiter = max(
    ",;\t|", key=lambda by: len(next(csv.reader([first], delimiter=by), ()))
  )
  lines = csv.reader(
    io.StringIO(text, newline=""), delimiter=delimiter, skipinitialspace=True
  )
  rows = filter(any, lines)
  header = next(rows, [])
  for number, row in enumerate(rows, start=1):
    fields: dict[str, str] = {}
    cells = itertools.zip_longest(header, row, fillvalue="")
    for column, (name, value) in enumerate(cells, start=1):
      is_new = name and name not in fields
      fields[name if is_new else f"{name or 'column'} {column}"] = value
    yield _row(number, fields)


def _records(path: pathlib.Path) -> Iterator[Part]:
  from anysearch_jax.data import files, formats

  if path.suffix.lower() == ".json":  # Other kinds are read row by row.
    _sized(path)
  for number, row in files.rows(path):
    if isinstance(row, formats.MalformedError):
      raise ReadError(f"row {number} is {row}")
    yield _row(number, row)


def _pdf(path: pathlib.Path) -> Iterator[Part]:
  import pypdf

  reader = pypdf.PdfReader(_sized(path))
  if reader.is_encrypted and not reader.decrypt(""):
    raise ReadError("is encrypted; save it without its password")
  metadata = reader.metadata
  title = metadata.title if metadata else None
  is_empty = True
  for number, page in enumerate(reader.pages, start=1):
    text = page.extract_text()
    is_empty = is_empty and not text.strip()
    yield Part(text, title or "", page=number)
  if is_empty:
    raise ReadError("has pages of pictures only; recognize their text first")


def _docx(path: pathlib.Path) -> Iterator[Part]:
  import docx
  from docx.table import Table

  with zipfile.ZipFile(_sized(path)) as file:
    size = sum(member.file_size for member in file.infolist())
  if size > 2 * LARGEST:
    raise ReadError(
      f"unpacks to {size >> 20} MB, expected at most {LARGEST >> 19}"
    )
  document = docx.Document(str(path))
  lines = []
  for block in document.iter_inner_content():
    if isinstance(block, Table):
      for row in block.rows:
        # Each merged cell counts once; the paths find nested tables too.
        cells = [cell._tc.xpath(".//w:p") for cell in dict.fromkeys(row.cells)]
        lines.append(" | ".join(" ".join(p.text for p in c) for c in cells))
      continue
    style = block.style.name if block.style else ""
    level = re.fullmatch(r"Heading ([1-6])|Title", style or "")
    marks = "#" * int(level[1] or 1) + " " if level and block.text else ""
    lines.append(marks + block.text)
  text = "\n\n".join(lines)
  title = document.core_properties.title or splitting.title(text)
  yield Part(text, title, is_markdown=True)


READERS: dict[str, Callable[[pathlib.Path], Iterator[Part]]] = {
  **dict.fromkeys((".md", ".markdown"), _markdown),
  **dict.fromkeys((".txt", ".text", ".rst"), _plain),
  **dict.fromkeys((".html", ".htm"), _html),
  **dict.fromkeys((".csv", ".tsv"), _csv),
  **dict.fromkeys((".json", ".jsonl", ".parquet"), _records),
  ".pdf": _pdf,
  ".docx": _docx,
}
