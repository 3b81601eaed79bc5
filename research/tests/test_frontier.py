"""Tests the best agents by price: by hand, and against play."""

from __future__ import annotations

import collections

import numpy as np
import pytest
from exact_agents import WORLD, played

import anysearch_jax as aj
from research import frontier

MISS = 0.35  # Of first searches.


def one_fact(price):
  """P(right) and searches of the best agent for `river`, with one search."""
  odds = aj.optimum.relation_odds(WORLD)["river"]
  agents = []
  for weight, stop, search in (
    (odds.known, odds.right, 1 - MISS + MISS * odds.right),
    (
      1 - odds.known,
      odds.guess,
      (1 - MISS) * (1 - odds.twin / 2) + MISS * odds.guess,
    ),
  ):
    asks = search - price > stop
    agents.append((weight * (search if asks else stop), weight * asks))
  return tuple(np.sum(agents, axis=0))


@pytest.mark.parametrize("price", [0.0, 0.05, 0.12, 0.3, 0.9])
def test_one_fact_by_hand(price):
  (found,) = frontier.points(WORLD, {("river",): 3}, [1], [price])
  assert found == pytest.approx(one_fact(price), abs=1e-6)


def test_play_has_the_computed_means():
  price, budgets, n = 0.06, (2, 5), 200
  questions = WORLD.questions("held-out", n, 2024)
  best = aj.optimum.Optimum(WORLD, price=price)
  chains = collections.Counter(tuple(q.text.split()[1:-1]) for q in questions)
  for budget in budgets:
    (expected,) = frontier.points(WORLD, chains, [budget], [price])
    rows = [played(q, budget, best, seed) for seed, q in enumerate(questions)]
    for name, value in zip(("em", "searches"), expected, strict=True):
      found = [row[name] for row in rows]
      error = np.std(found) / np.sqrt(n)
      assert abs(np.mean(found) - value) < 3.5 * error, name


def test_the_edge_rises_and_is_concave():
  chains = {("employer", "founder"): 2, ("mayor",): 1}
  found = frontier.points(WORLD, chains, range(1, 9))
  searches = np.array([p.searches for p in found])
  accuracy = np.array([p.accuracy for p in found])
  assert (np.diff(searches) <= 1e-6).all()
  assert (np.diff(accuracy) <= 1e-6).all()
  # The slope between neighbours lies between their prices.
  for i in range(1, len(found)):
    fewer = searches[i - 1] - searches[i]
    if fewer > 1e-3:
      slope = (accuracy[i - 1] - accuracy[i]) / fewer
      assert frontier.PRICES[i - 1] - 1e-3 < slope < frontier.PRICES[i] + 1e-3
  at = float(searches[10])
  assert frontier.accuracy(found, at) == pytest.approx(float(accuracy[10]))
  assert frontier.searches(found, float(accuracy[10])) == pytest.approx(at)
  assert frontier.searches(found, 0.9999) == np.inf
  assert frontier.accuracy(found, 99.0) == pytest.approx(float(accuracy[0]))
