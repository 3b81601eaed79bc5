"""The main text of a page: without menus, advertisements and scripts.

trafilatura (Apache-2.0) does it by rules; there is no model in it.
"""

from __future__ import annotations

import codecs
import contextlib
import logging
import re

import trafilatura
from trafilatura import utils as trafilatura_utils

from retrieval.web_pages import addresses, fetching

# Python has "encodings" that are programs or archives; pages have these.
_CHARSET = re.compile(
  r"(utf-?(8|16)(-?[bl]e)?|us-ascii|ascii|latin-?1|iso-?8859-\d+"
  r"|(windows|cp)-?(125\d|874|932|949)|koi8-[rut]|gb(k|2312|18030)|big5(-hkscs)?"
  r"|shift[_-]jis|euc-(jp|kr)|iso-2022-(jp|kr)|tis-620|macintosh)"
)
# HTML's own rule: the charset is declared in the first 1024 bytes.
_META = re.compile(rb"<meta[^>]{0,200}?charset\s*=\s*[\"']?([\w-]{1,40})", re.I)
_META_BYTES = 1024
_CONTROL = re.compile(
  r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x84\x86-\x9f\ud800-\udfff]"
)
_LONGEST_TITLE = 300

# It logs every odd page as an error; here such pages are counted.
logging.getLogger("trafilatura").setLevel(logging.CRITICAL)


def text(page: fetching.Fetched) -> tuple[str, str]:
  """Returns title and main text of a page, each in one line a paragraph.

  Raises:
    PageError: the page has no text.
  """
  if page.kind == "text/plain":
    title, found = "", _decoded(page)
  else:
    title, found = _of_html(page)
  found = _lines(found)
  if not found:
    raise addresses.PageError(f"{page.url} has no text.", "text")
  return " ".join(_lines(title).split())[:_LONGEST_TITLE], found


def cut(words: str, most: int) -> str:
  """Returns the first `most` words of a text, with its line breaks."""
  end = 0
  for count, match in enumerate(re.finditer(r"\S+", words), 1):
    if count > most:
      return words[:end] + " ..."
    end = match.end()
  return words


def _of_html(page: fetching.Fetched) -> tuple[str, str]:
  source = _decoded(page)
  try:
    # A bare fragment is refused unless it is part of something.
    tree = trafilatura_utils.load_html(source)
    if tree is None:
      tree = trafilatura_utils.load_html(f"<html><body>{source}</body></html>")
    if tree is None:
      return "", ""
    title = tree.findtext(".//title") or ""
    found = trafilatura.extract(tree, include_comments=False)
    # Short and odd pages have no part that is clearly the main one.
    return title, found or trafilatura.html2txt(tree) or ""
  # A page that breaks a parser costs its own text only.
  except Exception as error:
    raise addresses.PageError(
      f"{page.url}: its HTML cannot be read ({type(error).__name__}).", "text"
    ) from None


def _decoded(page: fetching.Fetched) -> str:
  """Returns the text of the bytes, with U+FFFD for what is broken.

  The bytes never reach trafilatura, which would unpack archives in them.
  """
  declared = _META.search(page.data[:_META_BYTES])
  names = [
    page.charset,
    declared[1].decode("ascii").lower() if declared else "",
  ]
  if page.data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
    names.insert(0, "utf-16")
  for name in names:
    if _CHARSET.fullmatch(name):
      with contextlib.suppress(LookupError):  # No codec of Python's.
        return page.data.decode(name, errors="replace").lstrip("\ufeff")
  with contextlib.suppress(UnicodeDecodeError):
    # A page that was cut may end within a character.
    return codecs.getincrementaldecoder("utf-8-sig")().decode(page.data)
  return page.data.decode("windows-1252", errors="replace")


def _lines(found: str) -> str:
  lines = (
    " ".join(each.split()) for each in _CONTROL.sub("", found).splitlines()
  )
  return "\n".join(each for each in lines if each)
