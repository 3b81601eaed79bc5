"""Pages of the web as passages: for a tool that opens them and for searches.

trafilatura (Apache-2.0) finds the main text of a page by rules, without menus,
advertisements and scripts; there is no model in it.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import itertools
import logging
import math
import re
from collections import Counter
from typing import Any, NamedTuple

import trafilatura
from lxml import html

from anysearch_jax import types
from anysearch_jax.host import counting, loop, turns
from anysearch_jax.retrieval import decoding
from anysearch_jax.retrieval import requests as requests_lib
from anysearch_jax.retrieval.web_pages import fetching

_CONTROL = re.compile(
  r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x84\x86-\x9f\ud800-\udfff]"
)
_LONGEST_TITLE = 300
# Elements of a page that are read, at about 0.1 ms of a core for each.
_MOST_ELEMENTS = 10_000
# Up to this many elements, trafilatura compares its rules with justext, whose
# time grows with the square of the number of paragraphs.
_COMPARED_ELEMENTS = 3_000

# It logs every odd page as an error; here such pages are counted.
logging.getLogger("trafilatura").setLevel(logging.CRITICAL)
Answer = tuple[types.Passage, ...]

# Pages that are fetched at a time, and texts that are extracted at a time, on
# threads of their own: a page can cost seconds.
_CONCURRENCY = 32
_LONGEST_WAIT = 600.0  # Seconds that a page may wait for its turn.
_THREADS = 4


class PageReader:
  """Opens pages by their addresses; usable from any event loop and thread.

  As a retriever, it answers an address with one passage: the final address, the
  title, and the main text, cut to `words` words. A page that cannot be read is
  a fact about the address, so it is answered with a sentence that says why. It
  fails no episode.

  Args:
    settings: a `config.PagesConfig`.
    words: the most words of a text.
    fetcher: for tests.

  `counters` has the `pages` that were asked for, how many of them were `read`,
  `cut` or `large` (only the beginning was read), and `failures` by their
  reasons, `failed_robots` and so on; see `fetching.PageError`.
  """

  def __init__(
    self, settings: Any, *, words: int, fetcher: fetching.Fetcher | None = None
  ):
    self._settings = settings
    self._words = words
    self._fetcher = fetcher or fetching.Fetcher(settings)
    self._threads = concurrent.futures.ThreadPoolExecutor(
      _THREADS, thread_name_prefix="pages"
    )
    self.counters: Counter[str] = Counter()
    self._gate = turns.Gate(_CONCURRENCY, 0.0, math.inf, self.counters)

  def identity(self) -> dict[str, Any]:
    """Returns JSON values that identify the answers."""
    return {
      "kind": "pages",
      "words": self._words,
      "largest": self._settings.largest,
      "agent": self._settings.agent,
    }

  @loop.inside
  async def read(self, address: str) -> types.Passage:
    """Returns a page as a passage.

    Raises:
      PageError: the page cannot be read.
      RetrievalError: no page can be read at present.
    """
    self.counters["pages"] += 1
    limit = turns.Limit(self._settings.deadline, _LONGEST_WAIT)
    try:
      async with limit, self._gate.slot():
        page = await self._fetcher.fetch(address)
        content = await asyncio.get_running_loop().run_in_executor(
          self._threads, text, page
        )
    except (fetching.PageError, TimeoutError) as error:
      if isinstance(error, TimeoutError):
        error = fetching.PageError(
          f"{address[:200]}: not read in the time that it had.", "late"
        )
      self.counters["failures"] += 1
      self.counters[f"failed_{error.why}"] += 1
      raise error from None
    self.counters["read"] += 1
    self.counters["large"] += not (page.is_whole and content.is_whole)
    beginning = first_words(content.text, self._words)
    self.counters["cut"] += beginning != content.text
    title = f'"{content.title}"' if content.title else ""
    return types.Passage(page.url, title, beginning)

  async def search(self, request: types.SearchRequest) -> Answer:
    """Returns the page at the address that the request names.

    Raises:
      RetrievalError: no page can be read at present.
    """
    requests_lib.check([request])
    # A policy's text may have lone surrogates, which nothing can send.
    address = request.query.encode(errors="ignore").decode().strip()
    try:
      return (await self.read(address),)
    except fetching.PageError as error:
      return (types.Passage(address, "", f"Not opened. {error}"),)

  def close(self) -> None:
    """Ends the threads; a text that is being extracted is not waited for."""
    self._threads.shutdown(wait=False, cancel_futures=True)


class SearchWithPages:
  """A search whose first results show their pages instead of snippets.

  Args:
    retriever: a search whose passages have addresses as ids.
    reader: reads the pages.
    first: how many results of each search are read, 1 or more.

  `counters` has those of the retriever and, after `pages/`, of the reader.
  `snippets` counts the results that kept their snippet because the page could
  not be read.
  """

  def __init__(self, retriever: Any, reader: PageReader, *, first: int):
    self._retriever = retriever
    self._reader = reader
    self._first = first
    self._snippets = 0

  @property
  def counters(self) -> Counter[str]:
    snippets = Counter({"snippets": self._snippets})
    pages = counting.of_parts({"pages": self._reader})
    return snippets + counting.counters(self._retriever) + pages

  async def search(self, request: types.SearchRequest) -> Answer:
    """Returns passages with ids and titles of the search; raises as it does."""
    passages = await self._retriever.search(request)

    async def with_page(passage: types.Passage) -> types.Passage:
      try:
        page = await self._reader.read(passage.id)
      except types.RetrievalError:
        self._snippets += 1
        return passage
      return dataclasses.replace(passage, text=page.text)

    first = await asyncio.gather(*map(with_page, passages[: self._first]))
    return (*first, *passages[self._first :])

  def identity(self) -> dict[str, Any]:
    """Returns JSON values that identify the answers."""
    return self._retriever.identity() | {
      "pages": self._reader.identity() | {"first": self._first}
    }

  def close(self) -> None:
    """Closes the search and the reader."""
    self._retriever.close()
    self._reader.close()


class Text(NamedTuple):
  """The text of a page.

  Attributes:
    title: the title in one line; "" if there is none.
    text: the main text, with a line for each paragraph.
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
    content = Text("", _source(page), is_whole=True)
  else:
    content = _read_html(page)
  lines = _lines(content.text)
  if not lines:
    raise fetching.PageError(f"{page.url} has no text.", "text")
  title = " ".join(_lines(content.title).split())[:_LONGEST_TITLE]
  return content._replace(title=title, text=lines)


