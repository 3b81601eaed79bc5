"""Pages: who holds them, what is known of them; against a plain record."""

from __future__ import annotations

import hypothesis
from hypothesis import strategies as st

from anysearch_jax.rollout.jax_engine import page_pool

SIZE = 2


def filled(pool, tokens):
  """A row that prefilled `tokens`, sharing what it could."""
  found = pool.shared(tokens)
  assert not found.filling
  pool.hold(found.pages)
  pages = found.pages + pool.take(-(-len(tokens) // SIZE) - len(found.pages))
  pool.promise(tokens, pages)
  pool.fulfil(pages)
  return pages


def test_whole_pages_that_begin_alike_are_shared():
  pool = page_pool.PagePool(10, SIZE)
  first = filled(pool, (1, 2, 3, 4, 5))
  assert pool.shared((1, 2, 3, 4, 9)) == (first[:2], None, False)
  assert pool.shared((1, 2, 3)) == (first[:1], None, False)
  # The same tokens after others are not the same.
  assert pool.shared((3, 4, 1, 2)) == ([], None, False)


def test_the_end_of_a_prompt_is_there_for_the_same_prompt_only():
  pool = page_pool.PagePool(10, SIZE)
  first = filled(pool, (1, 2, 3, 4, 5))
  assert pool.shared((1, 2, 3, 4, 5)) == (first[:2], first[2], False)
  # Who goes on after it has another page of these tokens.
  assert pool.shared((1, 2, 3, 4, 5, 6)) == (first[:2], None, False)
  # Its page is known until it is wanted.
  pool.drop(first)
  assert pool.shared((1, 2, 3, 4, 5)).last == first[2]
  pool.take(pool.free - 2)
  assert pool.shared((1, 2, 3, 4, 5)) == (first[:2], None, False)


def test_what_is_being_filled_is_waited_for():
  pool = page_pool.PagePool(10, SIZE)
  pages = pool.take(2)
  pool.promise((1, 2, 3, 4), pages)
  assert pool.shared((1, 2, 3, 4)) == ([], None, True)
  pool.fulfil(pages[:1])
  assert pool.shared((1, 2, 3, 4)) == (pages[:1], None, True)
  assert pool.shared((1, 2, 8, 8)) == (pages[:1], None, False)
  # Given up half-way, the rest is nobody's promise any more.
  pool.drop(pages)
  assert pool.shared((1, 2, 3, 4)) == (pages[:1], None, False)


def test_pages_are_forgotten_when_they_are_wanted_longest_unused_first():
  pool = page_pool.PagePool(5, SIZE)
  old, new = filled(pool, (1, 2, 3, 4)), filled(pool, (5, 6, 7, 8))
  pool.drop(old)
  pool.drop(new)
  assert pool.free == 4
  # The end of the older prompt goes first.
  assert pool.take(1) == old[1:]
  assert pool.shared((1, 2, 3, 4)) == (old[:1], None, False)
  assert pool.shared((5, 6, 7, 8)) == (new, None, False)


def test_nothing_is_known_after_all_is_forgotten():
  pool = page_pool.PagePool(5, SIZE)
  pool.drop(filled(pool, (1, 2, 3, 4)))
  pool.forget_all()
  assert pool.shared((1, 2, 3, 4)) == ([], None, False)
  assert pool.free == 4


@hypothesis.given(st.data())
@hypothesis.settings(max_examples=60, deadline=None)
def test_shared_pages_hold_the_tokens_they_are_shared_for(data):
  pool = page_pool.PagePool(12, SIZE)
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
    assert page_pool.PADDING not in pages
    for i, page in enumerate(pages):
      if page not in shared:
        content[page] = tokens[: (i + 1) * SIZE]
        # Nobody else has it.
        assert all(page not in row for row in rows)
    rows.append(pages)
  held = {page for row in rows for page in row}
  assert pool.free == 11 - len(held)
