"""Tests group-relative advantages against Eq. 11 and by their properties."""

from __future__ import annotations

import math

import chex
import numpy as np
import oracles
import pytest
from absl.testing import parameterized
from hypothesis import given
from hypothesis import strategies as st

from anysearch_jax import config as config_lib
from anysearch_jax.algorithms import grpo, rewards

EPSILON = config_lib.ObjectiveConfig().advantage_epsilon
PLAIN = grpo.advantages.__wrapped__
STATICS = ("epsilon", "normalize", "deviation")


def advantages(total, valid=None, *, normalize="group"):
  total = np.asarray(total, np.float32)
  valid = np.ones(total.shape, bool) if valid is None else np.asarray(valid)
  return grpo.advantages(total, valid, epsilon=EPSILON, normalize=normalize)


class AdvantagesTest(chex.TestCase):
  @chex.variants(with_jit=True, without_jit=True)
  @parameterized.product(normalize=grpo.NORMALIZERS, deviation=grpo.DEVIATIONS)
  def test_equation(self, normalize, deviation):
    fn = self.variant(PLAIN, static_argnames=STATICS)
    rng = np.random.default_rng(0)
    for group in (1, 2, 5, 8):
      total = rng.uniform(-0.05, 0.95, (500, group)).astype(np.float32)
      # Ties, groups of equal rewards, and differences of a few tokens' length.
      total[100:200] = total[100:200].round(1)
      total[200:300] = total[200:300, :1]
      more = 5e-5 * rng.integers(0, 3, (100, group))
      total[300:400] = total[300:400, :1] - more
      valid = rng.random((500, group)) < rng.choice([0.5, 1.0], (500, 1))
      how = {"epsilon": EPSILON, "normalize": normalize, "deviation": deviation}
      expected = oracles.advantages(total, valid, **how)
      actual = fn(total, valid, **how)
      np.testing.assert_allclose(actual, expected, rtol=2e-5, atol=1e-6)
      np.testing.assert_array_equal(actual[200:300], np.zeros((100, group)))

  @chex.variants(with_jit=True, without_jit=True)
  def test_hand_table(self):
    fn = self.variant(PLAIN, static_argnames=STATICS)
    total = np.float32([[1, 2, 3, 9], [1, 3, 9, 9], [5, 9, 9, 9], [9, 8, 7, 6]])
    valid = np.array([[1, 1, 1, 0], [1, 1, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0]])
    # Mean 2, variance 2/3; mean 2, variance 1; one valid reward; no valid one.
    z = math.sqrt(3 / 2)
    np.testing.assert_allclose(
      fn(total, valid == 1, epsilon=1e-6, normalize="group"),
      [[-z, 0, z, 0], [-1, 1, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]],
      rtol=1e-5,
    )
    np.testing.assert_allclose(
      fn(total, valid == 1, epsilon=1e-6, normalize="none"),
      [[-1, 0, 1, 0], [-1, 1, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]],
    )
    # The squares of the rollout sum to 4 over 3 + 2 + 1 valid rewards.
    z = math.sqrt(6 / 4)
    np.testing.assert_allclose(
      fn(total, valid == 1, epsilon=1e-6, normalize="batch"),
      [[-z, 0, z, 0], [-z, z, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]],
      rtol=1e-5,
    )
    # If epsilon equals the standard deviation, advantages are halved.
    np.testing.assert_allclose(
      fn(total[1], valid[1] == 1, epsilon=1.0, normalize="group"),
      [-0.5, 0.5, 0, 0],
    )


@given(
  st.lists(st.floats(-1, 1, width=16), min_size=6, max_size=6),
  st.lists(st.booleans(), min_size=6, max_size=6),
  st.permutations(range(6)),
)
def test_order_and_invalid_members_do_not_affect_advantages(
  total, valid, order
):
  total, valid, order = np.float32(total), np.array(valid), np.array(order)
  expected = np.asarray(advantages(total, valid))
  np.testing.assert_allclose(
    advantages(total[order], valid[order]),
    expected[order],
    rtol=1e-4,
    atol=1e-6,
  )
  garbage = np.where(valid, total, np.float32([np.nan, np.inf, -1e9] * 2))
  np.testing.assert_array_equal(advantages(garbage, valid), expected)
  assert not expected[~valid].any()
  assert abs(expected.sum()) < 1e-4


def test_equal_trajectories_have_no_advantage():
  """Equal trajectories get identical rewards, so advantages are exactly 0."""
  rng = np.random.default_rng(2)
  shape = (500, 5)
  rows = [rng.integers(0, high, 500) for high in (2, 2, 4097, 4)]
  valid = rng.random(shape) < 0.9
  equal = rewards.composite(
    *(np.broadcast_to(x[:, None], shape) for x in rows),
    np.full(500, 5),
    valid,
    config=config_lib.RewardConfig(),
  )
  assert np.unique(equal.total).size > 100
  np.testing.assert_array_equal(advantages(equal.total, valid), 0)


@pytest.mark.parametrize("gamma", [0.01, 0.3])
def test_gamma_cancels_in_groups_that_are_right_throughout(gamma):
  """Only the group's own deviation cancels it, see docs/objective.md."""
  shape = (1, 5)
  reward = rewards.composite(
    *(np.ones(shape, int), np.ones(shape, int), np.full(shape, 10)),
    np.array([[0, 1, 1, 2, 3]]),
    np.array([4]),
    np.ones(shape, bool),
    config=config_lib.RewardConfig(
      gamma_mode="fixed", gamma_fixed=gamma, use_rel=False
    ),
  )
  searches = np.array([0, 1, 1, 2, 3])
  cheaper = searches.mean() - searches
  np.testing.assert_allclose(
    advantages(reward.total)[0], cheaper / cheaper.std(), atol=2e-3
  )
  np.testing.assert_allclose(
    advantages(reward.total, normalize="none")[0],
    gamma * cheaper / 4,
    atol=1e-6,
  )


def test_an_unknown_normalizer_and_other_shapes_are_refused():
  with pytest.raises(ValueError, match="'std', expected one of group, batch"):
    advantages(np.zeros((2, 3)), normalize="std")
  with pytest.raises(AssertionError):
    advantages(np.zeros((2, 3)), np.ones(3, bool))