def first_words(text: str, word_limit: int) -> str:
  """Returns the first words of a text, with its line breaks."""
  end = 0
  for count, match in enumerate(re.finditer(r"\S+", text), 1):
    if count > word_limit:
      return text[:end] + " ..."
    end = match.end()
  return text


def _read_html(page: fetching.Fetched) -> Text:
  source = _source(page)
  if not source.strip():
    return Text("", "", is_whole=True)
  try:
    tree = decoding.parse_html(source)
    title = tree.findtext(".//title") or ""
    is_whole = _truncate(tree, _MOST_ELEMENTS)
    is_large = next(
      itertools.islice(tree.iter(), _COMPARED_ELEMENTS, None), None
    )
    text = trafilatura.extract(
      tree, include_comments=False, fast=is_large is not None
    )
    # Short and odd pages have no part that is clearly the main one.
    text = text or trafilatura.html2txt(tree) or ""
    return Text(title, text, is_whole)
  # A page that breaks a parser costs its own text only.
  except Exception as error:
    raise fetching.PageError(
      f"{page.url}: its HTML cannot be read ({type(error).__name__}).", "text"
    ) from None


def _source(page: fetching.Fetched) -> str:
  """Returns the text of the bytes, which trafilatura would unpack as archives.

  Raises PageError if the bytes are no text.
  """
  try:
    return decoding.decode(page.data, page.charset)
  except ValueError as error:
    raise fetching.PageError(f"{page.url} {error}.", "text") from None


def _truncate(tree: html.HtmlElement, limit: int) -> bool:
  """Keeps the first `limit` elements; returns whether the tree has no more."""
  node = next(itertools.islice(tree.iter(), limit, None), None)
  if node is None:
    return True
  keeps_node = 0  # 1 above the first node that is removed.
  while (parent := node.getparent()) is not None:
    del parent[parent.index(node) + keeps_node :]
    parent.tail = None
    node = parent
    keeps_node = 1
  return False


def _lines(text: str) -> str:
  """Returns the lines that have words, with single blanks between these."""
  lines = _CONTROL.sub("", text).splitlines()
  words_of_lines = (" ".join(line.split()) for line in lines)
  return "\n".join(filter(None, words_of_lines))
