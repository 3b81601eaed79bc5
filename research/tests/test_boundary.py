"""The boundary of SAAS on rows by hand."""

from __future__ import annotations

import pytest

from research import boundary


def rows(question, facts, without, searches, minimum):
  """`facts` are (known, reliability); `searches` are those of right answers."""
  told = {
    "facts": [{"known": k, "reliability": r} for k, r in facts],
    "min_searches": minimum,
  }
  base = {"question_id": question, "metadata": told}
  for em in without:
    yield {**base, "budget": 0, "em": em, "searches": 0}
  for made in searches:
    yield {**base, "budget": 8, "em": int(made is not None), "searches": made}


def test_a_boundary_is_compared_with_memory():
  found = boundary.boundary(
    [
      *rows("sure", [(True, 1.0)], [1, 1], [1, 0], 0),
      *rows("lucky", [(True, 0.5)], [1, 1], [2, None], 0),
      *rows("guessed", [(False, 1.0)], [1, 1], [1, 2], 1),
      *rows("forgot", [(True, 1.0)], [0, 0], [2, 3], 0),
      *rows("open", [(False, 1.0)], [0, 0], [4, None], 3),
      *rows("undecided", [(True, 0.5)], [0, 1], [1, 1], 1),
    ],
    delta=2,
  )
  expected = {
    "known": 3 / 6,
    "needed": 2 / 6,
    "right": 3 / 6,
    "accuracy": 4 / 6,
    "precision": 2 / 3,
    "recall": 2 / 3,
    "unsure": 2 / 3,
    "false_need": 1 / 2,
    "excess": (2 + 1) / 2,
  }
  assert found == pytest.approx(expected)
