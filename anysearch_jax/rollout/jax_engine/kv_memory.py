"""The rows of the KV cache: which pages each episode holds, and preemption.

The rows and pages of an engine are divided into data shards, one for each
device along the mesh's `data` axis. Layers with sliding windows have a pool of
pages of their own if it is smaller: there a row frees the pages before the
window of its next token.

Prompts with a common prefix share whole pages. A page is named by a hash of its
tokens and of all before it, and shared where the windowed layers have the
pages of the window before the fork too. The last, partial page of a prompt is
copied instead of shared: each row continues it with its own tokens. A page that
no row holds keeps its content until it is allocated again, least recently used
first. vLLM does the same:
https://docs.vllm.ai/en/latest/design/prefix_caching/.
"""

from __future__ import annotations

import array
import dataclasses
import hashlib
import itertools
from collections import Counter, OrderedDict, deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from anysearch_jax import config as config_lib
from anysearch_jax import types
from anysearch_jax.policy import architecture as architecture_lib

# A shard may have this many more rows than another, to share more pages.
_AHEAD = 8
# On CPUs, XLA's bfloat16 products compute the last rows apart if one or two are
# left of 16: a token's bits would depend on its lane.
_EVEN = 8
# The reserved page that padding is written to, in place of pages not held too.
PADDING = 0


class Shared(NamedTuple):
  """The pages of each pool that hold a prefix of some tokens.

  pages: whole pages, in order, with `PADDING` before the window. copied: pages
  that hold all remaining tokens, to be copied, or (). filling: whether another
  row is filling the next page.
  """

  pages: tuple[list[int], ...]
  copied: tuple[int, ...] = ()
  filling: bool = False


class PagePool:
  """Pages `1` to `count - 1` with reference counts, and what they hold.

  `PADDING` among pages is ignored.
  """

  def __init__(self, count: int):
    self._free = OrderedDict.fromkeys(range(1, count))
    self._holders = [0] * count
    self._by_name: dict[bytes, int] = {}
    self._names: dict[int, bytes] = {}
    self._ready: set[int] = set()

  @property
  def free(self) -> int:
    """Number of pages that no row holds."""
    return len(self._free)

  def find(self, name: bytes) -> int | None:
    """Returns the page of a name, `PADDING` while a row is filling it."""
    page = self._by_name.get(name)
    return page if page is None or page in self._ready else PADDING

  def hold(self, pages: Iterable[int]) -> None:
    """Adds a reference to each of the pages, which `find` found."""
    for page in filter(None, pages):
      self._holders[page] += 1
      self._free.pop(page, None)

  def take(self, count: int, names: Iterable[bytes] = ()) -> list[int]:
    """Allocates `count` free pages; `free` must be at least `count`.

    The first ones will hold what `names` name; see `mark_ready`.
    """
    pages = []
    for _ in range(count):
      page, _ = self._free.popitem(last=False)
      self._forget(page)
      self._holders[page] = 1
      pages.append(page)
    for name, page in zip(names, pages):
      self._forget(self._by_name.get(name, PADDING))
      self._by_name[name], self._names[page] = page, name
    return pages

  def mark_ready(self, pages: Iterable[int]) -> None:
    """Marks named pages as ready to be shared: their writes are queued."""
    self._ready.update(page for page in pages if page in self._names)

  def drop(self, pages: Sequence[int]) -> None:
    """Removes a reference from each page, last page first.

    The first pages of a prompt are then the last to be allocated again.
    """
    for page in filter(None, reversed(pages)):
      self._holders[page] -= 1
      if not self._holders[page]:
        if page not in self._ready:
          self._forget(page)
        self._free[page] = None

  def forget_all(self) -> None:
    """Forgets the content of all pages, because the weights change."""
    for known in (self._by_name, self._names, self._ready):
      known.clear()

  def _forget(self, page: int) -> None:
    if page in self._names:
      del self._by_name[self._names.pop(page)]
      self._ready.discard(page)


