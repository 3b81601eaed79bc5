"""Counts over stored outcomes, by hand."""

from __future__ import annotations

import numpy as np
import pytest

from research import outcomes, paper_claims


def trained(row, right, searches, seed=42, questions="q"):
  """Returns outcomes of four questions at budgets of 0, 1 and 5."""
  return outcomes.Outcomes(
    row=row,
    seed=seed,
    settings="s",
    questions=questions,
    clusters=(4,),
    budgets=(0, 1, 5),
    right=np.array(right, dtype=bool),
    searches=np.array(searches),
  )


NONE = [0, 0, 0, 0]


def test_a_lost_question_with_budget_left_is_an_early_stop():
  ours = trained("a", [NONE, NONE, [1, 0, 0, 1]], [NONE, NONE, [5, 4, 5, 0]])
  theirs = trained("b", [NONE, NONE, [0, 1, 1, 1]], [NONE, NONE, [5, 5, 5, 5]])
  alone = trained("a", [NONE, NONE, [1, 1, 1, 1]], [NONE] * 3, seed=43)
  found = paper_claims.early_stops([ours, alone], [theirs])
  assert found == (4, 1, 2, 1)


def test_other_questions_are_refused():
  ours = trained("a", [NONE] * 3, [NONE] * 3)
  theirs = trained("b", [NONE] * 3, [NONE] * 3, questions="other")
  with pytest.raises(ValueError, match="a and b, seed 42"):
    paper_claims.early_stops([ours], [theirs])


def test_a_budget_that_was_not_asked_is_refused():
  ours = trained("a", [NONE] * 3, [NONE] * 3)
  with pytest.raises(ValueError, match="found budgets 0, 1, 5, expected 4"):
    paper_claims.early_stops([ours], [ours], budget=4)


def test_a_curve_that_stays_level_once_does_not_rise():
  rises = trained("a", [[1, 1, 1, 1], NONE, [1, 0, 0, 0]], [NONE] * 3)
  level = trained("a", [NONE, NONE, NONE], [NONE] * 3, seed=43)
  assert paper_claims.rising([rises, level]) == (1, 2)
