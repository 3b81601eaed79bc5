"""Pages of the web as passages: for a tool that opens them and for searches."""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any

from anysearch_jax import types
from anysearch_jax.host import counting
from retrieval import requests as requests_lib
from retrieval.web_pages import addresses, extraction, fetching

Answer = tuple[types.Passage, ...]

# Pages that one batch of requests fetches at a time, and texts that are
# extracted at a time, on threads of their own: a page can cost seconds.
_CONCURRENCY = 32
_THREADS = 4


class PageReader(requests_lib.OneByBatch):
  """Opens pages by their addresses; usable from any event loop and thread.

  As a retriever, it answers an address with one passage: the final address, the
  title, and the main text, cut to `words` words. A page that cannot be read is
  a fact about the address, so it is answered with a sentence that says why. It
  fails no episode.

  Args:
    limits: of a fetch.
    words: the most words of a text.
    corpus: name of the web as a corpus; a request must name it or none.
    fetcher: for tests.

  `counters` has the `pages` that were asked for, how many of them were `read`,
  `cut` or `large` (only the beginning was read), and `failures` by their
  reasons, `failed_robots` and so on; see `addresses.PageError`.
  """

  def __init__(
    self,
    limits: fetching.Limits,
    *,
    words: int,
    corpus: str = "",
    fetcher: fetching.Fetcher | None = None,
  ):
    self._limits, self._words, self._corpus = limits, words, corpus
    self._fetcher = fetcher or fetching.Fetcher(limits)
    self._threads = concurrent.futures.ThreadPoolExecutor(
      _THREADS, thread_name_prefix="pages"
    )
    self.counters: Counter[str] = Counter()

  def identity(self) -> dict[str, Any]:
    """Returns JSON values that identify the answers."""
    return {
      "kind": "pages",
      "words": self._words,
      "largest": self._limits.largest,
      "agent": self._limits.agent,
    }

  def until(self) -> float:
    """Returns the end of a deadline that begins now, in event-loop time."""
    return asyncio.get_running_loop().time() + self._limits.deadline

  async def read(
    self, address: str, *, until: float | None = None
  ) -> types.Passage:
    """Returns a page as a passage.

    Args:
      address: of the page.
      until: when it is due; None: a deadline from now.

    Raises:
      PageError: the page cannot be read.
      RetrievalError: no page can be read at present.
    """
    self.counters["pages"] += 1
    try:
      passage = await fetching.until(
        self.until() if until is None else until, address, self._read(address)
      )
    except addresses.PageError as error:
      self.counters["failures"] += 1
      self.counters[f"failed_{error.why}"] += 1
      raise
    self.counters["read"] += 1
    return passage

  async def search_many(
    self, requests: Sequence[types.SearchRequest]
  ) -> list[Answer | Exception]:
    """Returns the pages at the addresses that the requests name, in order.

    Raises:
      ValueError: a request is invalid, see `requests.check`.
    """
    requests_lib.check(requests, self._corpus)
    slots = asyncio.Semaphore(_CONCURRENCY)

    async def one(request: types.SearchRequest) -> Answer | Exception:
      # A policy's text may have lone surrogates, which nothing can send.
      address = request.query.encode(errors="ignore").decode().strip()
      try:
        async with slots:
          return (await self.read(address),)
      except addresses.PageError as error:
        return (types.Passage(address, "", f"Not opened. {error}"),)
      except types.RetrievalError as error:
        return error

    return await asyncio.gather(*map(one, requests))

  def close(self) -> None:
    """Ends the threads; a text that is being extracted is not waited for."""
    self._threads.shutdown(wait=False, cancel_futures=True)

  async def _read(self, address: str) -> types.Passage:
    page = await self._fetcher.fetch(address)
    loop = asyncio.get_running_loop()
    title, text, is_whole = await loop.run_in_executor(
      self._threads, extraction.text, page
    )
    self.counters["large"] += not (page.is_whole and is_whole)
    shown = extraction.cut(text, self._words)
    self.counters["cut"] += shown != text
    return types.Passage(page.url, f'"{title}"' if title else "", shown)


class SearchWithPages(requests_lib.OneByBatch):
  """A search whose first results show their pages instead of snippets.

  Args:
    retriever: a search whose passages have addresses as ids.
    reader: reads the pages, all of a search within its one deadline.
    first: how many results of each search are read, 1 or more.

  `counters` has those of the retriever and, after `pages/`, of the reader.
  `snippets` counts the results that kept their snippet because the page could
  not be read.
  """

  def __init__(self, retriever: Any, reader: PageReader, *, first: int):
    self._retriever, self._reader, self._first = retriever, reader, first
    self._snippets = 0

  @property
  def counters(self) -> Counter[str]:
    return Counter(
      {
        **counting.counters(self._retriever),
        **{f"pages/{k}": v for k, v in self._reader.counters.items()},
        "snippets": self._snippets,
      }
    )

  async def search_many(
    self, requests: Sequence[types.SearchRequest]
  ) -> list[Answer | Exception]:
    """Returns answers in request order, with ids and titles of the search.

    All pages are read within one deadline, which begins after the search.
    """
    found = await self._retriever.search_many(requests)
    slots = asyncio.Semaphore(_CONCURRENCY)
    until = self._reader.until()

    async def shown(passage: types.Passage) -> types.Passage:
      try:
        async with asyncio.timeout_at(until), slots:
          page = await self._reader.read(passage.id, until=until)
      except (types.RetrievalError, TimeoutError):
        self._snippets += 1
        return passage
      return dataclasses.replace(passage, text=page.text)

    async def answer(
      passages: Sequence[types.Passage] | Exception,
    ) -> Answer | Exception:
      if isinstance(passages, Exception):
        return passages
      first = await asyncio.gather(*map(shown, passages[: self._first]))
      return (*first, *passages[self._first :])

    return await asyncio.gather(*map(answer, found))

  def identity(self) -> dict[str, Any]:
    """Returns JSON values that identify the answers."""
    return self._retriever.identity() | {
      "pages": self._reader.identity() | {"first": self._first}
    }

  def close(self) -> None:
    """Closes the search and the reader."""
    self._retriever.close()
    self._reader.close()