@dataclasses.dataclass(eq=False)
class Row:
  """The KV cache of one episode.

  shard: the data shard that the row and its pages belong to.
  pages: page numbers of each pool in order, `PADDING` for the `freed` first of
  the second. cached: number of tokens stored in them. own: index of the first
  page that the row fills itself; earlier ones are shared. prompt: number of
  tokens that other rows may share. names: of the pages that it names. copied:
  pages whose content is copied into pages `own` first, or (). context: the
  episode's tokens; the pages hold its first `cached` ones.
  """

  shard: int
  pages: tuple[list[int], ...]
  cached: int
  own: int
  prompt: int
  names: Sequence[bytes] = ()
  copied: tuple[int, ...] = ()
  context: Sequence[int] = ()
  freed: int = 0


class KvMemory:
  """The rows of an engine: it opens, grows, preempts and releases them."""

  def __init__(
    self,
    config: config_lib.EngineConfig,
    a: architecture_lib.Architecture,
    *,
    shards: int = 1,
  ):
    self._config, self._window = config, a.window
    self._counts = pages(config, a, shards=shards)
    self._pools = [[PagePool(n) for n in self._counts] for _ in range(shards)]
    # In order of opening.
    self._rows: dict[types.Address, Row] = {}

  def __len__(self) -> int:
    return len(self._rows)

  @property
  def held_pages(self) -> tuple[int, int]:
    """The pages that rows hold, and all pages, over all pools."""
    count = sum(n - 1 for n in self._counts) * len(self._pools)
    return count - sum(p.free for p in itertools.chain(*self._pools)), count

  def get(self, address: types.Address) -> Row | None:
    """Returns the episode's row, if it has one."""
    return self._rows.get(address)

  def filling(self, context: Sequence[int]) -> bool:
    """Returns whether another row is prefilling a prefix of `context`."""
    known, size = context[:-1], self._config.page
    return any(
      self._shared(pools, _names(known, size), len(known)).filling
      for pools in self._pools
    )

  def open(
    self, address: types.Address, context: Sequence[int], *, prompt: bool
  ) -> Row | None:
    """Opens a row for an episode that has none.

    Args:
      address: the episode's.
      context: its tokens. The last one is not prefilled: it is the first input
        of decode.
      prompt: whether other rows may share the tokens that this row prefills.

    Returns:
      The row with pages for all of the context but its last token, or None if
      no slot or too few pages are free. Its windowed layers have only pages
      that are shared or copied to; see `advance`.
    """
    size, known = self._config.page, len(context) - 1
    names = list(_names(context[:-1], size))
    found = [self._shared(pools, names, known) for pools in self._pools]
    most = pages_of(len(context) + self._config.decode_steps, self._config)
    shard = self._roomiest(found, most)
    if shard is None:
      return None
    held, copied, _ = found[shard]
    for pool, pages in zip(self._pools[shard], held, strict=True):
      pool.hold(pages)
    own = len(held[0])
    row = Row(
      shard=shard,
      pages=held,
      cached=known if copied else own * size,
      own=own,
      prompt=known if prompt else 0,
      # A copied page leaves its name to the original.
      names=names if prompt and not copied else (),
      copied=copied,
      context=context,
    )
    self._take(row, 0, known)
    self.advance(row, row.cached)
    self._rows[address] = row
    return row

  def _shared(
    self, pools: Sequence[PagePool], names: Iterable[bytes], tokens: int
  ) -> Shared:
    """Finds the longest prefix of named pages that a row may continue."""
    size, filling = self._config.page, False
    found: list[list[int]] = []
    end = first = 0
    missing = -1  # Last page that windowed layers do not have.
    for i, name in enumerate(names):
      there = [pool.find(name) for pool in pools]
      filling = PADDING in there
      if filling or there[0] is None:
        break
      if None in there:
        missing = i
      found.append([page or PADDING for page in there])
      seen = self._first(min((i + 1) * size, tokens))
      if missing < seen:
        end, first = i + 1, seen
    kept = tuple([page[i] for page in found[:end]] for i in range(len(pools)))
    for pages in kept[1:]:
      pages[:first] = [PADDING] * first
    whole = end * size <= tokens
    copied = () if whole else tuple(pages.pop() for pages in kept)
    return Shared(kept, copied, filling)

  def _first(self, tokens: int) -> int:
    """Returns the first page that tokens after `tokens` see in a window."""
    return max(0, tokens - self._window + 1) // self._config.page

  def _take(self, row: Row, i: int, tokens: int) -> None:
    """Gives a row the pages of pool `i` that it lacks for `tokens` tokens."""
    pages = row.pages[i]
    count = pages_of(tokens, self._config) - len(pages)
    pages += self._pools[row.shard][i].take(count, row.names[len(pages) :])

  def advance(self, row: Row, tokens: int) -> None:
    """Readies windowed layers for a call after which `tokens` are cached.

    Frees the pages before the window of the call's first token, and takes those
    of its new ones, of which `pages` has enough for all rows.
    """
    if len(row.pages) > 1:
      first, pages = self._first(row.cached), row.pages[1]
      gone = pages[row.freed : first]
      self._pools[row.shard][1].drop(gone)
      pages[row.freed : first] = [PADDING] * len(gone)
      row.freed = max(row.freed, first)
      self._take(row, 1, tokens)

  def _roomiest(self, found: Sequence[Shared], pages: int) -> int | None:
    """Returns the data shard for a new row of `pages` pages, if one has room.

    If the load is balanced, the shard that `found` the longest shared prefix,
    otherwise a less loaded one. Ties go to the shard with most free pages, then
    to the first one.
    """
    rows = Counter(row.shard for row in self._rows.values())
    shards = range(len(self._pools))
    limit = -(-self._config.slots // len(shards))
    balanced = min(rows[shard] for shard in shards) + _AHEAD

    free = [pools[0].free for pools in self._pools]

    def preference(shard: int) -> tuple[bool, int, bool, int]:
      whole, copies = len(found[shard].pages[0]), bool(found[shard].copied)
      return rows[shard] < balanced, whole, copies, free[shard]

    fits = [n for n in shards if free[n] >= pages and rows[n] < limit]
    return max(fits, key=preference, default=None)

  def resume(self, row: Row, context: Sequence[int]) -> int:
    """Keeps the cached prefix of an episode's new context and drops the rest.

    Only whole pages are kept. A page that also holds other tokens may be shared
    with other rows and must then not be written to. None is kept if pages of
    the window before the change may be freed, whenever calls ended. Returns the
    number of cached tokens that were dropped.
    """
    known, old = row.cached, row.context
    row.context = context
    if old[:known] == context[:-1][:known]:
      return 0
    pairs = enumerate(zip(old[:known], context[:-1]))
    shorter = min(known, len(context) - 1)
    same = next((i for i, (a, b) in pairs if a != b), shorter)
    keep = same // self._config.page
    near = len(row.pages) > 1
    if near and self._first(keep * self._config.page) < self._first(known):
      keep = row.freed = 0
    for pool, pages in zip(self._pools[row.shard], row.pages, strict=True):
      pool.drop(pages[keep:])
      del pages[keep:]
    row.cached = keep * self._config.page
    row.own, row.prompt, row.names = min(row.own, keep), 0, ()
    return known - row.cached

  def grow(
    self, row: Row, tokens: int, busy: Collection[Row]
  ) -> set[types.Address]:
    """Gives a row pages for `tokens` tokens in all, if it can.

    If too few pages are free, the youngest other rows of its shard that are not
    `busy` are preempted. Their addresses are returned; they have no row any
    more.
    """
    pool, gone = self._pools[row.shard][0], set()
    wanted = pages_of(tokens, self._config) - len(row.pages[0])
    for address, other in reversed(list(self._rows.items())):
      if wanted <= pool.free:
        break
      if other.shard == row.shard and other is not row and other not in busy:
        self.release(address)
        gone.add(address)
    if wanted <= pool.free:
      self._take(row, 0, tokens)
    return gone

  def holds(self, row: Row, tokens: int) -> bool:
    """Returns whether a row has pages for `tokens` tokens."""
    return len(row.pages[0]) >= pages_of(tokens, self._config)

  def mark_ready(self, row: Row) -> None:
    """Lets other rows share the prompt pages that a row has filled so far.

    Device calls run in order, so a write that is only queued counts.
    """
    end = row.cached // self._config.page
    if row.cached >= row.prompt:
      end = max(end, pages_of(row.prompt, self._config))
    for pool, pages in zip(self._pools[row.shard], row.pages, strict=True):
      pool.mark_ready(pages[row.own : end])
    self.advance(row, row.cached)

  def lanes(self, width: int) -> Lanes:
    """Returns the lanes of a call, all of them free."""
    columns = pages_of(self._config.max_context, self._config)
    columns *= len(self._counts)
    return Lanes(width, columns, shards=len(self._pools))

  def release(self, address: types.Address) -> None:
    """Forgets an episode; an unknown one is ignored."""
    row = self._rows.pop(address, None)
    if row is not None:
      for pool, pages in zip(self._pools[row.shard], row.pages, strict=True):
        pool.drop(pages)

  def forget_prompts(self) -> None:
    """Stops sharing what the pages hold, because the weights change."""
    for pool in itertools.chain(*self._pools):
      pool.forget_all()


class Lanes:
  """The lanes of one call, divided evenly between the data shards.

  Attributes:
    table: int `[width, pools M]`, the pages of each lane's row, padded with 0;
      of a second pool behind those of the first.
  """

  def __init__(self, width: int, columns: int, *, shards: int):
    share = width // shards
    self._free = [
      deque(range(shard * share, (shard + 1) * share))
      for shard in range(shards)
    ]
    self.table = np.full((width, columns), PADDING, np.int32)

  def room(self, row: Row) -> int:
    """Returns the number of free lanes of the row's shard."""
    return len(self._free[row.shard])

  def lane(self, row: Row) -> int | None:
    """Assigns a lane and enters the row's pages; None if all are taken."""
    if not self.room(row):
      return None
    lane = self._free[row.shard].popleft()
    tables = np.split(self.table[lane], len(row.pages))
    for table, pages in zip(tables, row.pages, strict=True):
      table[: len(pages)] = pages
    return lane


def pages_of(tokens: int, config: config_lib.EngineConfig) -> int:
  """Returns the number of pages for `tokens` tokens, at most a full context."""
  return -(-min(tokens, config.max_context) // config.page)


def pages(
  config: config_lib.EngineConfig,
  a: architecture_lib.Architecture,
  *,
  shards: int,
) -> tuple[int, ...]:
  """Returns the pages of each shard's pools, their padding pages included.

  A second pool is that of windowed layers, if it is smaller than the first. It
  never runs out: each row holds at most the pages of a window and of a decode
  call, and all rows of a prefill call those of its tokens besides.
  """
  full, slots = _pages(config, shards=shards), -(-config.slots // shards)
  call = (
    config.prefill_lanes // shards * -(-config.prefill_chunk // config.page)
  )
  # That many tokens at any place.
  row = (a.window + config.decode_steps - 3) // config.page + 2
  near = slots * row + call
  fewer = a.windowed and a.window < config.max_context and near < full
  return (full + 1, near + 1) if fewer else (full + 1,)


def _pages(config: config_lib.EngineConfig, *, shards: int) -> int:
  """Returns the pages of each shard for tokens that all layers see."""
  if config.kv_tokens:
    return -(-config.kv_tokens // (shards * config.page))
  slots = -(-config.slots // shards)
  return slots * pages_of(config.max_context, config)


def _names(tokens: Sequence[int], size: int) -> Iterator[bytes]:
  """Yields the names of pages that hold `tokens`; the last may be partial."""
  name = b""
  for start in range(0, len(tokens), size):
    content = array.array("q", tokens[start : start + size]).tobytes()
    name = hashlib.blake2b(name + content, digest_size=16).digest()
    yield name


def validate(config: config_lib.EngineConfig, *, shards: int = 1) -> None:
  """Raises ValueError for shapes that cannot work on this many data shards."""
  sizes = config.lanes
  if not sizes or list(sizes) != sorted(set(sizes)) or sizes[0] < 1:
    raise ValueError(
      f"engine.lanes: found {sizes}, expected numbers of rows, ascending."
    )
  for n in (*sizes, config.prefill_lanes):
    if n % shards:
      raise ValueError(
        f"engine: found {n} lanes for {shards} parts of the devices that "
        "sample; expected a multiple."
      )
  rows = sizes[-1] // shards
  if config.exact and (len(sizes) > 1 or rows % _EVEN):
    raise ValueError(
      f"engine.exact: found {len(sizes)} sizes of engine.lanes and steps of "
      f"{rows} tokens; expected one size and a multiple of {_EVEN}."
    )
  room = _pages(config, shards=shards) * config.page
  if room < config.max_context:
    raise ValueError(
      f"engine.kv_tokens: found {config.kv_tokens} in {shards} parts, which "
      f"hold {room} tokens each; expected room for a context of "
      f"{config.max_context} (engine.max_context)."
    )
