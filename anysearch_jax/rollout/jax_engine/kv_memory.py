"""The rows of the KV cache: which pages each episode holds, and preemption.

The rows and pages of an engine are divided into data shards, one for each
device along the mesh's `data` axis.

Prompts with a common prefix share whole pages. A page is identified by its
tokens and by the page before it, so a lookup walks the prompt page by page. The
last, partial page of a prompt is copied instead of shared: each row continues
it with its own tokens. A page that no row holds keeps its content until it is
allocated again, least recently used first. vLLM does the same with hashes of
tokens as keys: https://docs.vllm.ai/en/latest/design/prefix_caching/.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, OrderedDict, deque
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from anysearch_jax import config as config_lib
from anysearch_jax import types

# A shard may have this many more rows than another, to share more pages.
_AHEAD = 8
# On CPUs, XLA's bfloat16 products compute the last rows apart if one or two are
# left of 16: a token's bits would depend on its lane.
_EVEN = 8
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


@dataclasses.dataclass(eq=False)
class Row:
  """The KV cache of one episode.

  shard: the data shard that the row and its pages belong to.
  pages: page numbers in order. cached: number of tokens stored in them. own:
  index of the first page that the row fills itself; earlier ones are shared.
  prompt: number of tokens that other rows may share. copied: page whose content
  is copied into page `own` first. context: the episode's tokens; the pages hold
  its first `cached` ones.
  """

  shard: int
  pages: list[int]
  cached: int
  own: int
  prompt: int
  copied: int | None = None
  context: Sequence[int] = ()


class KvMemory:
  """The rows of an engine: it opens, grows, preempts and releases them."""

  def __init__(self, config: config_lib.EngineConfig, *, shards: int = 1):
    self._config = config
    self._pools = [
      PagePool(pages(config, shards=shards), config.page) for _ in range(shards)
    ]
    # In order of opening.
    self._rows: dict[types.Address, Row] = {}

  def __len__(self) -> int:
    return len(self._rows)

  @property
  def held_pages(self) -> tuple[int, int]:
    """The pages that rows hold, and all pages, over all shards."""
    each = pages(self._config, shards=len(self._pools)) - 1
    count = each * len(self._pools)
    return count - sum(pool.free for pool in self._pools), count

  def get(self, address: types.Address) -> Row | None:
    """Returns the episode's row, if it has one."""
    return self._rows.get(address)

  def filling(self, context: Sequence[int]) -> bool:
    """Returns whether another row is prefilling a prefix of `context`."""
    return any(pool.shared(context[:-1]).filling for pool in self._pools)

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
      no slot or too few pages are free.
    """
    known = context[:-1]
    found = [pool.shared(known) for pool in self._pools]
    most = pages_of(len(context) + self._config.decode_steps, self._config)
    shard = self._roomiest(found, most)
    if shard is None:
      return None
    pool, shared = self._pools[shard], found[shard]
    pool.hold(shared.pages)
    own = len(shared.pages)
    held = shared.pages + pool.take(pages_of(len(known), self._config) - own)
    if prompt:
      pool.reserve(known, held)
    row = Row(
      shard=shard,
      pages=held,
      cached=own * self._config.page if shared.last is None else len(known),
      own=own,
      prompt=len(known) if prompt else 0,
      copied=shared.last,
      context=context,
    )
    self._rows[address] = row
    return row

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

    free = [pool.free for pool in self._pools]

    def preference(shard: int) -> tuple[bool, int, bool, int]:
      whole, copies = len(found[shard].pages), found[shard].last is not None
      return rows[shard] < balanced, whole, copies, free[shard]

    fits = [n for n in shards if free[n] >= pages and rows[n] < limit]
    return max(fits, key=preference, default=None)

  def resume(self, row: Row, context: Sequence[int]) -> int:
    """Keeps the cached prefix of an episode's new context and drops the rest.

    Only whole pages are kept. A page that also holds other tokens may be shared
    with other rows and must then not be written to. Returns the number of
    cached tokens that were dropped.
    """
    known, old = row.cached, row.context
    row.context = context
    if old[:known] == context[:-1][:known]:
      return 0
    pairs = enumerate(zip(old[:known], context[:-1]))
    shorter = min(known, len(context) - 1)
    same = next((i for i, (a, b) in pairs if a != b), shorter)
    keep = same // self._config.page
    self._pools[row.shard].drop(row.pages[keep:])
    del row.pages[keep:]
    row.cached = keep * self._config.page
    row.own, row.prompt = min(row.own, keep), 0
    return known - row.cached

  def grow(
    self, row: Row, tokens: int, busy: Collection[Row]
  ) -> set[types.Address]:
    """Gives a row pages for `tokens` tokens in all, if it can.

    If too few pages are free, the youngest other rows of its shard that are not
    `busy` are preempted. Their addresses are returned; they have no row any
    more.
    """
    pool, gone = self._pools[row.shard], set()
    wanted = pages_of(tokens, self._config) - len(row.pages)
    for address, other in reversed(list(self._rows.items())):
      if wanted <= pool.free:
        break
      if other.shard == row.shard and other is not row and other not in busy:
        self.release(address)
        gone.add(address)
    if 0 < wanted <= pool.free:
      row.pages += pool.take(wanted)
    return gone

  def holds(self, row: Row, tokens: int) -> bool:
    """Returns whether a row has pages for `tokens` tokens."""
    return len(row.pages) >= pages_of(tokens, self._config)

  def mark_ready(self, row: Row) -> None:
    """Lets other rows share the prompt pages that a row has filled so far.

    Device calls run in order, so a write that is only queued counts.
    """
    end = row.cached // self._config.page
    if row.cached >= row.prompt:
      end = max(end, pages_of(row.prompt, self._config))
    self._pools[row.shard].mark_ready(row.pages[row.own : end])

  def release(self, address: types.Address) -> None:
    """Forgets an episode; an unknown one is ignored."""
    row = self._rows.pop(address, None)
    if row is not None:
      self._pools[row.shard].drop(row.pages)

  def forget_prompts(self) -> None:
    """Stops sharing what the pages hold, because the weights change."""
    for pool in self._pools:
      pool.forget_all()


class Lanes:
  """The lanes of one call, divided evenly between the data shards.

  Attributes:
    table: int `[width, M]`, the pages of each lane's row, padded with 0.
  """

  def __init__(
    self, width: int, config: config_lib.EngineConfig, *, shards: int
  ):
    share = width // shards
    self._free = [
      deque(range(shard * share, (shard + 1) * share))
      for shard in range(shards)
    ]
    columns = pages_of(config.max_context, config)
    self.table = np.full((width, columns), PADDING, np.int32)

  def room(self, row: Row) -> bool:
    """Returns whether the row's shard has a free lane."""
    return bool(self._free[row.shard])

  def lane(self, row: Row) -> int | None:
    """Assigns a lane and enters the row's pages; None if all are taken."""
    if not self.room(row):
      return None
    lane = self._free[row.shard].popleft()
    self.table[lane, : len(row.pages)] = row.pages
    return lane


