"""Reads PDF files page by page, with the values of their forms.

pypdfium2 (Apache-2.0 or BSD-3) brings PDFium, the reader of Chromium.
"""

from __future__ import annotations

import pathlib
import re
import struct
import tempfile
import zlib
from collections.abc import Callable, Iterator
from typing import Any

from anysearch_jax.retrieval.documents import parts

# A hyphen at the end of a line that divides a word. PDFium writes U+FFFE for
# those that it recognizes.
_HYPHEN = re.compile(
  "(?:[\u00ad\ufffe\x02]|(?<=[^\\W\\d_])[-\u2010])[ \t]*\n[ \t]*(?=[^\\W\\d_])"
  "|[\u00ad\ufffe\x02]"
)
_LIGATURES = str.maketrans(
  {
    "\ufb00": "ff",
    "\ufb01": "fi",
    "\ufb02": "fl",
    "\ufb03": "ffi",
    "\ufb04": "ffl",
    "\ufb05": "st",
    "\ufb06": "st",
  }
)
# Characters that are no letters, as of a font that does not say what its glyphs
# are, and the share of them above which a page is no text.
_UNREADABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ue000-\uefff\ufffd]")
_GARBLED = 0.04
# Resolution of the pictures of pages that a recognizer reads.
_DOTS_PER_INCH = 300
_POINTS_PER_INCH = 72
# The most pixels of such a picture; larger pages get fewer dots an inch.
_MAX_PIXELS = 40_000_000

# Returns the text of a picture, which is a PNG file.
Recognizer = Callable[[pathlib.Path], str]


def read(
  path: pathlib.Path, recognizer: Recognizer | None
) -> Iterator[parts.Part]:
  """Yields the pages of a PDF that have text, and what was lost.

  Args:
    path: the file.
    recognizer: reads the pages that are pictures; None leaves them out.

  Raises:
    parts.ReadError: the file is no PDF, or is encrypted.
  """
  import pypdfium2
  from pypdfium2 import raw

  try:
    document = pypdfium2.PdfDocument(parts.check_size(path))
  except pypdfium2.PdfiumError as error:
    if error.err_code == raw.FPDF_ERR_PASSWORD:
      reason = "is encrypted; save it without its password"
    else:
      reason = "is cut or damaged, or no PDF; copy it again"
    raise parts.ReadError(reason) from error
  with document:
    title = document.get_metadata_value("Title")
    document.init_forms()
    # Numbers of pages, by what is to be said of them.
    losses: dict[str, list[int]] = {}
    for index in range(len(document)):
      text, reason = _page(document, index, recognizer)
      if text:
        yield parts.Part(text, title, page=index + 1)
      if reason:
        losses.setdefault(reason, []).append(index + 1)
  clauses = []
  for reason, numbers in losses.items():
    noun = "page" if len(numbers) == 1 else "pages"
    clauses.append(f"has {noun} {parts.name_ranges(numbers)} {reason}")
  if clauses:
    yield parts.Part("", lost="; ".join(clauses))


def _page(
  document: Any, index: int, recognizer: Recognizer | None
) -> tuple[str, str]:
  """Returns the text of a page, and what was lost of it."""
  import pypdfium2

  try:
    text = _page_text(document, index)
    has_content = bool(text) or _has_content(document, index)
    is_garbled = len(_UNREADABLE.findall(text)) > _GARBLED * len(text)
    if not has_content:
      return "", "without text: blank"
    if text and not is_garbled:
      return text, ""
    if recognizer:
      recognized = _recognized_text(document, index, recognizer)
      return recognized, "" if recognized else "without text: pictures"
  except pypdfium2.PdfiumError:
    return "", "without text: damaged"
  except parts.ReadError as error:
    return text, f"that --ocr did not read: {error}"
  if is_garbled:
    reason = "whose fonts do not name their letters: --ocr=tesseract reads them"
  else:
    reason = "without text: pictures, which --ocr=tesseract reads"
  return text, reason


def _page_text(document: Any, index: int) -> str:
  """Returns the text of a page and of its form; divided words are whole."""
  from pypdfium2 import raw

  page = document[index]
  if raw.FPDFPage_GetAnnotCount(page) > 0:
    # The appearances of annotations and fields become content of the page,
    # which is seen when the page is opened again.
    raw.FPDFPage_Flatten(page, raw.FLAT_NORMALDISPLAY)
    page.close()
    page = document[index]
  text = page.get_textpage().get_text_range()
  page.close()
  text = text.replace("\r\n", "\n").translate(_LIGATURES)
  return _HYPHEN.sub("", text).strip()


def _has_content(document: Any, index: int) -> bool:
  from pypdfium2 import raw

  page = document[index]
  count = raw.FPDFPage_CountObjects(page)
  page.close()
  return count > 0


def _recognized_text(document: Any, index: int, recognizer: Recognizer) -> str:
  page = document[index]
  scale = _DOTS_PER_INCH / _POINTS_PER_INCH
  pixels = page.get_width() * page.get_height() * scale**2
  if pixels > _MAX_PIXELS:
    scale *= (_MAX_PIXELS / pixels) ** 0.5
  bitmap = page.render(scale=scale, grayscale=True)
  with tempfile.TemporaryDirectory() as folder:
    picture = pathlib.Path(folder) / f"page{index + 1}.png"
    picture.write_bytes(_png(bitmap))
    page.close()
    return recognizer(picture).strip()


def _png(bitmap: Any) -> bytes:
  """Returns a bitmap of a byte a pixel as a PNG file."""
  pixels = bitmap.to_numpy().reshape(bitmap.height, bitmap.width)
  # Each line begins with the number of its filter: 0, none.
  lines = b"".join(b"\0" + line.tobytes() for line in pixels)
  header = struct.pack(">IIBBBBB", bitmap.width, bitmap.height, 8, 0, 0, 0, 0)
  chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(lines)), (b"IEND", b""))
  return b"\x89PNG\r\n\x1a\n" + b"".join(
    struct.pack(">I", len(data))
    + name
    + data
    + struct.pack(">I", zlib.crc32(name + data))
    for name, data in chunks
  )
