"""The main text of a page: without menus, advertisements and scripts.

trafilatura (Apache-2.0) does it by rules; there is no model in it.
"""

from __future__ import annotations

import codecs
import contextlib
import itertools
import logging
import re
from typing import NamedTuple

import trafilatura
from lxml import html
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
# Elements of a page, which decide what its text costs: about 0.1 ms each on one
# core. Only for the smaller page trafilatura compares its rules with justext,
# whose time grows with the square of the paragraphs.
_COMPARED, _MOST = 3_000, 10_000

# It logs every odd page as an error; here such pages are counted.
logging.getLogger("trafilatura").setLevel(logging.CRITICAL)


class Text(NamedTuple):
  """The text of a page.

  title: in one line, "" without one.
  text: a paragraph a line.
  is_whole: whether all elements of the page were read.
  """

  title: str
  text: str
  is_whole: bool


def text(page: fetching.Fetched) -> Text:
  """Returns title and main text of a page.

  Of a page with more than 10,000 elements the first ones are read.

  Raises:
    PageError: the page has no text.
  """
  if page.kind == "text/plain":
    found = Text("", _decoded(page), is_whole=True)
  else:
    found = _of_html(page)
  lines = _lines(found.text)
  if not lines:
    raise addresses.PageError(f"{page.url} has no text.", "text")
  title = " ".join(_lines(found.title).split())[:_LONGEST_TITLE]
  return found._replace(title=title, text=lines)


def cut(words: str, most: int) -> str:
  """Returns the first `most` words of a text, with its line breaks."""
  end = 0
  for count, match in enumerate(re.finditer(r"\S+", words), 1):
    if count > most:
      return words[:end] + " ..."
    end = match.end()
  return words


def _of_html(page: fetching.Fetched) -> Text:
  source = _decoded(page)
  try:
    # A bare fragment is refused unless it is part of something.
    tree = trafilatura_utils.load_html(source)
    if tree is None:
      tree = trafilatura_utils.load_html(f"<html><body>{source}</body></html>")
    if tree is None:
      return Text("", "", is_whole=True)
    title = tree.findtext(".//title") or ""
    is_whole = _cut(tree, _MOST)
    is_large = next(itertools.islice(tree.iter(), _COMPARED, None), None)
    found = trafilatura.extract(
      tree, include_comments=False, fast=is_large is not None
    )
    # Short and odd pages have no part that is clearly the main one.
    found = found or trafilatura.html2txt(tree) or ""
    return Text(title, found, is_whole)
  # A page that breaks a parser costs its own text only.
  except Exception as error:
    raise addresses.PageError(
      f"{page.url}: its HTML cannot be read ({type(error).__name__}).", "text"
    ) from None


def _cut(tree: html.HtmlElement, most: int) -> bool:
  """Removes what follows the first `most` elements; returns if nothing did."""
  node = next(itertools.islice(tree.iter(), most, None), None)
  if node is None:
    return True
  kept = 0
  while (parent := node.getparent()) is not None:
    del parent[parent.index(node) + kept :]
    parent.tail, node, kept = None, parent, 1
  return False


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
