"""Decodes bytes of an unknown encoding, and parses HTML."""

from __future__ import annotations

import codecs
import contextlib
import re
from typing import Any

# The encoding of a file is guessed from this many bytes.
_SAMPLE_BYTES = 1 << 16
# Below this share of bytes beyond ASCII, a text is taken for a Western European
# one.
_WESTERN = 0.3
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
  if sample.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
    return data.decode("utf-16", errors="replace")
  if b"\0" in sample:
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
  if decoded.count("\ufffd") <= _DAMAGED * non_ascii:
    return decoded
  # A page declared as Latin-1 or ASCII is in cp1252 or another encoding, as in
  # browsers, so its declaration is not used.
  if codec not in ("", "ascii", "iso8859-1") and codec[:6] != "utf-16":
    return data.decode(codec, errors="replace")
  non_ascii_share = 1 - len(sample.decode("ascii", "ignore")) / len(sample)
  if non_ascii_share < _WESTERN:
    return data.decode("cp1252", errors="replace")
  import charset_normalizer

  best = charset_normalizer.from_bytes(sample).best()
  return data.decode(best.encoding if best else "cp1252", errors="replace")


def parse_html(source: str) -> Any:
  """Parses a page or a fragment, and returns its root element.

  Raises:
    lxml.etree.ParserError: the page is empty.
  """
  from lxml import html

  # Bytes, because lxml refuses a text that declares its encoding.
  parser = html.HTMLParser(encoding="utf-8")
  return html.document_fromstring(source.encode(), parser=parser)
