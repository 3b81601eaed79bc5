"""Tests the composite reward: its equations, by hand and its properties."""

from __future__ import annotations

import dataclasses
import math

import chex
import jax
import numpy as np
import oracles
import pytest
from absl.testing import parameterized
from hypothesis import given, settings
from hypothesis import strategies as st

from anysearch_jax import budgets
from anysearch_jax import config as config_lib
from anysearch_jax.algorithms import rewards

CONFIG = config_lib.RewardConfig()
PLAIN = rewards.composite.__wrapped__


def random_groups(rng, questions, group):
  """Draws arguments of `composite`, with budget 0 and invalid members too."""
  budget = rng.integers(0, 9, questions)
  return (
    rng.random((questions, group)) < rng.random((questions, 1)),
    rng.integers(0, 2, (questions, group)),
    rng.integers(0, 4097, (questions, group)),
    rng.integers(0, budget[:, None] + 1, (questions, group)),
    budget,
    rng.random((questions, group)) < rng.choice([0.3, 0.9, 1.0]),
  )


def one_group(em, used, *, budget, config=CONFIG, **changes):
  """Returns rewards of a group of short, well-formed, valid trajectories."""
  ones = np.ones(len(em), np.int32)
  values = {"format_": ones, "generated_tokens": ones, "valid": ones == 1}
  values |= {name: np.asarray(value) for name, value in changes.items()}
  return rewards.composite(
    np.asarray(em),
    searches=np.asarray(used),
    budget=np.asarray(budget),
    config=config,
    **values,
  )


class CompositeTest(chex.TestCase):
  @chex.variants(with_jit=True, without_jit=True)
  def test_hand_table(self):
    composite = self.variant(PLAIN, static_argnames="config")
    # G = 5, B = 4. Three of the four valid trajectories are right, so
    # gamma = 0.3 * 3/4 = 0.225. They have 1 to 3 searches.
    table = [
      # em f  tokens used valid length  r_abs r_rel tool
      (1, 1, 2048, 1, True, 0.0, 0.75, 1.0, 0.75),
      (1, 0, 2560, 2, True, -0.5, 0.50, 0.5, 0.25),
      (1, 1, 3072, 3, True, -1.0, 0.25, 0.0, 0.0),
      (0, 1, 9999, 0, True, -1.0, 0.0, 0.0, 0.0),
      (1, 1, 100, 0, False, 0.0, 0.0, 0.0, 0.0),
    ]
    total = [
      0.5 + 0.15 + 0.225 * 0.75,
      0.5 - 0.05 * 0.5 + 0.225 * 0.25,
      *(0.5 + 0.15 - 0.05, 0.15 - 0.05, 0),
    ]
    em, f, n, used, valid, *parts = map(np.array, zip(*table))
    out = composite(em, f, n, used, np.int32(4), valid, config=CONFIG)
    expected = rewards.Rewards(
      *(em * valid, f * valid, *parts),
      gamma=np.array(0.225),
      total=np.array(total),
    )
    chex.assert_trees_all_close(out, expected, atol=1e-6)
    chex.assert_type(list(out), np.float32)

  @chex.variants(with_jit=True, without_jit=True)
  @parameterized.parameters(
    ("adaptive", True, True, 0.0),
    ("adaptive", False, False, 0.02),
    ("fixed", False, True, 0.0),
    ("off", True, False, 0.1),
    ("off", True, True, 0.0),
  )
  def test_equations(self, gamma_mode, use_abs, use_rel, charge):
    config = config_lib.RewardConfig(
      gamma_mode=gamma_mode,
      use_abs=use_abs,
      use_rel=use_rel,
      charge=charge,
      # Others than the defaults, which the table has.
      alpha=2.0,
      beta=3.0,
      delta=5.0,
      gamma_max=7.0,
      gamma_fixed=0.25,
    )
    composite = self.variant(PLAIN, static_argnames="config")
    rng = np.random.default_rng(0)
    for group in (1, 5, 8):
      arguments = random_groups(rng, 500, group)
      out = composite(*arguments, config=config)
      expected = [oracles.rewards(*row, config) for row in zip(*arguments)]
      for name, value in out._asdict().items():
        np.testing.assert_allclose(
          value, [row[name] for row in expected], atol=1e-6, err_msg=name
        )

  @chex.variants(with_jit=True, without_jit=True)
  def test_length_reward(self):
    length = self.variant(
      rewards.length_reward, static_argnames=("limit", "tolerance")
    )
    n = np.array([0, 2047, 2048, 2049, 2560, 3071, 3072, 3073, 10**6])
    np.testing.assert_array_equal(
      length(n, limit=2048, tolerance=1024),
      [0, 0, 0, -1 / 1024, -0.5, -1023 / 1024, -1, -1, -1],
    )
    np.testing.assert_array_equal(
      length(np.array([9, 10, 11]), limit=10, tolerance=0), [0, 0, -1]
    )


