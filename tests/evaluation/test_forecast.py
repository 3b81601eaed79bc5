"""Forecasts of the searches that follow: by hand and by brute force."""

from __future__ import annotations

import numpy as np
import pytest
import study

from anysearch_jax.evaluation import columns, forecast


def row(made, *, em=1, budget=3):
  """Returns episodes of questions q0, q1, ... with these searches."""
  (base,) = study.row("A", questions=1, budgets=(budget,)).episodes
  episodes = [
    base | {"question_id": f"q{i:03}", "searches": k, "em": em}
    for i, k in enumerate(made)
  ]
  return columns.of([e | {"outcome": "answered"} for e in episodes])


def test_halves_forecast_each_other_by_hand():
  # Even questions make 2 searches, odd ones 0 or 3.
  table = row([2, 0, 2, 3])
  # q0: [0, 3] holds 2, [2, 2] does not hold 1, [1, 1] not 0. q1: [2, 2] not 0.
  # q3: [2, 2] not 3, [1, 1] not 2, [0, 0] not 1; no search is left after it.
  assert forecast.fitted(table).tolist() == [
    [3, 1, 3, 0],
    [1, 0, 0, 0],
    [3, 1, 3, 0],
    [3, 0, 0, 0],
  ]
  found = forecast.measured(table, forecast.fitted(table))
  assert found["coverage"].value == pytest.approx(0.2)
  assert found["width"].value == pytest.approx(0.6)
  assert found["score"].value == 0
  # A half without an episode to learn from tells nothing.
  assert forecast.fitted(row([1])).tolist() == [[2, 2, 3 + 2, 0]]
  assert forecast.measured(row([0], budget=0), np.zeros((1, 4))) == {}
  wrong = row([1, 1], em=0)
  assert forecast.fitted(wrong).tolist() == [[2, 2, 0, 2]] * 2
  assert forecast.measured(wrong, forecast.fitted(wrong))["score"].value is None


def test_fitted_intervals_equal_quantiles_of_the_other_half():
  made = np.random.default_rng(0).binomial(5, 0.4, 60)
  expected = np.zeros((60, 4))
  for i, k in enumerate(made):
    for done in range(min(k + 1, 5)):
      others = [m - done for m in made[1 - i % 2 :: 2] if m >= done]
      low, high = np.quantile(others, [0.1, 0.9], method="inverted_cdf")
      held, width, follows = low <= k - done <= high, high - low, k - done
      score = max(0, 1 - width / follows) if follows else width == 0
      expected[i] += 1, held, width, held * score
  np.testing.assert_allclose(forecast.fitted(row(made, budget=5)), expected)
