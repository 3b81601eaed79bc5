"""The comparison with policies that are cut at a cap."""

from __future__ import annotations

import math

import pytest

from research import under_caps


def row(question, em, tokens, *, cap=None, searches=1, outcome="answered"):
  caps = {} if cap is None else {"caps": {"tokens": cap}}
  return {
    "question_id": question,
    "budget": 3,
    "em": em,
    "generated_tokens": tokens,
    "searches": searches,
    "outcome": outcome,
    **caps,
  }


def test_answers_that_took_more_than_the_cap_do_not_count():
  """Four questions by hand: +1, 0, -1 and +1 against the cut policy."""
  capped = [
    row("a", 1, 40, cap=40),
    row("b", 1, 30, cap=40),
    row("c", 0, 38, cap=40, outcome="truncated"),
    row("d", 1, 39, cap=40, searches=4),
  ]
  cut = [row("a", 1, 41), row("b", 1, 40), row("c", 1, 12), row("d", 0, 50)]
  line, every = under_caps.compare([capped], [cut])
  assert line.name == "3 searches, 40 tokens"
  assert (line.capped, line.cut, line.less) == (0.75, 0.5, 0.25)
  assert (line.over, line.truncated, line.within) == (0.5, 0.25, 0.75)
  # Variance of 1, 0, -1, 1 is 11 / 12.
  assert line.half == pytest.approx(1.96 * math.sqrt(11 / 12 / 4))
  assert every[1:] == pytest.approx(line[1:])
  assert "3 searches, 40 tokens" in under_caps.table([line])


def test_trainings_that_differ_widen_the_interval():
  one = [row("a", 1, 9, cap=40), row("b", 1, 9, cap=40)]
  other = [row("a", 0, 9, cap=40), row("b", 0, 9, cap=40)]
  cut = [row("a", 0, 9), row("b", 0, 9)]
  line, _ = under_caps.compare([one, other], [cut, cut])
  assert line.less == 0.5
  assert line.half == pytest.approx(1.96 * math.sqrt(0.5 / 2))


@pytest.mark.parametrize(
  ("cut", "words"),
  [([[]], "Found no episode of"), ([], "expected one of each")],
)
def test_evaluations_that_do_not_fit_are_refused(cut, words):
  with pytest.raises(ValueError, match=words):
    under_caps.compare([[row("a", 1, 9, cap=40)]], cut)
