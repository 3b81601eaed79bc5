"""Simulated evaluations with a known truth; `research.coverage` runs more.

The bounds are four standard errors of a proportion over the replicates.
"""

from __future__ import annotations

import numpy as np
import pytest

from research import coverage


def _error(share, replicates):
  return 4 * (share * (1 - share) / replicates) ** 0.5


@pytest.mark.parametrize(
  ("questions", "trainings"), [(300, 1), (2000, 3), (1000, 5)]
)
def test_intervals_of_a_row_hold_the_truth(questions, trainings):
  found = coverage.intervals_of_a_row(
    coverage.Design(questions, trainings), 300
  )
  for measure in ("EM", "TP"):
    assert abs(found[measure] - 0.95) < _error(0.95, 300)


@pytest.mark.parametrize("trainings", [3, 5])
def test_equal_methods_are_seldom_found_to_differ(trainings):
  found = coverage.coverage_of_differences(
    coverage.Design(1000, trainings), 300
  )
  for measure in ("EM", "TP"):
    assert found[measure] > 0.95 - _error(0.95, 300)


def test_equal_productivity_is_found_equal_whatever_the_searches():
  design = coverage.Design(100, low=0.7, width=0.3)
  found = coverage.errors_of_productivity(design, 0.25, 300, draws=200)
  assert found < 0.05 + _error(0.05, 300)


@pytest.mark.parametrize("questions", [8, 30])
def test_differences_of_few_questions_hold_the_truth(questions):
  design = coverage.Design(questions, low=0.97, width=0.03)
  found = coverage.coverage_of_differences(design, 300, deviations=np.zeros(1))
  for measure in ("EM", "TP"):
    assert found[measure] > 0.95 - _error(0.95, 300)
