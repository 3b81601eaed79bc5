"""The parts of a document, and what all readers of files share."""

from __future__ import annotations

import itertools
import pathlib
import re
import zipfile
from collections.abc import Iterable
from typing import NamedTuple

from anysearch_jax.retrieval import decoding

# The most bytes of a file, because most readers hold all of it in memory.
LARGEST = 64 << 20
# The most bytes of the unpacked files of an archive.
_LARGEST_UNPACKED = 2 * LARGEST
_IS_ENCRYPTED = 0x1  # The flag of a member of a zip archive.


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
    lost: a clause about what could not be read here; "" if nothing was lost.
  """

  text: str
  title: str = ""
  page: int = 0
  heading: str = ""
  is_markdown: bool = False
  lost: str = ""


def check_size(path: pathlib.Path) -> pathlib.Path:
  """Returns the path.

  Raises:
    ReadError: the file is too large.
  """
  if (size := path.stat().st_size) > LARGEST:
    raise ReadError(f"has {size >> 20} MB, expected at most {LARGEST >> 20}")
  return path


def read_text(path: pathlib.Path) -> str:
  """Returns the text of a file, whose lines end in newlines.

  Raises:
    ReadError: the file is too large or no text.
  """
  return decode(check_size(path).read_bytes())


def decode(data: bytes) -> str:
  """Returns the text of bytes, whose lines end in newlines.

  Raises:
    ReadError: the bytes are no text.
  """
  try:
    text = decoding.decode(data)
  except ValueError as error:
    raise ReadError(f"{error}") from error
  return re.sub("\r\n?", "\n", text)


def open_archive(path: pathlib.Path) -> zipfile.ZipFile:
  """Opens a zip archive whose files are neither too large nor encrypted.

  Raises:
    ReadError: the archive is damaged, encrypted or too large.
  """
  try:
    archive = zipfile.ZipFile(check_size(path))
  except zipfile.BadZipFile as error:
    raise ReadError("is cut or damaged; copy it again") from error
  size = sum(member.file_size for member in archive.infolist())
  if size > _LARGEST_UNPACKED:
    raise ReadError(
      f"unpacks to {size >> 20} MB, expected at most {_LARGEST_UNPACKED >> 20}"
    )
  if any(member.flag_bits & _IS_ENCRYPTED for member in archive.infolist()):
    raise ReadError("is protected by a password; save it without one")
  return archive


def name_ranges(numbers: Iterable[int]) -> str:
  """Returns ascending numbers as text, such as `2, 4-6`."""
  ranges = []
  by_offset = itertools.groupby(
    enumerate(numbers), key=lambda pair: pair[1] - pair[0]
  )
  for _, pairs in by_offset:
    run = [number for _, number in pairs]
    ranges.append(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}")
  return ", ".join(ranges)
