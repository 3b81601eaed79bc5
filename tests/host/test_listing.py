"""Lists of names in messages stay short."""

from __future__ import annotations

import pytest

from anysearch_jax.host import listing


@pytest.mark.parametrize(
  ("names", "text"),
  [
    ([], ""),
    (["a", "b\n c"], "a, b c"),
    ({"a": 1, "b": 2}, "a, b"),
    (range(20_000), "0, 1, 2, 3, 4, 5, 6, 7, and 19,992 more"),
    (["x" * 99], "x" * 40 + "..."),
  ],
)
def test_a_list_has_the_first_names_and_a_count(names, text):
  assert listing.first_names(names) == text
