"""Texts of bytes in an unknown encoding, and trees of HTML."""

from __future__ import annotations

import codecs
import contextlib
import re
from typing import Any

# Bytes that show the encoding of a file.
_SAMPLE = 1 << 16
# Texts with a smaller share of bytes beyond ASCII are of Western Europe.
_WESTERN = 0.3
# Of the characters beyond ASCII of a text in UTF-8, fewer are damaged.
_DAMAGED = 0.1
# Where a page names its encoding.
_CHARSET = re.compile(
  rb"<(?:meta|\?xml)[^>]{1,200}?(?:charset|encoding)=[\s\"']*([\w.-]+)", re.I
)


def text(data: bytes, charset: str = "") -> str:
  """Returns a text in UTF-8, or in an encoding that it names or shows.

  Args:
    data: the bytes; U+FFFD takes the place of broken ones.
    charset: the encoding that its server names; "": none.

  Raises:
    ValueError: the bytes are no text.
  """
  sample = data[:_SAMPLE]
  if sample.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
    return data.decode("utf-16", errors="replace")
  if b"\0" in sample:
    raise ValueError("is binary, expected text")
  declared = _CHARSET.search(sample)
  if not charset and declared:
    charset = declared[1].decode()
  codec = ""
  with contextlib.suppress(LookupError):  # There is no such encoding.
    codec = codecs.lookup(charset).name
  # Encodings of seven bits, whose texts are valid UTF-8 too.
  if codec.startswith(("iso2022", "hz")):
    return data.decode(codec, errors="replace")
  decoded = data.decode("utf-8-sig", errors="replace")
  beyond = len(decoded) - len(decoded.encode("ascii", "ignore"))
  if decoded.count("\ufffd") <= _DAMAGED * beyond:
    return decoded
  # What calls itself Latin-1 is cp1252 or else, as browsers know.
  if codec not in ("", "ascii", "iso8859-1") and codec[:6] != "utf-16":
    return data.decode(codec, errors="replace")
  others = 1 - len(sample.decode("ascii", "ignore")) / len(sample)
  if others < _WESTERN:
    return data.decode("cp1252", errors="replace")
  import charset_normalizer

  best = charset_normalizer.from_bytes(sample).best()
  return data.decode(best.encoding if best else "cp1252", errors="replace")


def tree(source: str) -> Any:
  """Returns the elements of a page or of a part of one.

  Raises:
    lxml.etree.ParserError: the page is empty.
  """
  from lxml import html

  # Bytes, because lxml refuses a text that declares its encoding.
  parser = html.HTMLParser(encoding="utf-8")
  return html.document_fromstring(source.encode(), parser=parser)
