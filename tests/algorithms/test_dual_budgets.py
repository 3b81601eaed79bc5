"""Rewards and curriculum of budgets in more units than searches."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from curriculum_states import CONFIG as CURRICULUM
from hypothesis import given
from hypothesis import strategies as st

from anysearch_jax import budgets
from anysearch_jax import config as config_lib
from anysearch_jax.algorithms import curriculum, rewards
from anysearch_jax.training import validation

PAIRS = dataclasses.replace(
  CURRICULUM, max_budget=4, phase1_steps=80, token_levels=(64, 128)
)
CONFIG = config_lib.RewardConfig(abs_tokens=3.0, abs_dollars=2.0)
UNITS = ("searches", "tokens", "dollars", "seconds")


def test_share_saved_by_hand():
  # Half of the searches and a quarter of the tokens are left: with weights 1
  # and 3, (1/2 + 3/4) / 4. Dollars have no cap, so they do not count.
  found = rewards.share_saved(
    np.array([[1, 0]]),
    {
      "searches": np.array([[2, 2]]),
      "tokens": np.array([[96, 96]]),
      "dollars": np.array([[5.0, 5.0]]),
    },
    {
      "searches": np.array([4]),
      "tokens": np.array([128]),
      "dollars": np.array([math.inf]),
    },
    {"searches": 1.0, "tokens": 3.0, "dollars": 2.0},
  )
  np.testing.assert_allclose(found, [[0.3125, 0]], rtol=1e-6)


@given(st.data())
def test_share_saved_equals_the_oracle(data):
  group = data.draw(st.integers(1, 5))
  caps = {
    unit: data.draw(st.none() | st.integers(1, 900), label=unit)
    for unit in UNITS
  }
  weights = {
    unit: data.draw(st.sampled_from((0.0, 0.5, 1, 3))) for unit in UNITS
  }
  em = [data.draw(st.integers(0, 1)) for _ in range(group)]
  spent = {
    unit: [data.draw(st.integers(0, cap or 900)) for _ in em]
    for unit, cap in caps.items()
  }
  found = rewards.share_saved(
    np.array([em]),
    {unit: np.array([x]) for unit, x in spent.items()},
    {unit: np.array([cap or math.inf]) for unit, cap in caps.items()},
    {unit: weight for unit, weight in weights.items() if weight},
  )
  expected = [
    oracles.share_saved(
      em[i], {unit: x[i] for unit, x in spent.items()}, caps, weights
    )
    for i in range(group)
  ]
  np.testing.assert_allclose(found[0], expected, atol=1e-6)
  assert ((found >= 0) & (found <= 1)).all()


@given(
  st.lists(
    st.tuples(st.integers(0, 1), st.integers(0, 1), st.floats(0, 3, width=32)),
    min_size=1,
    max_size=6,
  ),
  st.sampled_from((1.0, 1e-5)),
)
def test_relative_cost_equals_the_oracle_in_any_unit(members, unit):
  em, valid, cost = (np.array([x]) for x in zip(*members))
  cost = cost * unit
  found = rewards.relative_cost(em, cost, valid == 1, xi=1e-6)
  expected = oracles.relative_cost(em[0], cost[0], valid[0], 1e-6)
  np.testing.assert_allclose(found[0], expected, atol=2e-3)


def rewarded(config, **more):
  return rewards.composite(
    np.array([[1, 1, 0]]),
    np.ones((1, 3), int),
    np.array([[50, 90, 20]]),
    np.array([[1, 2, 0]]),
    np.array([4]),
    np.ones((1, 3), bool),
    config=config,
    **more,
  )


SPENT = {
  "tokens": np.array([[50.0, 90.0, 20.0]]),
  "dollars": np.array([[0.003, 0.001, 0.0]]),
  "seconds": np.zeros((1, 3)),
}
CAPS = {
  "tokens": np.array([100.0]),
  "dollars": np.array([math.inf]),
  "seconds": np.array([math.inf]),
}


def test_composite_uses_the_weights_and_the_cost():
  config = dataclasses.replace(CONFIG, rel_cost="dollars")
  found = rewarded(config, spent=SPENT, caps=CAPS)
  # (3/4 + 3 * 1/2) / 4 and (1/2 + 3 * 1/10) / 4.
  np.testing.assert_allclose(found.r_abs, [[0.5625, 0.2, 0]], rtol=1e-5)
  np.testing.assert_allclose(found.r_rel, [[0, 1, 0]], atol=1e-5)
  np.testing.assert_allclose(found.tool, [[0, 0.2, 0]], atol=1e-5)


def test_default_weights_are_the_published_reward_to_the_bit():
  plain = rewarded(config_lib.RewardConfig())
  capped = rewarded(config_lib.RewardConfig(), spent=SPENT, caps=CAPS)
  jax.tree.map(np.testing.assert_array_equal, plain, capped)


def test_searches_without_a_cap_do_not_count():
  found = rewards.composite(
    *(np.ones((1, 2), int), np.ones((1, 2), int), np.array([[50, 90]])),
    *(np.array([[7, 9]]), np.array([budgets.UNCAPPED]), np.ones((1, 2), bool)),
    config=CONFIG,
    spent={unit: x[:, :2] for unit, x in SPENT.items()},
    caps=CAPS,
  )
  np.testing.assert_allclose(found.r_abs, [[0.5, 0.1]], rtol=1e-5)


def test_unknown_cost_is_refused():
  with pytest.raises(ValueError, match="rel_cost 'euros'"):
    rewarded(config_lib.RewardConfig(rel_cost="euros"))


def test_pairs_anneal_together():
  seen = []
  for step in range(0, PAIRS.phase1_steps, PAIRS.steps_per_rollout):
    state = curriculum.init(PAIRS, 0)._replace(step=jnp.int32(step))
    found = curriculum.assign(state, num_groups=2, config=PAIRS)
    assert len({*found.budgets.tolist()}) == len({*found.tokens.tolist()}) == 1
    seen.append((int(found.budgets[0]), int(found.tokens[0])))
  assert list(dict.fromkeys(seen)) == [(4, 128), (3, 128), (2, 64), (1, 64)]


def test_pairs_are_recorded_and_drawn_as_the_oracle_says():
  rng = np.random.default_rng(5)
  state, oracle = curriculum.init(PAIRS, 0), oracles.Windows(PAIRS)
  for _ in range(4):
    drawn = (
      rng.integers(0, 6, 60).astype(np.int32),
      rng.integers(0, 2, 60),
      rng.random(60) < 0.8,
    )
    tokens = rng.choice(PAIRS.token_levels, 60).astype(np.int32)
    state = curriculum.record(state, *drawn, config=PAIRS, tokens=tokens)
    oracle.record(*drawn, tokens)
    np.testing.assert_allclose(
      curriculum.probabilities(state, config=PAIRS),
      oracle.probabilities(),
      atol=1e-6,
    )
  state = state._replace(step=jnp.int32(PAIRS.phase1_steps + 5))
  found = curriculum.assign(state, num_groups=60_000, config=PAIRS)
  pairs = list(zip(found.budgets.tolist(), found.tokens.tolist()))
  shares = [pairs.count(pair) / len(pairs) for pair in oracle.held]
  np.testing.assert_allclose(shares, oracle.probabilities(), atol=0.01)


def test_one_token_level_draws_the_budgets_of_none():
  one = dataclasses.replace(CURRICULUM, token_levels=(99,))
  for step in (0, 100, 150):
    plain, paired = (
      curriculum.assign(
        curriculum.init(config, 3)._replace(step=jnp.int32(step)),
        num_groups=50,
        config=config,
      )
      for config in (CURRICULUM, one)
    )
    np.testing.assert_array_equal(plain.budgets, paired.budgets)
    assert plain.tokens is None and set(paired.tokens.tolist()) == {99}


@pytest.mark.parametrize(
  "changes, words",
  [
    ({"token_levels": (9, 9)}, "expected ascending"),
    ({"token_levels": (9, 5)}, "expected ascending"),
    ({"fixed_budget": 3}, "fixed_budget of 3"),
  ],
)
def test_levels_that_do_not_fit_are_refused(changes, words):
  with pytest.raises(ValueError, match=words):
    validation._curriculum(dataclasses.replace(PAIRS, **changes))
