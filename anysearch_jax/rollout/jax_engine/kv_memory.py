"""What each episode has in the KV cache, and who gets what is left of it."""

from __future__ import annotations

import dataclasses
from collections import Counter, deque
from collections.abc import Collection, Iterator, Sequence

import numpy as np

from anysearch_jax import config as config_lib
from anysearch_jax import types
from anysearch_jax.rollout.jax_engine import page_pool

# Rows that a part may have beyond another for the sake of shared pages.
_AHEAD = 8


@dataclasses.dataclass(eq=False)
class Row:
  """An episode's part of the cache.

  part: of the devices' rows that it stands in, and whose pages it has.
  pages: in order. cached: tokens of its context that stand in them. own: the
  first page that it fills itself; those before it are shared. prompt: tokens
  that others may share. copied: the page that its first own one begins as.
  context: the episode's; the pages hold its first `cached` tokens.
  """

  part: int
  pages: list[int]
  cached: int
  own: int
  prompt: int
  copied: int | None = None
  context: Sequence[int] = ()


class KvMemory:
  """The rows of an engine: opened, grown, given up and released.

  Args:
    config: slots and pages.
    parts: of the rows; each has its own pages.
  """

  def __init__(self, config: config_lib.EngineConfig, *, parts: int = 1):
    self._config = config
    self._pools = [
      page_pool.PagePool(pages(config, parts=parts), config.page)
      for _ in range(parts)
    ]
    # In order of opening.
    self._rows: dict[types.Address, Row] = {}

  def __len__(self) -> int:
    return len(self._rows)

  def get(self, address: types.Address) -> Row | None:
    """The episode's row, if it has one."""
    return self._rows.get(address)

  def filling(self, context: Sequence[int]) -> bool:
    """Whether another is prefilling what a context would share with it."""
    return any(pool.shared(context[:-1]).filling for pool in self._pools)

  def open(
    self, address: types.Address, context: Sequence[int], *, prompt: bool
  ) -> Row | None:
    """A row for a context that has none.

    Args:
      address: of the episode.
      context: its tokens; the last one will be decoded from, not prefilled.
      prompt: whether others may share what this row prefills of it.

    Returns:
      The row with pages for the context, or None where there is no slot or
      there are no pages.
    """
    known = context[:-1]
    found = [pool.shared(known) for pool in self._pools]
    held = Counter(row.part for row in self._rows.values())
    each = -(-self._config.slots // len(self._pools))
    even = min(held[part] for part in range(len(self._pools))) + _AHEAD
    most = pages_of(len(context) + self._config.decode_steps, self._config)
    # Where most is shared, as long as all parts have their share of the rows;
    # else where most is free.
    fits = [
      (
        held[part] < even,
        len(shared.pages),
        shared.last is not None,
        pool.free,
        -part,
      )
      for part, (shared, pool) in enumerate(zip(found, self._pools))
      if pool.free >= most and held[part] < each
    ]
    if not fits:
      return None
    part = -max(fits)[-1]
    pool, shared = self._pools[part], found[part]
    pool.hold(shared.pages)
    own = len(shared.pages)
    more = pages_of(len(known), self._config) - own
    held = shared.pages + pool.take(more)
    if prompt:
      pool.promise(known, held)
    row = Row(
      part,
      held,
      own * self._config.page if shared.last is None else len(known),
      own,
      len(known) if prompt else 0,
      shared.last,
      context,
    )
    self._rows[address] = row
    return row

  def resume(self, row: Row, context: Sequence[int]) -> int:
    """Keeps of a row what is the beginning of its episode's new context.

    Whole pages are kept: one that holds other tokens too may be shared, and
    then it must not be written to.

    Args:
      row: of an episode whose last turn is over.
      context: of its next turn; the last token will be decoded from.

    Returns:
      The number of cached tokens that were given up.
    """
    known, old = row.cached, row.context
    row.context = context
    same = _common(old[:known], context[:-1])
    if same == known:
      return 0
    keep = same // self._config.page
    self._pools[row.part].drop(row.pages[keep:])
    del row.pages[keep:]
    row.cached = keep * self._config.page
    row.own, row.prompt = min(row.own, keep), 0
    return known - row.cached

  def grow(
    self, row: Row, tokens: int, busy: Collection[Row]
  ) -> Iterator[types.Address]:
    """Gives a row pages for `tokens` in all, as far as there are any.

    Where none is free, the youngest others give theirs up.

    Args:
      row: that grows.
      tokens: that it has to hold.
      busy: rows that keep what they have.

    Yields:
      The episodes that gave up: they have no row any more.
    """
    pool = self._pools[row.part]
    wanted = pages_of(tokens, self._config) - len(row.pages)
    if wanted > pool.free:
      yield from self._give_up(row, wanted, busy)
    if 0 < wanted <= pool.free:
      row.pages += pool.take(wanted)

  def _give_up(
    self, row: Row, wanted: int, busy: Collection[Row]
  ) -> Iterator[types.Address]:
    """Has the youngest rows give up their pages until so many are free."""
    pool = self._pools[row.part]
    for address, other in reversed(list(self._rows.items())):
      if pool.free >= wanted:
        break
      if other.part == row.part and other is not row and other not in busy:
        self.release(address)
        yield address

  def holds(self, row: Row, tokens: int) -> bool:
    """Whether a row has pages for `tokens`."""
    return len(row.pages) >= pages_of(tokens, self._config)

  def fulfil(self, row: Row) -> None:
    """Lets others share what a row has prefilled of its prompt by now."""
    end = row.cached // self._config.page
    if row.cached >= row.prompt:
      end = max(end, pages_of(row.prompt, self._config))
    self._pools[row.part].fulfil(row.pages[row.own : end])

  def release(self, address: types.Address) -> None:
    """Forgets an episode; an unknown one is ignored."""
    row = self._rows.pop(address, None)
    if row is not None:
      self._pools[row.part].drop(row.pages)

  def forget_prompts(self) -> None:
    """What stands in the pages is of other weights from now on."""
    for pool in self._pools:
      pool.forget_all()


class Lanes:
  """The lanes of one call: each part of the rows has its share of them.

  Args:
    width: lanes of the call.
    config: slots and pages.
    parts: of the rows.

  Attributes:
    table: int `[width, M]`, the pages of each lane's row.
  """

  def __init__(
    self, width: int, config: config_lib.EngineConfig, *, parts: int
  ):
    share = width // parts
    self._free = [
      deque(range(part * share, (part + 1) * share)) for part in range(parts)
    ]
    columns = pages_of(config.max_context, config)
    self.table = np.full((width, columns), page_pool.PADDING, np.int32)

  def room(self, row: Row) -> bool:
    """Whether there is a lane for a row."""
    return bool(self._free[row.part])

  def lane(self, row: Row) -> int | None:
    """A lane for a row, with its pages; None when they are all taken."""
    if not self.room(row):
      return None
    lane = self._free[row.part].popleft()
    self.table[lane, : len(row.pages)] = row.pages
    return lane


def _common(one: Sequence[int], other: Sequence[int]) -> int:
  """Returns the length of the longest common prefix."""
  if one == other[: len(one)]:
    return len(one)
  pairs = enumerate(zip(one, other))
  return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


def pages_of(tokens: int, config: config_lib.EngineConfig) -> int:
  """Pages that hold so many tokens, of a context that may be so long."""
  return -(-min(tokens, config.max_context) // config.page)


def pages(config: config_lib.EngineConfig, *, parts: int) -> int:
  """Pages of each part of the rows, the one for padding included."""
  if config.kv_tokens:
    return -(-config.kv_tokens // (parts * config.page)) + 1
  slots = -(-config.slots // parts)
  return slots * pages_of(config.max_context, config) + 1


def validate(config: config_lib.EngineConfig, *, parts: int = 1) -> None:
  """Refuses shapes that cannot work.

  Args:
    config: of the engine.
    parts: of the rows, the size of its mesh's `data`.

  Raises:
    ValueError: a sentence.
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
    if n % parts:
      raise ValueError(
        f"engine: found {n} lanes for {parts} parts of the devices that "
        "sample; expected a multiple."
      )
  room = (pages(config, parts=parts) - 1) * config.page
  if room < config.max_context:
    raise ValueError(
      f"engine.kv_tokens: found {config.kv_tokens} in {parts} parts, which "
      f"hold {room} tokens each; expected room for a context of "
      f"{config.max_context} (engine.max_context)."
    )