def pages_of(tokens: int, config: config_lib.EngineConfig) -> int:
  """Returns the number of pages for `tokens` tokens, at most a full context."""
  return -(-min(tokens, config.max_context) // config.page)


def pages(config: config_lib.EngineConfig, *, shards: int) -> int:
  """Returns the number of pages of each shard, the padding page included."""
  if config.kv_tokens:
    return -(-config.kv_tokens // (shards * config.page)) + 1
  slots = -(-config.slots // shards)
  return slots * pages_of(config.max_context, config) + 1


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
  if config.lookahead >= config.decode_steps:
    raise ValueError(
      f"engine.lookahead: found {config.lookahead}, expected less than the "
      f"tokens of a decode call (engine.decode_steps {config.decode_steps})."
    )
  rows = sizes[-1] // shards * (1 + config.lookahead)
  if config.exact and (len(sizes) > 1 or rows % _EVEN):
    raise ValueError(
      f"engine.exact: found {len(sizes)} sizes of engine.lanes and steps of "
      f"{rows} tokens; expected one size and a multiple of {_EVEN}."
    )
  room = (pages(config, shards=shards) - 1) * config.page
  if room < config.max_context:
    raise ValueError(
      f"engine.kv_tokens: found {config.kv_tokens} in {shards} parts, which "
      f"hold {room} tokens each; expected room for a context of "
      f"{config.max_context} (engine.max_context)."
    )
