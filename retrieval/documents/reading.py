"""Reads files of many kinds as texts with their titles, pages and headings."""

from __future__ import annotations

import functools
import logging
import pathlib
import re
from collections.abc import Callable, Iterator

from anysearch_jax.host import git_lfs
from anysearch_jax.retrieval.documents import (
  mail,
  markup,
  office,
  parts,
  pdf,
  tables,
)

Part = parts.Part
ReadError = parts.ReadError
LARGEST = parts.LARGEST

_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff]")
_SAMPLE_BYTES = 1024
_OLE = b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1"
# By streams of such a file, its ending or why it is not read.
_OLE_STREAMS = {
  "EncryptedPackage": "is protected by a password; save it without one",
  "WordDocument": "is an old Word document; save it as .docx",
  "PowerPoint Document": "is an old PowerPoint file; save it as .pptx",
  "__substg1.0": "is a letter of Outlook; save it as .eml",
  "Workbook": ".xls",
  "Book": ".xls",
}
_MIMETYPES = {
  "application/epub+zip": ".epub",
  "application/vnd.oasis.opendocument.text": ".odt",
  "application/vnd.oasis.opendocument.text-template": ".odt",
  "application/vnd.oasis.opendocument.presentation": ".odp",
  "application/vnd.oasis.opendocument.spreadsheet": ".ods",
}
_FOLDERS = {"word/": ".docx", "ppt/": ".pptx", "xl/": ".xlsx"}
# Kinds that are never plain text, whatever the file holds.
_BINARY_ENDINGS = frozenset(
  (".pdf", ".doc", ".ppt", ".msg", ".xlsx", ".xlsm", ".xlsb", ".xls", ".ods")
  + tuple(office.READERS)
)
# What programs write as text under the ending of another kind.
_TEXT_KINDS = {".xls": ".csv", ".doc": ".txt"}
# Kinds that a recognizer of pictures reads.
PICTURES = (".png", ".jpg", ".jpeg", ".tif", ".tiff", ".bmp", ".webp")
_HTML = re.compile(rb"\s*(?:<\?xml[^>]*>\s*)?<(?:!doctype html|html)\b", re.I)
logging.getLogger("pypdfium2").setLevel(logging.CRITICAL)


def read(path: str, recognizer: pdf.Recognizer | None = None) -> Iterator[Part]:
  """Yields the parts of a file that have text, and what was lost of it.

  Args:
    path: a file whose ending has a reader, or a picture if there is a
      recognizer. A file whose content is of another
      kind than its ending says is read as what it is.
    recognizer: reads pictures and the pages that are pictures; None leaves
      these pages out.

  Raises:
    ReadError: the file cannot be read, or has no text.
  """
  file = pathlib.Path(path)
  losses = []
  is_empty = True
  try:
    for part in _reader(file, recognizer)(file):
      if part.lost:
        losses.append(part.lost)
      if text := _CONTROL.sub(" ", part.text).strip():
        is_empty = False
        title = " ".join(_CONTROL.sub(" ", part.title).split())
        yield part._replace(text=text, title=title)
      elif part.lost:
        yield part._replace(text="")
  except ReadError:
    raise
  except OSError as error:
    raise ReadError(f"cannot be opened: {error.strerror or error}") from error
  except MemoryError:
    raise
  # A file that breaks a parser costs its own text only.
  except Exception as error:
    reason = " ".join(f"{type(error).__name__}: {error}".split())
    raise ReadError(f"cannot be read ({reason:.200})") from error
  if is_empty:
    raise ReadError("; ".join(losses) or "has no text")


def _reader(
  path: pathlib.Path, recognizer: pdf.Recognizer | None
) -> Callable[[pathlib.Path], Iterator[Part]]:
  with path.open("rb") as file:
    if file.read(len(git_lfs.START)) == git_lfs.START:
      raise ReadError(git_lfs.REASON)
  if recognizer and path.suffix.lower() in PICTURES:
    return lambda picture: iter([Part(recognizer(picture))])
  ending = _true_ending(path)
  if ending == ".pdf":
    return functools.partial(pdf.read, recognizer=recognizer)
  return READERS[ending]


