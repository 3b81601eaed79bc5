"""Reads files of many kinds as texts, each with its title and its place."""

from __future__ import annotations

import codecs
import contextlib
import os
import pathlib
import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

from retrieval.documents import splitting

# Bytes of a file that is read as a whole.
LARGEST = 64 << 20
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff]")
# Bytes from which an unknown encoding is found.
_SAMPLE = 1 << 16


class ReadError(ValueError):
  """A file cannot be read; the message is a clause about the file."""


class Part(NamedTuple):
  """A part of a document.

  Attributes:
    text: its text.
    title: of the document, or of this part; "": the name of the file.
    page: from 1, 0 without pages.
    heading: that of the part, such as `row 7` of a table.
    is_markdown: whether the text has Markdown's headings.
  """

  text: str
  title: str = ""
  page: int = 0
  heading: str = ""
  is_markdown: bool = False


def read(path: str) -> Iterator[Part]:
  """Yields the parts of a file, by the reader of its ending.

  Raises:
    ReadError: the file cannot be read, or is empty.
  """
  ending = os.path.splitext(path)[1].lower()
  is_empty = True
  try:
    for part in READERS[ending](pathlib.Path(path)):
      text = _CONTROL.sub(" ", part.text).strip()
      if text:
        is_empty = False
        title = " ".join(_CONTROL.sub(" ", part.title).split())
        yield part._replace(text=text, title=title)
  except ReadError:
    raise
  except OSError as error:
    raise ReadError(f"cannot be opened: {error.strerror or error}") from error
  # A file that breaks a parser costs its own text only.
  except Exception as error:
    said = " ".join(f"{type(error).__name__}: {error}".split())
    raise ReadError(f"cannot be read ({said:.200})") from error
  if is_empty:
    raise ReadError("has no text")


def _bytes(path: pathlib.Path) -> bytes:
  size = path.stat().st_size
  if size > LARGEST:
    raise ReadError(
      f"has {size >> 20} MB, expected at most {LARGEST >> 20}; divide it"
    )
  return path.read_bytes()


def _text(path: pathlib.Path) -> str:
  return decoded(_bytes(path))


def decoded(data: bytes) -> str:
  """Returns a text in UTF-8, in UTF-16 or 32 with a mark, or another encoding.

  Raises:
    ReadError: the bytes are no text.
  """
  for mark, name in (
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
  ):
    if data.startswith(mark):
      return data.decode(name, errors="replace")
  if b"\0" in data[:_SAMPLE]:
    raise ReadError("is binary, expected text")
  with contextlib.suppress(UnicodeDecodeError):
    return data.decode("utf-8-sig")
  import charset_normalizer

  best = charset_normalizer.from_bytes(data[:_SAMPLE]).best()
  if best is None:
    raise ReadError("is in an unknown encoding; save it as UTF-8")
  return data.decode(best.encoding, errors="replace")


def _plain(path: pathlib.Path) -> Iterator[Part]:
  yield Part(_text(path))


def _markdown(path: pathlib.Path) -> Iterator[Part]:
  text = _text(path)
  yield Part(text, splitting.title(text), is_markdown=True)


READERS: dict[str, Callable[[pathlib.Path], Iterator[Part]]] = {
  **dict.fromkeys((".txt", ".text", ".rst"), _plain),
  **dict.fromkeys((".md", ".markdown"), _markdown),
}
