"""The rows of the KV cache: which pages each episode holds, and preemption.

The rows and pages of an engine are divided into data shards, one for each
device along the mesh's `data` axis.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, deque
from collections.abc import Collection, Iterator, Sequence

import numpy as np

from anysearch_jax import config as config_lib
from anysearch_jax import types
from anysearch_jax.rollout.jax_engine import page_pool

PADDING = page_pool.PADDING
# A shard may have this many more rows than another, to share more pages.
_AHEAD = 8


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
  """The rows of an engine: it opens, grows, preempts and releases them.

  Args:
    config: slots and pages.
    shards: number of data shards; each has its own pages.
  """

  def __init__(self, config: config_lib.EngineConfig, *, shards: int = 1):
    self._config = config
    self._pools = [
      page_pool.PagePool(pages(config, shards=shards), config.page)
      for _ in range(shards)
    ]
    # In order of opening.
    self._rows: dict[types.Address, Row] = {}

  def __len__(self) -> int:
    return len(self._rows)

  @property
  def held_pages(self) -> tuple[int, int]:
    """The pages that rows hold, and all pages, over all shards."""
    count = sum(pool.size_in_pages for pool in self._pools)
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

  def _roomiest(
    self, found: Sequence[page_pool.Shared], pages: int
  ) -> int | None:
    """Returns the data shard for a new row, or None if none has room.

    If the load is balanced, the shard with the longest shared prefix, otherwise
    a less loaded one. Ties go to the shard with most free pages, then to the
    first one.

    Args:
      found: what each shard holds of the row's context.
      pages: number of pages that the row may need at once.
    """
    rows = Counter(row.shard for row in self._rows.values())
    shards = range(len(self._pools))
    limit = -(-self._config.slots // len(shards))
    balanced = min(rows[shard] for shard in shards) + _AHEAD

    def preference(shard: int) -> tuple[bool, int, bool, int]:
      shared = found[shard]
      return (
        rows[shard] < balanced,
        len(shared.pages),
        shared.last is not None,
        self._pools[shard].free,
      )

    fits = [
      shard
      for shard in shards
      if self._pools[shard].free >= pages and rows[shard] < limit
    ]
    return max(fits, key=preference, default=None)

  def resume(self, row: Row, context: Sequence[int]) -> int:
    """Keeps the cached prefix of an episode's new context and drops the rest.

    Only whole pages are kept. A page that also holds other tokens may be shared
    with other rows and must then not be written to.

    Args:
      row: the row of an episode whose last turn is over.
      context: of its next turn; the last token is the first input of decode.

    Returns:
      The number of cached tokens that were dropped.
    """
    known, old = row.cached, row.context
    row.context = context
    same = _common(old[:known], context[:-1])
    if same == known:
      return 0
    keep = same // self._config.page
    self._pools[row.shard].drop(row.pages[keep:])
    del row.pages[keep:]
    row.cached = keep * self._config.page
    row.own, row.prompt = min(row.own, keep), 0
    return known - row.cached

  def grow(
    self, row: Row, tokens: int, busy: Collection[Row]
  ) -> Iterator[types.Address]:
    """Gives a row pages for `tokens` tokens in all, if it can.

    If too few pages are free, the youngest other rows are preempted.

    Args:
      row: the row that grows.
      tokens: number of tokens that it must hold.
      busy: rows that must not be preempted.

    Yields:
      The addresses of preempted episodes, which have no row any more.
    """
    pool = self._pools[row.shard]
    wanted = pages_of(tokens, self._config) - len(row.pages)
    if wanted > pool.free:
      yield from self._give_up(row, wanted, busy)
    if 0 < wanted <= pool.free:
      row.pages += pool.take(wanted)

  def _give_up(
    self, row: Row, wanted: int, busy: Collection[Row]
  ) -> Iterator[types.Address]:
    """Preempts the youngest rows until `wanted` pages are free."""
    pool = self._pools[row.shard]
    for address, other in reversed(list(self._rows.items())):
      if pool.free >= wanted:
        break
      if other.shard == row.shard and other is not row and other not in busy:
        self.release(address)
        yield address

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

  Args:
    width: number of lanes, a multiple of `shards`.
    config: slots and pages.
    shards: number of data shards.

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


def _common(one: Sequence[int], other: Sequence[int]) -> int:
  """Returns the length of the longest common prefix."""
  if one == other[: len(one)]:
    return len(one)
  pairs = enumerate(zip(one, other))
  return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


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
  """Raises ValueError for shapes that cannot work.

  Args:
    config: the engine's.
    shards: number of data shards, the size of the mesh's `data` axis.
  """
  for name in (
    "slots",
    "max_context",
    "page",
    "prefill_lanes",
    "prefill_chunk",
    "decode_steps",
  ):
    if getattr(config, name) < 1:
      raise ValueError(
        f"engine.{name}: found {getattr(config, name)}, expected 1 or more."
      )
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
  room = (pages(config, shards=shards) - 1) * config.page
  if room < config.max_context:
    raise ValueError(
      f"engine.kv_tokens: found {config.kv_tokens} in {shards} parts, which "
      f"hold {room} tokens each; expected room for a context of "
      f"{config.max_context} (engine.max_context)."
    )
