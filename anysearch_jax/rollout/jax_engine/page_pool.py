"""Who holds which page of the KV cache, and which prompts stand in them.

Prompts that begin alike share whole pages: a page is known by the tokens in it
and by the pages before it. The last page of a prompt, which is not whole, is
copied by who has the same prompt. What nobody holds any more stays known until
its page is wanted for something else, the longest unused first.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

# The page that padding is written to.
PADDING = 0
# What a page is known by: the name of the one before it, and its tokens.
_Key = tuple[int, tuple[int, ...]]
_START = 0


@dataclasses.dataclass
class _Known:
  """A page with known tokens; `ready` once they stand in it."""

  name: int
  key: _Key
  page: int
  ready: bool = False


class Shared(NamedTuple):
  """What there is of the beginning of some tokens.

  pages: whole ones, in order. last: the page that holds the rest, to be copied;
  None where there is none. filling: what comes next is being filled right now.
  """

  pages: list[int]
  last: int | None = None
  filling: bool = False


class PagePool:
  """Pages `1` to `count - 1` of `size` tokens each.

  Pages are held by rows, several times where they are shared.
  """

  def __init__(self, count: int, size: int):
    self.size = size
    self._free = OrderedDict.fromkeys(range(1, count))
    self._holders = [0] * count
    self._known: dict[_Key, _Known] = {}
    self._by_page: dict[int, _Known] = {}
    self._names = _START

  @property
  def free(self) -> int:
    """Pages that nobody holds."""
    return len(self._free)

  def shared(self, tokens: Sequence[int]) -> Shared:
    """Finds pages that hold the beginning of `tokens`."""
    pages, name = [], _START
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
    """Holds pages that `shared` found."""
    for page in pages:
      self._holders[page] += 1
      self._free.pop(page, None)

  def take(self, count: int) -> list[int]:
    """Holds so many pages that nobody else does; there must be as many."""
    pages = []
    for _ in range(count):
      page, _ = self._free.popitem(last=False)
      self._forget(page)
      self._holders[page] = 1
      pages.append(page)
    return pages

  def promise(self, tokens: Sequence[int], pages: Sequence[int]) -> None:
    """Says that `pages` will hold `tokens`."""
    name = _START
    for key_tokens, page in zip(self._cut(tokens), pages, strict=True):
      key = (name, key_tokens)
      known = self._known.get(key)
      if known is None:
        self._names += 1
        known = _Known(self._names, key, page)
        self._known[key] = self._by_page[page] = known
      name = known.name

  def fulfil(self, pages: Sequence[int]) -> None:
    """Says that what was promised of these pages stands in them."""
    for page in pages:
      if page in self._by_page:
        self._by_page[page].ready = True

  def drop(self, pages: Sequence[int]) -> None:
    """Lets go of pages; the last ones of a row leave first."""
    for page in reversed(pages):
      self._holders[page] -= 1
      if not self._holders[page]:
        known = self._by_page.get(page)
        if known is not None and not known.ready:
          self._forget(page)
        self._free[page] = None

  def forget_all(self) -> None:
    """What stands in the pages is of other weights from now on."""
    self._known.clear()
    self._by_page.clear()

  def _forget(self, page: int) -> None:
    known = self._by_page.pop(page, None)
    if known is not None:
      del self._known[known.key]

  def _cut(self, tokens: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """The tokens of each page; those of the last may be fewer."""
    for start in range(0, len(tokens), self.size):
      yield tuple(tokens[start : start + self.size])