@pytest.mark.parametrize(
  ("changes", "sentence"),
  [
    ({"gamma_mode": "adaptiv"}, "'adaptiv', expected one of"),
    ({"rel_cost": "euros"}, "rel_cost: found 'euros'"),
  ],
)
def test_unknown_modes_are_refused(changes, sentence):
  config = config_lib.RewardConfig(**changes)
  with pytest.raises(ValueError, match=sentence):
    one_group([1], [0], budget=1, config=config)


@pytest.mark.parametrize("group", [3, 33])
def test_equal_trajectories_have_equal_bits(group):
  """SIMD lanes and remainder loops must round alike for zero advantages."""
  used = np.full(group, 1)
  out = one_group(np.ones(group), used, budget=7, generated_tokens=used * 2777)
  assert np.unique(out.total).size == 1


GROUP = 6
MEMBERS = st.lists(
  st.tuples(
    st.booleans(),
    st.booleans(),
    st.integers(0, 5000),
    st.integers(0, 8),
    st.booleans(),
  ),
  min_size=GROUP,
  max_size=GROUP,
)


def columns(members, budget):
  em, format_, tokens, used, valid = map(np.array, zip(*members))
  used = np.minimum(used, budget)
  return em, format_, tokens, used, np.int32(budget), valid


@given(MEMBERS, st.integers(0, 8), st.permutations(range(GROUP)))
def test_rewards_do_not_depend_on_the_order_of_members(members, budget, order):
  order = np.array(order)
  before = columns(members, budget)
  after = [x if x.ndim == 0 else x[order] for x in before]
  expected = rewards.composite(*before, config=CONFIG)
  out = rewards.composite(*after, config=CONFIG)
  moved = {n: x[order] for n, x in expected._asdict().items() if n != "gamma"}
  chex.assert_trees_all_equal(out, expected._replace(**moved))


@given(MEMBERS, MEMBERS, st.integers(0, 8))
def test_invalid_members_are_inert(members, others, budget):
  *numbers, budget, valid = columns(members, budget)
  *garbage, _, _ = columns(others, 8)
  changed = [np.where(valid, x, y) for x, y in zip(numbers, garbage)]
  expected = rewards.composite(*numbers, budget, valid, config=CONFIG)
  chex.assert_trees_all_equal(
    rewards.composite(*changed, budget, valid, config=CONFIG), expected
  )
  not_numbers = [np.where(valid, x, np.nan).astype("f") for x in numbers]
  chex.assert_trees_all_equal(
    rewards.composite(*not_numbers, budget, valid, config=CONFIG), expected
  )
  for name, value in expected._asdict().items():
    if name != "gamma":
      assert not np.any(np.asarray(value)[~valid]), name


# Budgets in more units than searches.

IN_UNITS = config_lib.RewardConfig(abs_tokens=3.0, abs_dollars=2.0)
UNITS = ("searches", "tokens", "dollars", "seconds")


@settings(max_examples=15)
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
  config = dataclasses.replace(IN_UNITS, rel_cost="dollars")
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
    config=IN_UNITS,
    spent={unit: x[:, :2] for unit, x in SPENT.items()},
    caps=CAPS,
  )
  np.testing.assert_allclose(found.r_abs, [[0.5, 0.1]], rtol=1e-5)
