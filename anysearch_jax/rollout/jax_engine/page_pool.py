"""Reference counts of KV pages, and the prompt prefixes that they hold.

Prompts with a common prefix share whole pages. A page is identified by its
tokens and by the page before it, so a lookup walks the prompt page by page. The
last, partial page of a prompt is copied instead of shared: each row continues
it with its own tokens. A page that no row holds keeps its content until it is
allocated again, least recently used first.

vLLM does the same with hashes of tokens as keys:
https://docs.vllm.ai/en/latest/design/prefix_caching/.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

# The reserved page that padding is written to.
PADDING = 0
# Identifies a page: the name of the page before it, and its tokens.
_Key = tuple[int, tuple[int, ...]]
_START = 0


@dataclasses.dataclass
class _Known:
  """A page with known tokens; `ready` once a call has written them."""

  name: int
  key: _Key
  page: int
  ready: bool = False


class Shared(NamedTuple):
  """The pages that hold a prefix of some tokens.

  pages: whole pages, in order. last: a page that holds all remaining tokens, to
  be copied, or None. filling: whether another row is filling the next page.
  """

  pages: list[int]
  last: int | None = None
  filling: bool = False


class PagePool:
  """Pages `1` to `count - 1` of `size` tokens each, with reference counts."""

  def __init__(self, count: int, size: int):
    self.size = size
    self._free = OrderedDict.fromkeys(range(1, count))
    self._holders = [0] * count
    self._known: dict[_Key, _Known] = {}
    self._by_page: dict[int, _Known] = {}
    self._names = _START

  @property
  def size_in_pages(self) -> int:
    """Number of pages that rows can hold."""
    return len(self._holders) - 1

  @property
  def free(self) -> int:
    """Number of pages that no row holds."""
    return len(self._free)

  def shared(self, tokens: Sequence[int]) -> Shared:
    """Finds pages that hold a prefix of `tokens`."""
    pages: list[int] = []
    name = _START
    for key_tokens in self._cut(tokens):
      known = self._known.get((name, key_tokens))
      if known is None:
        break
      if not known.ready:
        return Shared(pages, filling=True)
      if len(key_tokens) < self.size:
        return Shared(pages, known.page)
      pages.append(known.page)
      name = known.name
    return Shared(pages)

  def hold(self, pages: Sequence[int]) -> None:
    """Adds a reference to each of the pages, which `shared` found."""
    for page in pages:
      self._holders[page] += 1
      self._free.pop(page, None)

  def take(self, count: int) -> list[int]:
    """Allocates `count` free pages; `free` must be at least `count`."""
    pages = []
    for _ in range(count):
      page, _ = self._free.popitem(last=False)
      self._forget(page)
      self._holders[page] = 1
      pages.append(page)
    return pages

  def reserve(self, tokens: Sequence[int], pages: Sequence[int]) -> None:
    """Registers that `pages` will hold `tokens`; see `mark_ready`."""
    name = _START
    for key_tokens, page in zip(self._cut(tokens), pages, strict=True):
      key = (name, key_tokens)
      known = self._known.get(key)
      if known is None:
        self._names += 1
        known = _Known(self._names, key, page)
        self._known[key] = self._by_page[page] = known
      name = known.name

  def mark_ready(self, pages: Sequence[int]) -> None:
    """Marks promised pages as ready to be shared: their writes are queued."""
    for page in pages:
      if page in self._by_page:
        self._by_page[page].ready = True

  def drop(self, pages: Sequence[int]) -> None:
    """Removes a reference from each page, last page first.

    The first pages of a prompt are then the last to be allocated again.
    """
    for page in reversed(pages):
      self._holders[page] -= 1
      if not self._holders[page]:
        known = self._by_page.get(page)
        if known is not None and not known.ready:
          self._forget(page)
        self._free[page] = None

  def forget_all(self) -> None:
    """Forgets the content of all pages, because the weights change."""
    self._known.clear()
    self._by_page.clear()

  def _forget(self, page: int) -> None:
    known = self._by_page.pop(page, None)
    if known is not None:
      del self._known[known.key]

  def _cut(self, tokens: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yields the tokens of each page; the last page may be partial."""
    for start in range(0, len(tokens), self.size):
      yield tuple(tokens[start : start + self.size])
