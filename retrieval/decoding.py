"""Decodes bytes of an unknown encoding, and parses HTML."""

from __future__ import annotations

import codecs
import contextlib
import itertools
import re
from typing import Any

# A declaration is looked for in this many bytes, and the encoding is detected
# from as many that are not ASCII, with their neighbours.
_SAMPLE_BYTES = 1 << 16
_NON_ASCII = re.compile(rb"(?:[\x00-\x7f]{0,20}[\x80-\xff])+[\x00-\x7f]{0,20}")
# Below this confidence, a text is taken for a Western European one.
_LEAST_CONFIDENCE = 0.045
# Bytes of Windows-1250 that ISO 8859-2 leaves free, and letters that Polish and
# Czech have in ISO 8859-2 only: s with an accent or a caron.
_WINDOWS_LETTERS = re.compile(rb"[\x80-\x9f]")
_LATIN_2_LETTERS = re.compile(rb"\xb6|[\xec\xf8].*[\xb9\xbe]", re.S)
# The share of letters, digits and blanks above which UTF-16 without a mark is
# text.
_TEXT_LETTERS = 0.7
# Byte order marks; the first of UTF-32 begins with one of UTF-16.
_MARKS = {
  codecs.BOM_UTF32_LE: "utf-32",
  codecs.BOM_UTF32_BE: "utf-32",
  codecs.BOM_UTF16_LE: "utf-16",
  codecs.BOM_UTF16_BE: "utf-16",
}
# A text is UTF-8 if at most this share of its non-ASCII characters is broken.
_DAMAGED = 0.1
# The place where a page names its encoding.
_CHARSET = re.compile(
  rb"<(?:meta|\?xml)[^>]{1,200}?(?:charset|encoding)=[\s\"']*([\w.-]+)", re.I
)


def decode(data: bytes, charset: str = "") -> str:
  """Decodes bytes as UTF-8, or as the encoding that is declared or detected.

  Args:
    data: the bytes; U+FFFD takes the place of broken ones.
    charset: the encoding that the server names; "" if it names none.

  Raises:
    ValueError: the bytes are no text.
  """
  sample = data[:_SAMPLE_BYTES]
  for mark, encoding in _MARKS.items():
    if sample.startswith(mark):
      return data.decode(encoding, errors="replace")
  if b"\0" in sample:
    encoding = _detected(sample)
    if encoding.lower().startswith("utf-"):
      text = sample.decode(encoding, errors="replace")
      letters = sum(c.isalnum() or c.isspace() for c in text)
      if letters > _TEXT_LETTERS * len(text) and len(text.split()) > 1:
        return data.decode(encoding, errors="replace")
    raise ValueError("is binary, expected text")
  declared = _CHARSET.search(sample)
  if not charset and declared:
    charset = declared[1].decode()
  codec = ""
  with contextlib.suppress(LookupError):  # An unknown encoding.
    codec = codecs.lookup(charset).name
  # Bytes of these 7-bit encodings are valid UTF-8 too, but mean other text.
  if codec.startswith(("iso2022", "hz")):
    return data.decode(codec, errors="replace")
  decoded = data.decode("utf-8-sig", errors="replace")
  non_ascii = len(decoded) - len(decoded.encode("ascii", "ignore"))
  if not non_ascii and b"\x1b$" in data:  # Encodings of 7 bits, as in letters.
    return data.decode(_detected(data) or "ascii", errors="replace")
  if decoded.count("\ufffd") <= _DAMAGED * non_ascii:
    return decoded
  # A page declared as Latin-1 or ASCII is in cp1252 or another encoding, as in
  # browsers, so its declaration is not used.
  if codec not in ("", "ascii", "iso8859-1") and codec[:6] != "utf-16":
    return data.decode(codec, errors="replace")
  passages = itertools.islice(_NON_ASCII.finditer(data), _SAMPLE_BYTES)
  sample = b"\n".join(match[0] for match in passages)[:_SAMPLE_BYTES]
  return data.decode(_detected(sample) or "cp1252", errors="replace")


def _detected(sample: bytes) -> str:
  """Returns the detected encoding of bytes, "" if none is likely."""
  import chardet

  eras = chardet.EncodingEra
  result = chardet.detect(
    sample,
    prefer_superset=True,
    encoding_era=eras.MODERN_WEB | eras.LEGACY_ISO | eras.DOS,
    # Vietnamese by combining marks, which short texts are mistaken for.
    exclude_encodings=("cp1258",),
  )
  encoding = result["encoding"]
  if not encoding or result["confidence"] < _LEAST_CONFIDENCE:
    return ""
  if encoding == "Windows-1250" and not _WINDOWS_LETTERS.search(sample):
    if _LATIN_2_LETTERS.search(sample):
      return "iso8859-2"
  return encoding


def parse_html(source: str) -> Any:
  """Parses a page or a fragment, and returns its root element.

  Raises:
    lxml.etree.ParserError: the page is empty.
  """
  from lxml import html

  # Bytes, because lxml refuses a text that declares its encoding.
  parser = html.HTMLParser(encoding="utf-8")
  return html.document_fromstring(source.encode(), parser=parser)
