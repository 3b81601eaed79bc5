"""Tests the composite reward: its equations, by hand and its properties."""

from __future__ import annotations

import chex
import jax
import numpy as np
import oracles
import pytest
from absl.testing import parameterized
from hypothesis import given, settings
from hypothesis import strategies as st

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
      0.5 + 0.15 - 0.05,
      0.15 - 0.05,
      0,
    ]
    em, f, n, used, valid, length, r_abs, r_rel, tool = map(
      np.array, zip(*table)
    )
    out = composite(em, f, n, used, np.int32(4), valid, config=CONFIG)
    chex.assert_trees_all_close(
      out,
      rewards.Rewards(
        em * valid,
        f * valid,
        length,
        r_abs,
        r_rel,
        tool,
        gamma=np.array(0.225),
        total=np.array(total),
      ),
      atol=1e-6,
    )
    chex.assert_type(list(out), np.float32)

  @chex.variants(with_jit=True, without_jit=True)
  @parameterized.parameters(
    ("adaptive", True, True, 0.0),
    ("adaptive", False, False, 0.02),
    ("fixed", False, True, 0.0),
    ("off", True, False, 0.1),
  )
  def test_equations(self, gamma_mode, use_abs, use_rel, charge):
    config = config_lib.RewardConfig(
      gamma_mode=gamma_mode, use_abs=use_abs, use_rel=use_rel, charge=charge
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


def test_other_weights():
  config = config_lib.RewardConfig(
    alpha=2, beta=3, delta=5, gamma_max=7, length_limit=10, length_tolerance=10
  )
  out = one_group(
    [1, 0], [1, 1], budget=2, generated_tokens=[15, 30], config=config
  )
  # gamma = 3.5; the only right trajectory has r_abs 0.5 and r_rel 1.
  np.testing.assert_allclose(
    out.total, [2 + 3 - 5 * 0.5 + 3.5 * 0.5, 3 - 5], rtol=1e-6
  )


BOTH = [0.75, 0.25, 0, 0]


@pytest.mark.parametrize(
  "changes, gamma, tool",
  [
    ({}, 0.225, BOTH),
    ({"gamma_max": 0.6}, 0.45, BOTH),
    ({"gamma_mode": "fixed"}, 0.3, BOTH),
    ({"gamma_mode": "fixed", "gamma_fixed": 0.15}, 0.15, BOTH),
    ({"gamma_mode": "off"}, 0, BOTH),
    ({"use_abs": False}, 0.225, [1, 0.5, 0, 0]),
    ({"use_rel": False}, 0.225, [0.75, 0.5, 0.25, 0]),
    ({"use_abs": False, "use_rel": False}, 0.225, [1, 1, 1, 0]),
  ],
)
def test_switches_of_the_tool_reward(changes, gamma, tool):
  config = config_lib.RewardConfig(**changes)
  out = one_group([1, 1, 1, 0], [1, 2, 3, 0], budget=4, config=config)
  np.testing.assert_allclose(out.gamma, gamma, rtol=1e-6)
  np.testing.assert_allclose(out.tool, tool, atol=1e-6)
  np.testing.assert_allclose(out.r_abs, [0.75, 0.5, 0.25, 0], atol=1e-6)
  np.testing.assert_allclose(out.r_rel, [1, 0.5, 0, 0], atol=1e-6)
  accuracy = 0.5 * np.array([1, 1, 1, 0])
  np.testing.assert_allclose(
    out.total, accuracy + 0.15 + gamma * np.array(tool), atol=1e-6
  )


def test_each_part_by_hand():
  # A budget of 0 gives 0, without a division by 0.
  np.testing.assert_array_equal(
    rewards.absolute_reward(np.ones(2), np.array([0, 2]), np.zeros(2)), [0, 0]
  )
  em, valid = np.array([1, 1, 1, 0]), np.array([True, True, False, True])
  np.testing.assert_allclose(
    rewards.relative_reward(em, np.array([1, 3, 0, 9]), valid, xi=1.0),
    [1, 1 / 3, 0, 0],
    rtol=1e-6,
  )
  np.testing.assert_allclose(
    rewards.adaptive_weight(em, valid, gamma_max=0.3), 0.2, rtol=1e-6
  )


def test_budget_zero_has_zero_r_abs():
  out = one_group([1, 1, 0], [0, 0, 0], budget=0)
  np.testing.assert_array_equal(out.r_abs, [0, 0, 0])
  np.testing.assert_array_equal(out.r_rel, [1, 1, 0])
  np.testing.assert_array_equal(out.tool, [0, 0, 0])
  config = config_lib.RewardConfig(use_abs=False)
  out = one_group([1, 1, 0], [0, 0, 0], budget=0, config=config)
  np.testing.assert_array_equal(out.tool, [1, 1, 0])


def test_without_a_correct_trajectory_the_tool_reward_is_zero():
  out = one_group([0, 0, 0], [0, 1, 3], budget=3)
  for name in ("r_abs", "r_rel", "tool", "gamma"):
    np.testing.assert_array_equal(getattr(out, name), 0, err_msg=name)
  np.testing.assert_allclose(out.total, 0.15)


def test_without_a_valid_trajectory_all_rewards_are_zero():
  out = one_group([1, 1], [0, 1], budget=3, valid=[False, False])
  for name, value in out._asdict().items():
    np.testing.assert_array_equal(value, 0, err_msg=name)


def test_a_charge_is_paid_for_right_and_wrong_answers():
  config = config_lib.RewardConfig(gamma_mode="off", charge=0.04)
  out = one_group([1, 0, 0], [2, 3, 0], budget=3, config=config)
  np.testing.assert_allclose(
    out.total, [0.5 + 0.15 - 0.08, 0.15 - 0.12, 0.15], rtol=1e-6
  )


def test_unknown_gamma_mode():
  config = config_lib.RewardConfig(gamma_mode="adaptiv")
  with pytest.raises(ValueError, match="'adaptiv'; expected one of"):
    one_group([1], [0], budget=1, config=config)


def test_shapes_are_checked():
  with pytest.raises(AssertionError):
    one_group([1, 0], [0], budget=1)
  with pytest.raises(AssertionError):
    one_group([1, 0], [0, 1], budget=[1, 1])
  with pytest.raises(AssertionError):
    one_group([1, 0], [0, 1], budget=1, valid=[1, 1])


def test_composite_accepts_any_number_type_and_leading_axes():
  arguments = random_groups(np.random.default_rng(1), 6, 5)
  expected = rewards.composite(*arguments, config=CONFIG)
  *numbers, valid = arguments
  floats = (np.asarray(x, np.float32) for x in numbers)
  chex.assert_trees_all_equal(
    rewards.composite(*floats, valid, config=CONFIG), expected
  )
  chex.assert_trees_all_equal(
    jax.vmap(lambda *a: rewards.composite(*a, config=CONFIG))(*arguments),
    expected,
  )
  folded = [x.reshape(2, 3, *x.shape[1:]) for x in arguments]
  out = rewards.composite(*folded, config=CONFIG)
  chex.assert_shape([out.gamma, out.total], [(2, 3), (2, 3, 5)])
  chex.assert_trees_all_equal(
    jax.tree.map(lambda x: x.reshape(6, *x.shape[2:]), out), expected
  )


@pytest.mark.parametrize("group", [2, 3, 5, 9, 33])
def test_equal_trajectories_have_equal_bits(group):
  """SIMD lanes and remainder loops must round alike for zero advantages."""
  used = np.full(group, 1)
  for budget, tokens in ((3, 2049), (7, 2777)):
    out = one_group(
      np.ones(group), used, budget=budget, generated_tokens=used * tokens
    )
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


@settings(max_examples=200, deadline=None)
@given(MEMBERS, st.integers(0, 8), st.permutations(range(GROUP)))
def test_rewards_do_not_depend_on_the_order_of_members(members, budget, order):
  order = np.array(order)
  before = columns(members, budget)
  after = [x if x.ndim == 0 else x[order] for x in before]
  expected = rewards.composite(*before, config=CONFIG)
  out = rewards.composite(*after, config=CONFIG)
  chex.assert_trees_all_equal(
    out,
    expected._replace(
      **{
        name: x[order]
        for name, x in expected._asdict().items()
        if name != "gamma"
      }
    ),
  )


@settings(max_examples=200, deadline=None)
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


@settings(max_examples=200, deadline=None)
@given(MEMBERS, st.integers(0, 8))
def test_rewards_are_within_their_bounds(members, budget):
  em, *rest = columns(members, budget)
  out = rewards.composite(em, *rest, config=CONFIG)
  bounds = {
    "length": (-1, 0),
    "r_abs": (0, 1),
    "r_rel": (0, 1),
    "tool": (0, 1),
    "gamma": (0, CONFIG.gamma_max * (1 + 1e-6)),
    "total": (-0.05, 0.95 + 1e-6),
  }
  for name, (low, high) in bounds.items():
    value = np.asarray(getattr(out, name))
    assert np.all((value >= low) & (value <= high)), (name, value)
  for name in ("r_abs", "r_rel", "tool"):
    assert not np.any(np.asarray(getattr(out, name))[~em]), name
