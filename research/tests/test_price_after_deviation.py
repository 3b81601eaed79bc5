"""A price that no deviation divides: by hand, and beside a simulation."""

from __future__ import annotations

import numpy as np
import pytest
import spoken

import anysearch_jax as aj
from anysearch_jax import grpo
from research import price_after_deviation

CONFIG = aj.config.changed(
  aj.ExperimentConfig(), objective={"normalize": "none"}
)
PRICE = price_after_deviation.PRICE


def advantages(em, searches, budget):
  outcomes = spoken.outcomes(np.array(em), searches=np.array(searches))
  outcomes = outcomes._replace(budget=np.array(budget))
  total = price_after_deviation.reward(outcomes, CONFIG)["total"]
  return np.asarray(
    grpo.advantages(
      total,
      outcomes.valid,
      epsilon=CONFIG.objective.advantage_epsilon,
      normalize=CONFIG.objective.normalize,
    )
  )


def test_a_search_costs_the_same_whoever_is_right():
  """By hand, at B = 3: one search more or less than the mean costs .1."""
  searches = [[1, 1, 3, 3]] * 3
  em = [[1, 1, 1, 1], [0, 0, 0, 0], [1, 0, 1, 0]]
  found = advantages(em, searches, [3, 3, 3])
  price = np.array([1, 1, -1, -1]) * PRICE / 3
  answer = np.array([1, -1, 1, -1])
  np.testing.assert_allclose(found, [price, price, answer + price], atol=1e-5)


@pytest.mark.parametrize("budget", [1, 3])
@pytest.mark.parametrize("chance", [1.0, 0.7, 0.4])
def test_the_switch_point_is_that_of_the_formula(chance, budget):
  rng = np.random.default_rng(0)
  shape = (1 << 15, 5)
  found = 0.65
  others_right = rng.random(shape) < chance
  searches = rng.random(shape) < 0.5
  finds = rng.random((shape[0], 1)) < found
  budgets = np.full(shape[0], budget)

  def push(has_fact):
    em = (others_right & has_fact).astype(int)
    a = advantages(em, searches.astype(int), budgets)
    return np.mean(np.sum(a * (searches - 0.5), axis=1))

  wasted = push(np.ones(shape, bool))
  gained = push(searches & finds)
  expected = price_after_deviation.switch(chance, budget, found=found)
  assert gained / (gained - wasted) == pytest.approx(expected, abs=0.02)
