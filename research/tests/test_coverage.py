"""Simulated evaluations with a known truth; `research.coverage` runs more.

The bounds are four standard errors of a share over the replicates.
"""

from __future__ import annotations

import dataclasses

import pytest

from anysearch_jax import inference
from research import coverage

N = 300
MOST = 0.05 + 4 * (0.05 * 0.95 / N) ** 0.5


@pytest.mark.parametrize("trainings", [1, 3, 5])
def test_intervals_of_a_row_hold_the_truth(trainings):
  spread = 0.0 if trainings == 1 else 0.01
  design = coverage.Design(trainings, (spread, spread))
  assert (coverage.misses_of_a_row(design, N) < MOST).all()


@pytest.mark.parametrize("trainings", [2, 3, 5])
@pytest.mark.parametrize(
  "title", ["trainings differ much", "snapshots differ much"]
)
def test_equal_methods_are_seldom_found_to_differ(title, trainings):
  design = dataclasses.replace(coverage.DESIGNS[title], trainings=trainings)
  found = coverage.differences_found(design, N)
  assert (found < MOST).all()
  assert (found > 0).any()  # Nor are intervals far too wide.


def test_questions_of_a_snapshot_are_not_independent(monkeypatch):
  plain = inference.ratios
  monkeypatch.setattr(
    inference, "ratios", lambda *of, clusters, **by: plain(*of, **by)
  )
  design = coverage.DESIGNS["snapshots differ much"]
  assert (coverage.differences_found(design, N) > MOST).all()


@pytest.mark.parametrize("trainings", [2, 3, 5])
def test_a_family_on_equal_methods_seldom_has_a_verdict(trainings):
  design = coverage.Design(trainings, (0.03, 0.03))
  found = coverage.verdicts(design, N // 3)
  assert found < 0.05 + 4 * (0.05 * 0.95 / (N // 3)) ** 0.5
  assert trainings > 2 or not found


@pytest.mark.parametrize("questions", [8, 30])
def test_differences_of_few_questions_hold_the_truth(questions):
  design = coverage.Design(
    1, (0.0, 0.0), 0.0, questions, 1, 0.0, low=0.97, width=0.03
  )
  assert (coverage.differences_found(design, N) < MOST).all()
