"""The switch point of a fact in a chain: formulas, limits and episodes."""

from __future__ import annotations

import json

import numpy as np
import pytest

import anysearch_jax as aj
from research import chains, price_of_a_search

PAPER = aj.config.RewardConfig()
# Of a switch point from 65,536 groups.
_NOISE = 0.012


def test_a_fact_alone_has_the_switch_point_of_the_page():
  q = chains.FOUND
  assert chains.limit(1.0) == pytest.approx(q / (1 + q))
  switch = chains.pushes([chains.alike(1.0)], PAPER).switch
  assert switch == pytest.approx(q / (1 + q), abs=_NOISE)


def test_a_pair_by_hand():
  """Two samples, p = q = 1: one searches in half of the groups.

  Its advantage is -1 if the memory is right and 1 if it is wrong, the other's
  the opposite, so that the sums of A (searched - 1/2) are -1 and 1.
  """
  pushes = chains.pushes([chains.alike(1.0)], PAPER, found=1.0, size=2)
  assert pushes.wasted == pytest.approx(-0.5, abs=_NOISE)
  assert pushes.gained == pytest.approx(0.5, abs=_NOISE)
  assert pushes.switch == pytest.approx(0.5, abs=_NOISE)


@pytest.mark.parametrize("chance", [0.5, 0.7, 0.9])
def test_as_gamma_vanishes_the_switch_point_is_the_limit(chance):
  reward = aj.config.RewardConfig(gamma_max=0.002)
  switch = chains.pushes([chains.alike(chance)], reward).switch
  assert switch == pytest.approx(chains.limit(chance), abs=_NOISE)


def test_other_facts_and_other_searches_raise_it():
  def switch(chance, tries):
    return chains.pushes([chains.alike(chance, tries)], PAPER).switch

  assert switch(1.0, 0) < switch(0.9, 0) < switch(0.7, 0) < switch(0.5, 0)
  assert switch(0.9, 0) < switch(0.9, 2) < switch(0.9, 4)


def test_without_a_deviation_it_is_where_the_reward_puts_it():
  """A fact alone, R_abs, gamma = .3, q = 1: the formula for `none`."""
  reward = aj.config.RewardConfig(
    gamma_mode="fixed", gamma_fixed=0.3, use_rel=False
  )
  expected = price_of_a_search.predicted(reward, "none")
  for budget, switch in zip(price_of_a_search.BUDGETS, expected):
    found = chains.pushes(
      [chains.alike(1.0, budget=int(budget))],
      reward,
      found=1.0,
      normalize="none",
    )
    assert found.switch == pytest.approx(switch, abs=_NOISE)


def test_a_sample_without_a_search_left_has_no_say():
  spent = chains.Others(np.array([True, False]), np.array([2, 2]), budget=2)
  pushes = chains.pushes([spent], PAPER)
  assert pushes.wasted == pushes.gained == 0
  assert np.isnan(pushes.switch)


def episode(seed, queries, em, budget=3):
  facts = [
    {
      "entity": "a",
      "relation": "r",
      "alternative": "s",
      "known": True,
      "stale": False,
    },
    {
      "entity": "b",
      "relation": "r",
      "alternative": "s",
      "known": True,
      "stale": True,
    },
    {
      "entity": "c",
      "relation": "r",
      "alternative": "s",
      "known": False,
      "stale": False,
    },
  ]
  return {
    "question_id": "q",
    "budget": budget,
    "seed": seed,
    "queries": queries,
    "em": em,
    "metadata": {"facts": facts},
  }


def test_others_are_the_searches_for_other_facts():
  episodes = [
    episode(1, ["a r", "c r", "c s"], 1),
    episode(2, ["c r"], 0),
    episode(1, [], 0, budget=0),
    episode(1, ["a s"], 1, budget=5),
  ]
  ((budget, (others,)),) = chains.others_of(episodes).items()
  assert budget == others.budget == 3
  np.testing.assert_array_equal(others.right, [True, False])
  np.testing.assert_array_equal(others.searches, [2, 1])


def test_one_policy_for_all_budgets_has_the_switch_point_of_the_sum(tmp_path):
  alone = [chains.alike(1.0)]
  spread = [chains.alike(0.5, tries=4)]
  by_budget = {1: alone, 5: spread}
  found = chains.switches_of(by_budget, PAPER, groups=1 << 12)
  pushes = [chains.pushes(x, PAPER, groups=1 << 12) for x in (alone, spread)]
  assert found.by_budget == {1: pushes[0].switch, 5: pushes[1].switch}
  gained = pushes[0].gained + pushes[1].gained
  wasted = pushes[0].wasted + pushes[1].wasted
  assert found.of_all == pytest.approx(gained / (gained - wasted))
  assert found.chances == {1: 1.0, 5: 0.5}
  assert found.deviations[1] == 0
  assert found.deviations[5] == pytest.approx(1.0, abs=0.02)
  path = tmp_path / "switches.json"
  chains.add(path, "second", found)
  chains.add(path, "first", found)
  stored = json.loads(path.read_text())
  assert list(stored) == ["first", "second"]
  assert stored["first"]["of_all"] == round(found.of_all, 3)


def test_episodes_of_one_seed_are_refused():
  with pytest.raises(ValueError, match="expected an evaluation"):
    chains.others_of([episode(1, [], 0)])
