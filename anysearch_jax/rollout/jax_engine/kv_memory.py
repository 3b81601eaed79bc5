"""The rows of the KV cache: which pages each episode holds, and preemption.

Each episode has a row. A row is a list of page numbers, in the order of its
tokens; a page holds the keys and values of `engine.page` tokens of all layers
(paged attention, https://arxiv.org/abs/2309.06180).

**Shards.** The rows and pages of an engine are divided into data shards, one
for each device along the mesh's `data` axis. A row never leaves its shard.

**Windows.** Layers with sliding windows have a second, smaller pool of pages if
that saves memory. There, a row frees the pages before the window of its next
token. The page numbers of freed pages become `PADDING`, so the position in the
list still tells which tokens a page holds.

**Sharing.** Prompts with a common prefix share whole pages. A page's name is a
hash of its tokens and of all tokens before it, so equal names mean equal keys
and values. A prefix is shared only if the windowed layers still have the pages
of the window before the fork, too. The last, partial page of a prompt is copied
instead of shared, because each row continues it with its own tokens. A page
that no row holds keeps its content until it is allocated again, least recently
used first. vLLM does the same:
https://docs.vllm.ai/en/latest/design/prefix_caching/.

**Admission and preemption.** A row opens if its shard has pages for its context
and for one decode call. It may need more later; if the shard then has none
left, the youngest row that no running call uses loses its pages. The oldest row
thus always finishes, so the engine never deadlocks. The preempted turn waits in
front of the queue and prefills again.
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
_IMBALANCE = 8
# On CPUs, XLA's bfloat16 products compute the last rows apart if one or two are
# left of 16: a token's bits would depend on its lane.
_LANE_MULTIPLE = 8
# The reserved page: padding is written to it, and it stands for pages that a
# row does not hold.
PADDING = 0
_NAME_BYTES = 16  # Of a page's hash: 128 bits make collisions negligible.


class SharedPrefix(NamedTuple):
  """The pages that hold a prefix of a context, for each pool.

  Attributes:
    pages: whole pages of each pool, in order, with `PADDING` before the window.
    copy_sources: a page of each pool to copy, which holds all remaining tokens;
      () if there is none.
    is_filling: whether another row is filling the next page.
  """

  pages: tuple[list[int], ...]
  copy_sources: tuple[int, ...] = ()
  is_filling: bool = False


class PagePool:
  """Pages `1` to `count - 1` with reference counts and names.

  `PADDING` in arguments is ignored.
  """

  def __init__(self, count: int):
    # In the order of release: the first page is the least recently used one.
    self._free = OrderedDict.fromkeys(range(1, count))
    self._references = [0] * count
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
    if page is None or page in self._ready:
      return page
    return PADDING

  def acquire(self, pages: Iterable[int]) -> None:
    """Adds a reference to each of the pages, which `find` returned."""
    for page in filter(None, pages):
      self._references[page] += 1
      self._free.pop(page, None)

  def allocate(self, count: int, names: Iterable[bytes] = ()) -> list[int]:
    """Allocates free pages.

    Args:
      count: number of pages, at most `free`.
      names: of the first pages, by the content that they will have once
        `mark_ready` is called.
    """
    pages = []
    for _ in range(count):
      page, _ = self._free.popitem(last=False)
      self._forget_page(page)
      self._references[page] = 1
      pages.append(page)
    for name, page in zip(names, pages):
      self._forget_page(self._by_name.get(name, PADDING))
      self._by_name[name] = page
      self._names[page] = name
    return pages

  def mark_ready(self, pages: Iterable[int]) -> None:
    """Marks named pages as ready to be shared: their writes are queued."""
    self._ready.update(page for page in pages if page in self._names)

  def release(self, pages: Sequence[int]) -> None:
    """Removes a reference from each page, last page first.

    The first pages of a prompt are then the last to be allocated again: they
    are useful to more prompts.
    """
    for page in filter(None, reversed(pages)):
      self._references[page] -= 1
      if not self._references[page]:
        if page not in self._ready:
          self._forget_page(page)
        self._free[page] = None

  def forget_content(self) -> None:
    """Forgets the content of all pages, because the weights change."""
    self._by_name.clear()
    self._names.clear()
    self._ready.clear()

  def _forget_page(self, page: int) -> None:
    if page in self._names:
      del self._by_name[self._names.pop(page)]
      self._ready.discard(page)


@dataclasses.dataclass(eq=False)
class Row:
  """The KV cache of one episode.

  Attributes:
    shard: the data shard that the row and its pages belong to.
    pages: page numbers of each pool, in order; `PADDING` for the first `freed`
      pages of the second pool.
    cached: number of tokens stored in the pages.
    first_own: index of the first page that the row fills itself; earlier pages
      are shared.
    shareable: number of tokens that other rows may share.
    page_names: of the pages that the row names.
    copy_sources: a page of each pool whose content is copied into the row's
      page `first_own` before anything else; () if there is none.
    context: the episode's tokens; the pages hold the first `cached` ones.
    freed: number of pages before the window that the second pool got back.
  """

  shard: int
  pages: tuple[list[int], ...]
  cached: int
  first_own: int
  shareable: int
  page_names: Sequence[bytes] = ()
  copy_sources: tuple[int, ...] = ()
  context: Sequence[int] = ()
  freed: int = 0


class KvMemory:
  """The rows of an engine: it opens, grows, preempts and releases them.

  Args:
    config: slots, pages and shapes of calls.
    a: the policy's architecture.
    shards: number of data shards.
  """

  def __init__(
    self,
    config: config_lib.EngineConfig,
    a: architecture_lib.Architecture,
    *,
    shards: int = 1,
  ):
    self._config = config
    self._window = a.window
    self._pool_sizes = pool_sizes(config, a, shards=shards)
    # The pools of each shard.
    self._pools = [
      [PagePool(size) for size in self._pool_sizes] for _ in range(shards)
    ]
    # In order of opening.
    self._rows: dict[types.Address, Row] = {}

  def __len__(self) -> int:
    return len(self._rows)

  @property
  def held_pages(self) -> tuple[int, int]:
    """The number of pages that rows hold, and of all pages, in all pools."""
    shard_pages = sum(size - 1 for size in self._pool_sizes)
    count = shard_pages * len(self._pools)
    return count - sum(p.free for p in itertools.chain(*self._pools)), count

  def get(self, address: types.Address) -> Row | None:
    """Returns the episode's row, if it has one."""
    return self._rows.get(address)

  def is_prefix_filling(self, context: Sequence[int]) -> bool:
    """Returns whether another row is prefilling a prefix of `context`.

    A caller then waits, because it can share those pages a call later.
    """
    tokens = context[:-1]
    size = self._config.page
    return any(
      self._find_shared(
        pools, _page_names(tokens, size), len(tokens)
      ).is_filling
      for pools in self._pools
    )

  def open_row(
    self, address: types.Address, context: Sequence[int], *, is_prompt: bool
  ) -> Row | None:
    """Opens a row for an episode that has none.

    Args:
      address: the episode's.
      context: its tokens. The last one is not prefilled: it is the first input
        of decode.
      is_prompt: whether other rows may share the tokens that this row prefills.

    Returns:
      The row with pages for all of the context but its last token, or None if
      no slot or too few pages are free. Its windowed layers have only pages
      that are shared or copied to; see `slide_windows`.
    """
    size = self._config.page
    tokens = len(context) - 1
    names = list(_page_names(context[:-1], size))
    prefixes = [
      self._find_shared(pools, names, tokens) for pools in self._pools
    ]
    # One decode call more than the context, or the row could open and then be
    # preempted before it samples a token.
    needed_pages = page_count(
      len(context) + self._config.decode_steps, self._config
    )
    shard = self._choose_shard(prefixes, needed_pages)
    if shard is None:
      return None
    prefix = prefixes[shard]
    for pool, pages in zip(self._pools[shard], prefix.pages, strict=True):
      pool.acquire(pages)
    first_own = len(prefix.pages[0])
    has_copy = bool(prefix.copy_sources)
    row = Row(
      shard=shard,
      pages=prefix.pages,
      cached=tokens if has_copy else first_own * size,
      first_own=first_own,
      shareable=tokens if is_prompt else 0,
      # A copied page leaves its name to the original.
      page_names=names if is_prompt and not has_copy else (),
      copy_sources=prefix.copy_sources,
      context=context,
    )
    self._allocate(row, 0, tokens)
    self.slide_windows(row, row.cached)
    self._rows[address] = row
    return row

  def _find_shared(
    self, pools: Sequence[PagePool], names: Iterable[bytes], tokens: int
  ) -> SharedPrefix:
    """Finds the longest prefix of named pages that a row may continue.

    Args:
      pools: of one shard.
      names: of the pages of the row's context.
      tokens: number of tokens of the context to cache.
    """
    size = self._config.page
    is_filling = False
    prefix: list[list[int]] = []  # Of each page: its number in each pool.
    prefix_end = 0  # Number of pages that can be shared.
    window_start = 0  # First page that windowed layers need, of that prefix.
    missing = -1  # Last page that windowed layers do not have.
    for i, name in enumerate(names):
      numbers = [pool.find(name) for pool in pools]
      is_filling = PADDING in numbers
      if is_filling or numbers[0] is None:
        break
      if None in numbers:
        missing = i
      prefix.append([number or PADDING for number in numbers])
      first_seen = self._window_start(min((i + 1) * size, tokens))
      if missing < first_seen:
        prefix_end = i + 1
        window_start = first_seen
    pages = tuple(
      [numbers[pool] for numbers in prefix[:prefix_end]]
      for pool in range(len(pools))
    )
    for windowed_pages in pages[1:]:
      windowed_pages[:window_start] = [PADDING] * window_start
    copy_sources: tuple[int, ...] = ()
    if prefix_end * size > tokens:  # The last page is partial.
      copy_sources = tuple(numbers.pop() for numbers in pages)
    return SharedPrefix(pages, copy_sources, is_filling)

  def _window_start(self, tokens: int) -> int:
    """Returns the first page that windowed layers still need.

    It is the first one that tokens from position `tokens` on attend to.
    """
    return max(0, tokens - self._window + 1) // self._config.page

  def _allocate(self, row: Row, pool: int, tokens: int) -> None:
    """Gives a row the pages of a pool that it lacks for `tokens` tokens."""
    pages = row.pages[pool]
    count = page_count(tokens, self._config) - len(pages)
    names = row.page_names[len(pages) :]
    pages += self._pools[row.shard][pool].allocate(count, names)

  def slide_windows(self, row: Row, tokens: int) -> None:
    """Prepares windowed layers for a call after which `tokens` are cached.

    Frees the pages before the window of the call's first token, and allocates
    those of its new tokens. The second pool always has enough for all rows, see
    `pool_sizes`.
    """
    if len(row.pages) > 1:
      start = self._window_start(row.cached)
      pages = row.pages[1]
      passed = pages[row.freed : start]
      self._pools[row.shard][1].release(passed)
      pages[row.freed : start] = [PADDING] * len(passed)
      row.freed = max(row.freed, start)
      self._allocate(row, 1, tokens)

  def _choose_shard(
    self, prefixes: Sequence[SharedPrefix], pages: int
  ) -> int | None:
    """Returns the data shard for a new row, or None if no shard has room.

    If the load is balanced, that is the shard with the longest shared prefix,
    otherwise a less loaded one. Ties go to the shard with most free pages, then
    to the first one.

    Args:
      prefixes: the shared prefix in each shard.
      pages: number of pages that the row needs.
    """
    rows = Counter(row.shard for row in self._rows.values())
    shards = range(len(self._pools))
    slots = -(-self._config.slots // len(shards))
    balanced_rows = min(rows[shard] for shard in shards) + _IMBALANCE
    free = [pools[0].free for pools in self._pools]

    def preference(shard: int) -> tuple[bool, int, bool, int]:
      prefix = prefixes[shard]
      return (
        rows[shard] < balanced_rows,
        len(prefix.pages[0]),
        bool(prefix.copy_sources),
        free[shard],
      )

    candidates = [
      shard for shard in shards if free[shard] >= pages and rows[shard] < slots
    ]
    return max(candidates, key=preference, default=None)

  def resume(self, row: Row, context: Sequence[int]) -> int:
    """Keeps the cached prefix of an episode's new context and drops the rest.

    Only whole pages are kept: a page that also holds other tokens may be shared
    with other rows and must then not be written to. No page is kept if the
    windowed layers may have freed pages of the window before the change. The
    decision must not depend on when calls ended, so it assumes that they have.

    Returns:
      The number of cached tokens that were dropped.
    """
    cached = row.cached
    old_context = row.context
    row.context = context
    if old_context[:cached] == context[:-1][:cached]:
      return 0
    pairs = zip(old_context[:cached], context[:-1])
    equal_tokens = next(
      (i for i, (old, new) in enumerate(pairs) if old != new),
      min(cached, len(context) - 1),
    )
    kept_pages = equal_tokens // self._config.page
    if len(row.pages) > 1:
      start = self._window_start(kept_pages * self._config.page)
      if start < self._window_start(cached):
        kept_pages = 0
        row.freed = 0
    for pool, pages in zip(self._pools[row.shard], row.pages, strict=True):
      pool.release(pages[kept_pages:])
      del pages[kept_pages:]
    row.cached = kept_pages * self._config.page
    row.first_own = min(row.first_own, kept_pages)
    row.shareable = 0
    row.page_names = ()
    return cached - row.cached

  def grow(
    self, row: Row, tokens: int, busy: Collection[Row]
  ) -> set[types.Address]:
    """Gives a row pages for `tokens` tokens in all, if it can.

    If too few pages are free, the youngest other rows of its shard lose theirs
    (`has_pages` tells whether that sufficed).

    Args:
      row: the row that grows.
      tokens: number of tokens that it must have pages for.
      busy: rows that a running call writes to; they are not preempted.

    Returns:
      The addresses of preempted rows; those episodes have no row any more.
    """
    pool = self._pools[row.shard][0]
    preempted: set[types.Address] = set()
    missing_pages = page_count(tokens, self._config) - len(row.pages[0])
    for address, candidate in reversed(list(self._rows.items())):
      if missing_pages <= pool.free:
        break
      if (
        candidate.shard == row.shard
        and candidate is not row
        and candidate not in busy
      ):
        self.release(address)
        preempted.add(address)
    if missing_pages <= pool.free:
      self._allocate(row, 0, tokens)
    return preempted

  def has_pages(self, row: Row, tokens: int) -> bool:
    """Returns whether a row has pages for `tokens` tokens."""
    return len(row.pages[0]) >= page_count(tokens, self._config)

  def mark_ready(self, row: Row) -> None:
    """Lets other rows share the prompt pages that a row has filled so far.

    Device calls run in order, so a write that is only queued counts.
    """
    end = row.cached // self._config.page
    if row.cached >= row.shareable:
      end = max(end, page_count(row.shareable, self._config))
    for pool, pages in zip(self._pools[row.shard], row.pages, strict=True):
      pool.mark_ready(pages[row.first_own : end])
    self.slide_windows(row, row.cached)

  def new_lanes(self, width: int) -> Lanes:
    """Returns the lanes of a call with `width` rows, all of them free."""
    columns = page_count(self._config.max_context, self._config)
    columns *= len(self._pool_sizes)
    return Lanes(width, columns, shards=len(self._pools))

  def release(self, address: types.Address) -> None:
    """Forgets an episode; an unknown one is ignored."""
    row = self._rows.pop(address, None)
    if row is not None:
      for pool, pages in zip(self._pools[row.shard], row.pages, strict=True):
        pool.release(pages)

  def forget_prompts(self) -> None:
    """Stops sharing the pages' content, because the weights change."""
    for pool in itertools.chain(*self._pools):
      pool.forget_content()


class Lanes:
  """The lanes of one call, divided evenly between the data shards.

  A call has a fixed number of rows, its lanes. A device computes the lanes of
  its shard, so a row needs a lane of its own shard.

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

  def free_count(self, row: Row) -> int:
    """Returns the number of free lanes of the row's shard."""
    return len(self._free[row.shard])

  def assign(self, row: Row) -> int | None:
    """Assigns a lane and enters the row's pages; None if no lane is free."""
    if not self.free_count(row):
      return None
    lane = self._free[row.shard].popleft()
    tables = np.split(self.table[lane], len(row.pages))
    for table, pages in zip(tables, row.pages, strict=True):
      table[: len(pages)] = pages
    return lane


def page_count(tokens: int, config: config_lib.EngineConfig) -> int:
  """Returns the number of pages for `tokens` tokens, at most a full context."""
  return -(-min(tokens, config.max_context) // config.page)


def pool_sizes(
  config: config_lib.EngineConfig,
  a: architecture_lib.Architecture,
  *,
  shards: int,
) -> tuple[int, ...]:
  """Returns the number of pages of each shard's pools, with the padding page.

  There is a second pool, for windowed layers, if it is smaller than the first.
  It never runs out: each row holds at most the pages of a window and of a
  decode call, and all rows of a prefill call together the pages of its tokens.

  Args:
    config: slots, pages and shapes of calls.
    a: the policy's architecture.
    shards: number of data shards.
  """
  full_pages = _full_pages(config, shards=shards)
  if not a.windowed or a.window >= config.max_context:
    return (full_pages + 1,)
  slots = -(-config.slots // shards)
  chunk_pages = -(-config.prefill_chunk // config.page)
  call_pages = config.prefill_lanes // shards * chunk_pages
  # n tokens, which may begin anywhere in a page, span at most
  # (n - 2) // page + 2 pages. A decode call needs the window - 1 tokens before
  # it and its own.
  row_tokens = a.window - 1 + config.decode_steps
  row_pages = (row_tokens - 2) // config.page + 2
  windowed_pages = slots * row_pages + call_pages
  if windowed_pages >= full_pages:
    return (full_pages + 1,)
  return (full_pages + 1, windowed_pages + 1)


def _full_pages(config: config_lib.EngineConfig, *, shards: int) -> int:
  """Returns the pages of each shard for layers that see all tokens."""
  if config.kv_tokens:
    return -(-config.kv_tokens // (shards * config.page))
  slots = -(-config.slots // shards)
  return slots * page_count(config.max_context, config)


def _page_names(tokens: Sequence[int], size: int) -> Iterator[bytes]:
  """Yields the names of pages that hold `tokens`; the last may be partial.

  Each name includes the one before it, so it identifies the whole prefix.
  """
  name = b""
  for start in range(0, len(tokens), size):
    content = array.array("q", tokens[start : start + size]).tobytes()
    digest = hashlib.blake2b(name + content, digest_size=_NAME_BYTES)
    name = digest.digest()
    yield name


def validate(config: config_lib.EngineConfig, *, shards: int = 1) -> None:
  """Raises ValueError for shapes that cannot work on this many data shards."""
  sizes = config.lanes
  if not sizes or list(sizes) != sorted(set(sizes)) or sizes[0] < 1:
    raise ValueError(
      f"engine.lanes: found {sizes}, expected numbers of rows, ascending."
    )
  for lanes in (*sizes, config.prefill_lanes):
    if lanes % shards:
      raise ValueError(
        f"engine: found {lanes} lanes for {shards} parts of the devices that "
        "sample; expected a multiple."
      )
  rows = sizes[-1] // shards
  if config.exact and (len(sizes) > 1 or rows % _LANE_MULTIPLE):
    raise ValueError(
      f"engine.exact: found {len(sizes)} sizes of engine.lanes and steps of "
      f"{rows} tokens; expected one size and a multiple of {_LANE_MULTIPLE}."
    )
  room = _full_pages(config, shards=shards) * config.page
  if room < config.max_context:
    raise ValueError(
      f"engine.kv_tokens: found {config.kv_tokens} in {shards} parts, which "
      f"hold {room} tokens each; expected room for a context of "
      f"{config.max_context} (engine.max_context)."
    )
