"""Tests the best agents by price: by hand, and against play."""

from __future__ import annotations

import collections
import dataclasses

import numpy as np
import pytest
from played_evaluation import configured, play, rows_of

from anysearch_jax import config as config_lib
from anysearch_jax.evaluation import harness
from anysearch_jax.world import expert_policy, frontier, optimum, versions
from anysearch_jax.world import world as world_lib
from retrieval import lexical

WORLD = world_lib.World(versions.config("graded", 0))
MISS = WORLD.config.alternative


def one_fact(price):
  """P(right) and searches of the best agent for `river`, with one search."""
  odds = optimum.relation_odds(WORLD)["river"]
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


def test_play_has_the_computed_means(tmp_path):
  price, budgets, n = 0.06, (2, 5), 200
  questions = WORLD.questions("held-out", n, 2024)
  config = dataclasses.replace(
    configured(budgets=budgets, seeds=(1,)),
    episode=config_lib.EpisodeConfig(
      prompts="world", max_generated=300, max_context=544
    ),
  )
  player = harness.Player(*expert_policy.named(f"optimum:{price}", WORLD))
  _, text = play(
    config, player, questions, lexical.LexicalRetriever(WORLD.corpus), tmp_path
  )
  rows = rows_of(text)
  chains = collections.Counter(tuple(q.text.split()[1:-1]) for q in questions)
  for budget in budgets:
    (expected,) = frontier.points(WORLD, chains, [budget], [price])
    for name, value in zip(("em", "searches"), expected, strict=True):
      played = [row[name] for row in rows if row["budget"] == budget]
      error = np.std(played) / np.sqrt(n)
      assert abs(np.mean(played) - value) < 3.5 * error, name


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
