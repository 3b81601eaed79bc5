"""Page reference counts and prefix sharing, against a simple model."""

from __future__ import annotations

import hypothesis
from hypothesis import strategies as st

from anysearch_jax import config as config_lib
from anysearch_jax import types
from anysearch_jax.rollout.jax_engine import kv_memory

SIZE = 2


def filled(pool, tokens):
  """Returns the pages of a row that prefilled `tokens`, sharing a prefix."""
  found = pool.shared(tokens)
  assert not found.filling
  pool.hold(found.pages)
  pages = found.pages + pool.take(-(-len(tokens) // SIZE) - len(found.pages))
  pool.reserve(tokens, pages)
  pool.mark_ready(pages)
  return pages


def test_partial_last_page_is_found_only_for_the_same_prompt():
  pool = kv_memory.PagePool(10, SIZE)
  first = filled(pool, (1, 2, 3, 4, 5))
  assert pool.shared((1, 2, 3, 4, 5)) == (first[:2], first[2], False)
  # A prompt that continues after these tokens has a different page for them.
  assert pool.shared((1, 2, 3, 4, 5, 6)) == (first[:2], None, False)
  # Nor are equal tokens after a different prefix shared.
  assert pool.shared((3, 4, 1, 2)) == ([], None, False)
  # The page can be found until it is allocated again.
  pool.drop(first)
  assert pool.shared((1, 2, 3, 4, 5)).last == first[2]
  pool.take(pool.free - 2)
  assert pool.shared((1, 2, 3, 4, 5)) == (first[:2], None, False)


def test_lookup_reports_pages_that_are_being_filled():
  pool = kv_memory.PagePool(10, SIZE)
  pages = pool.take(2)
  pool.reserve((1, 2, 3, 4), pages)
  assert pool.shared((1, 2, 3, 4)) == ([], None, True)
  pool.mark_ready(pages[:1])
  assert pool.shared((1, 2, 3, 4)) == (pages[:1], None, True)
  assert pool.shared((1, 2, 8, 8)) == (pages[:1], None, False)
  # After the row is dropped half-way, the unfilled page is forgotten.
  pool.drop(pages)
  assert pool.shared((1, 2, 3, 4)) == (pages[:1], None, False)


def test_least_recently_used_pages_are_reallocated_first():
  pool = kv_memory.PagePool(5, SIZE)
  old, new = filled(pool, (1, 2, 3, 4)), filled(pool, (5, 6, 7, 8))
  pool.drop(old)
  pool.drop(new)
  assert pool.free == 4
  # The last page of the older prompt is reallocated first.
  assert pool.take(1) == old[1:]
  assert pool.shared((1, 2, 3, 4)) == (old[:1], None, False)
  assert pool.shared((5, 6, 7, 8)) == (new, None, False)


@hypothesis.given(st.data())
@hypothesis.settings(max_examples=40, deadline=None)
def test_shared_pages_contain_the_tokens_they_were_found_by(data):
  pool = kv_memory.PagePool(12, SIZE)
  content: dict[int, tuple[int, ...]] = {}
  rows = []
  token = st.integers(0, 1)
  for _ in range(data.draw(st.integers(1, 25))):
    if rows and data.draw(st.booleans()):
      pool.drop(rows.pop(data.draw(st.integers(0, len(rows) - 1))))
      continue
    tokens = tuple(data.draw(st.lists(token, min_size=1, max_size=8)))
    shared, last, _ = pool.shared(tokens)
    if last is not None:
      assert content[last] == tokens
    for i, page in enumerate(shared):
      assert content[page] == tokens[: (i + 1) * SIZE]
    if pool.free < -(-len(tokens) // SIZE):
      continue
    pages = filled(pool, tokens)
    assert kv_memory.PADDING not in pages
    for i, page in enumerate(pages):
      if page not in shared:
        content[page] = tokens[: (i + 1) * SIZE]
        # No other row holds the page.
        assert all(page not in row for row in rows)
    rows.append(pages)
  held = {page for row in rows for page in row}
  assert pool.free == 11 - len(held)


def test_contexts_with_a_common_prefix_are_spread_over_all_shards():
  config = config_lib.EngineConfig(slots=20, max_context=152, page=4)
  memory = kv_memory.KvMemory(config, shards=2)
  alike, shared = tuple(range(16)), []
  for question in range(20):
    row = memory.open(
      types.Address(0, question, 0), (*alike, 99, question), prompt=True
    )
    row.cached = 17
    memory.mark_ready(row)
    shared.append((row.shard, row.own))
  # Each shard has room for ten whole contexts, and shares four pages.
  assert [sum(shard == s for shard, _ in shared) for s in (0, 1)] == [10, 10]
  assert sum(own == 4 for _, own in shared) == 18
  assert memory.open(types.Address(0, 20, 0), alike, prompt=True) is None
