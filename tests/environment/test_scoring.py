"""Tests the scores of a trajectory; others are in `test_hostile_protocol`."""

from __future__ import annotations

import format_table
import growth
import pytest
from format_table import A, I, S, T, e, m

from anysearch_jax.environment import scoring


@pytest.mark.parametrize(
  "row",
  [
    pytest.param(row, id=f"{part}: {row.name}")
    for part, rows in (
      ("plain", format_table.PLAIN),
      ("scaffold", format_table.SCAFFOLD),
    )
    for row in rows
  ],
)
def test_format_table(row):
  found = scoring.check_format(
    row.spans, budget=row.budget, searches=row.searches, scaffold=row.scaffold
  )
  assert found == row.expected


def test_judge_returns_answer_exact_match_and_format():
  how = {"budget": 2, "searches": 1, "scaffold": False}
  spans = [m(T + S), e(I), m(f"{T}<answer> The A.</answer>")]
  verdict = scoring.judge(spans, golden_answers=["x"], **how)
  assert verdict == scoring.Verdict(answer="The A.", em=0, format=1)
  spans = [m("<answer>X</answer>")]
  verdict = scoring.judge(spans, golden_answers=["", "x"], **how)
  assert verdict == scoring.Verdict(answer="X", em=1, format=0)


def test_reasoning_opened_before_a_turn_is_read_as_its_beginning():
  """As in records, and in rewards that read turns."""
  rest = T.removeprefix("<think>")
  assert rest != T
  spans = [e("<think>"), m(rest + S), e(I), m(T + A)]
  assert scoring.turns(spans) == [T + S, T + A]
  verdict = scoring.judge(
    spans, golden_answers=["x"], budget=1, searches=1, scaffold=False
  )
  assert verdict.format == 1


@pytest.mark.parametrize(
  "piece", ["<think>", "</think>", T, A, "<", "<answer>\n"]
)
def test_a_long_text_is_judged_in_linear_time(piece):
  def judge(text):
    verdict = scoring.judge(
      [m(text)], golden_answers=["a"], budget=3, searches=0, scaffold=False
    )
    assert verdict.format == 0

  growth.assert_linear(judge, piece * (400_000 // len(piece)))


@pytest.mark.parametrize(
  "text, aliases, expected",
  [
    ("He lives in the Paris area.", ["paris"], True),
    ("a party", ["art"], False),  # Whole words.
    ("state of the art", ["Art"], True),
    ("New  York City", ["new york"], True),
    ("York New", ["new york"], False),
    ("anything", ["the", ""], False),  # Nothing is left of these answers.
    ("", ["paris"], False),
  ],
)
def test_an_answer_is_contained_as_whole_words(text, aliases, expected):
  assert scoring.contains(text, aliases) is expected
