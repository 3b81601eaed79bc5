"""Page reference counts and prefix sharing."""

from __future__ import annotations

import small_engine

from anysearch_jax import config as config_lib
from anysearch_jax import types
from anysearch_jax.rollout.jax_engine import kv_memory

SIZE = 2


def names(tokens):
  return list(kv_memory._page_names(tokens, SIZE))


def shared(pool, tokens):
  """Returns the pages that hold a prefix of `tokens`, as those of a row."""
  config = config_lib.EngineConfig(page=SIZE)
  memory = kv_memory.KvMemory(config, small_engine.A)
  (pages,), copied, filling = memory._find_shared(
    [pool], names(tokens), len(tokens)
  )
  return pages, copied[0] if copied else None, filling


def filled(pool, tokens):
  """Returns the pages of a row that prefilled `tokens`, sharing a prefix."""
  pages, copied, filling = shared(pool, tokens)
  assert not filling
  pool.acquire(pages)
  own = () if copied else names(tokens)[len(pages) :]
  pages = pages + pool.allocate(-(-len(tokens) // SIZE) - len(pages), own)
  pool.mark_ready(pages)
  return pages


def test_partial_last_page_is_found_only_for_the_same_prompt():
  pool = kv_memory.PagePool(10)
  first = filled(pool, (1, 2, 3, 4, 5))
  assert shared(pool, (1, 2, 3, 4, 5)) == (first[:2], first[2], False)
  # A prompt that continues after these tokens has a different page for them.
  assert shared(pool, (1, 2, 3, 4, 5, 6)) == (first[:2], None, False)
  # Nor are equal tokens after a different prefix shared.
  assert shared(pool, (3, 4, 1, 2)) == ([], None, False)
  # The page can be found until it is allocated again.
  pool.release(first)
  assert shared(pool, (1, 2, 3, 4, 5))[1] == first[2]
  pool.allocate(pool.free - 2)
  assert shared(pool, (1, 2, 3, 4, 5)) == (first[:2], None, False)


def test_lookup_reports_pages_that_are_being_filled():
  pool = kv_memory.PagePool(10)
  pages = pool.allocate(2, names((1, 2, 3, 4)))
  assert shared(pool, (1, 2, 3, 4)) == ([], None, True)
  pool.mark_ready(pages[:1])
  assert shared(pool, (1, 2, 3, 4)) == (pages[:1], None, True)
  assert shared(pool, (1, 2, 8, 8)) == (pages[:1], None, False)
  # After the row is dropped half-way, the unfilled page is forgotten.
  pool.release(pages)
  assert shared(pool, (1, 2, 3, 4)) == (pages[:1], None, False)


def test_least_recently_used_pages_are_reallocated_first():
  pool = kv_memory.PagePool(5)
  old, new = filled(pool, (1, 2, 3, 4)), filled(pool, (5, 6, 7, 8))
  pool.release(old)
  pool.release(new)
  assert pool.free == 4
  # The last page of the older prompt is reallocated first.
  assert pool.allocate(1) == old[1:]
  assert shared(pool, (1, 2, 3, 4)) == (old[:1], None, False)
  assert shared(pool, (5, 6, 7, 8)) == (new, None, False)


def test_contexts_with_a_common_prefix_are_spread_over_all_shards():
  config = config_lib.EngineConfig(slots=20, max_context=152, page=4)
  memory = kv_memory.KvMemory(config, small_engine.A, shards=2)
  alike, opened = tuple(range(16)), []
  for question in range(20):
    row = memory.open_row(
      types.Address(0, question, 0), (*alike, 99, question), is_prompt=True
    )
    row.cached = 17
    memory.mark_ready(row)
    opened.append((row.shard, row.first_own))
  # Each shard has room for ten whole contexts, and shares four pages.
  assert [sum(shard == s for shard, _ in opened) for s in (0, 1)] == [10, 10]
  assert sum(own == 4 for _, own in opened) == 18
  assert memory.open_row(types.Address(0, 20, 0), alike, is_prompt=True) is None