def _true_ending(path: pathlib.Path) -> str:
  """Returns the ending that the content of a file should have.

  Raises:
    ReadError: the content has no reader.
  """
  ending = path.suffix.lower()
  with path.open("rb") as file:
    start = file.read(_SAMPLE_BYTES)
  is_binary_kind = ending in _BINARY_ENDINGS
  pdf_mark = start.find(b"%PDF-")
  if pdf_mark == 0 or (pdf_mark > 0 and ending == ".pdf"):
    return ".pdf"
  if start.startswith(b"{\\rtf"):
    return ".rtf"
  if start.startswith(b"PK\x03\x04"):
    return _archive_ending(path)
  if start.startswith(_OLE):
    return _ole_ending(path)
  if not is_binary_kind:
    return ending
  if _HTML.match(start):
    return ".html"
  if not start:
    raise ReadError("is empty")
  if ending in _TEXT_KINDS and b"\0" not in start:
    return _TEXT_KINDS[ending]
  raise ReadError(f"is no {ending[1:]} file, or cut; save it again")


def _archive_ending(path: pathlib.Path) -> str:
  """Returns the ending of a kind of zip archive."""
  with parts.open_archive(path) as archive:
    names = archive.namelist()
    if "mimetype" in names:
      mimetype = archive.read("mimetype").decode("ascii", "replace").strip()
      if mimetype in _MIMETYPES:
        return _MIMETYPES[mimetype]
    for folder, ending in _FOLDERS.items():
      if any(name.startswith(folder) for name in names):
        return ending
  raise ReadError("is a zip archive; unpack it")


def _ole_ending(path: pathlib.Path) -> str:
  """Returns the ending of a file of Office before 2007, or an encrypted one."""
  data = parts.check_size(path).read_bytes()
  for stream, reason in _OLE_STREAMS.items():
    if stream.encode("utf-16-le") in data:
      if reason == ".xls":
        return reason
      raise ReadError(reason)
  raise ReadError("is an unknown file of an old Office program; save it as PDF")


READERS: dict[str, Callable[[pathlib.Path], Iterator[Part]]] = {
  # Notes and logs, settings, source code.
  **dict.fromkeys((".txt", ".text", ".log", ".srt", ".vtt"), markup.plain),
  **dict.fromkeys((".yaml", ".yml", ".toml", ".ini", ".cfg"), markup.plain),
  **dict.fromkeys((".conf", ".properties", ".tf", ".proto"), markup.plain),
  **dict.fromkeys((".py", ".pyi", ".r", ".jl", ".rb", ".php"), markup.plain),
  **dict.fromkeys((".js", ".mjs", ".ts", ".tsx", ".jsx", ".vue"), markup.plain),
  **dict.fromkeys((".java", ".kt", ".scala", ".go", ".rs"), markup.plain),
  **dict.fromkeys((".c", ".h", ".cc", ".cpp", ".hpp", ".cs"), markup.plain),
  **dict.fromkeys((".swift", ".m", ".pl", ".lua", ".sql"), markup.plain),
  **dict.fromkeys((".sh", ".bash", ".zsh", ".ps1", ".bat"), markup.plain),
  **dict.fromkeys((".css", ".scss", ".graphql", ".bib"), markup.plain),
  **dict.fromkeys((".adoc", ".textile"), markup.plain),
  **markup.READERS,
  **tables.READERS,
  **office.READERS,
  **mail.READERS,
  # What these old kinds hold decides; else they are refused with the reason.
  **dict.fromkeys((".doc", ".ppt", ".msg"), markup.plain),
  ".pdf": functools.partial(pdf.read, recognizer=None),
}
