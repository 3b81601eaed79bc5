"""Tests the best agents by price: by hand, and against play."""

from __future__ import annotations

import collections

import numpy as np
import pytest
from exact_agents import WORLD, played

import anysearch_jax as aj
from research import frontier

MISS = 0.35  # Of first searches.


def one_fact(entity, price):
  """P(right) and searches of the best agent for `river`, with one search."""
  odds = aj.optimum.relation_odds(WORLD)["river"]
  at = odds.subjects.index(entity)
  stop, search = 1 / len(odds.values), 0.0
  if odds.remembered[at]:
    stop = odds.reliability
    search = 1 - MISS + MISS * stop
  else:
    search = (1 - MISS) * (1 - odds.twin[at] / 2) + MISS * stop
  asks = search - price > stop
  return (search if asks else stop), asks


@pytest.mark.parametrize("price", [0.0, 0.05, 0.12, 0.3, 0.9])
def test_one_fact_by_hand(price):
  cities = aj.optimum.relation_odds(WORLD)["river"].subjects[:6]
  asked = {(WORLD.entities[e], ("river",)): 3 for e in cities}
  (found,) = frontier.points(WORLD, asked, [1], [price])
  expected = np.mean([one_fact(e, price) for e in cities], axis=0)
  assert found == pytest.approx(tuple(expected), abs=1e-6)


def test_play_has_the_computed_means():
  price, n = 0.06, 200
  questions = WORLD.questions("held-out", 2 * n, 2024)
  questions = [q for q in questions if q.metadata["hops"] <= 3][:n]
  best = aj.optimum.Optimum(WORLD, price=price)
  words = [q.text.split()[:-1] for q in questions]
  asked = collections.Counter((start, tuple(rest)) for start, *rest in words)
  for budget in (2, 5):
    (expected,) = frontier.points(WORLD, asked, [budget], [price])
    rows = [played(q, budget, best) for q in questions]
    for name, value in zip(("em", "searches"), expected, strict=True):
      found = [row[name] for row in rows]
      error = np.std(found) / np.sqrt(n)
      assert abs(np.mean(found) - value) < 3.5 * error, name


def test_the_edge_rises_and_is_concave():
  person, city = (WORLD.members[kind][0] for kind in ("person", "city"))
  asked = {
    (WORLD.entities[person], ("employer", "founder")): 2,
    (WORLD.entities[city], ("mayor",)): 1,
  }
  found = frontier.points(WORLD, asked, range(1, 9))
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
  at = float(searches[5])
  assert frontier.accuracy(found, at) == pytest.approx(float(accuracy[5]))
  assert frontier.searches(found, float(accuracy[5])) == pytest.approx(at)
  assert frontier.searches(found, 0.9999) == np.inf
  assert frontier.accuracy(found, 99.0) == pytest.approx(float(accuracy[0]))
