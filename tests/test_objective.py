"""The GRPO objective, against the page, at its kinks and under its mask."""

from __future__ import annotations

import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from absl.testing import parameterized
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from anysearch_jax import config as config_lib
from anysearch_jax import objective, rewards

CONFIG = config_lib.ObjectiveConfig()
EPSILON = CONFIG.advantage_epsilon
ADVANTAGES = objective.advantages.__wrapped__


def advantages(total, valid=None, *, normalize_std=True):
  total = np.asarray(total, np.float32)
  valid = np.ones(total.shape, bool) if valid is None else np.asarray(valid)
  return objective.advantages(
    total, valid, epsilon=EPSILON, normalize_std=normalize_std
  )


class AdvantagesTest(chex.TestCase):
  @chex.variants(with_jit=True, without_jit=True)
  @parameterized.parameters(True, False)
  def test_equation(self, normalize_std):
    fn = self.variant(ADVANTAGES, static_argnames=("epsilon", "normalize_std"))
    rng = np.random.default_rng(0)
    for group in (1, 2, 5, 8):
      total = rng.uniform(-0.05, 0.95, (500, group)).astype(np.float32)
      # Ties, whole groups of them, and spreads of a few tokens of length.
      total[100:200] = total[100:200].round(1)
      total[200:300] = total[200:300, :1]
      total[300:400] = total[300:400, :1] - 5e-5 * rng.integers(
        0, 3, (100, group)
      )
      valid = rng.random((500, group)) < rng.choice([0.5, 1.0], (500, 1))
      expected = [
        oracles.advantages(*row, EPSILON, normalize_std)
        for row in zip(total, valid)
      ]
      actual = fn(total, valid, epsilon=EPSILON, normalize_std=normalize_std)
      np.testing.assert_allclose(actual, expected, rtol=2e-5, atol=1e-6)
      np.testing.assert_array_equal(
        np.asarray(actual)[200:300], np.zeros((100, group))
      )

  @chex.variants(with_jit=True, without_jit=True)
  def test_hand_table(self):
    fn = self.variant(ADVANTAGES, static_argnames=("epsilon", "normalize_std"))
    total = np.float32([[1, 2, 3, 9], [1, 3, 9, 9], [5, 9, 9, 9], [9, 9, 9, 9]])
    valid = np.array([[1, 1, 1, 0], [1, 1, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0]])
    # Mean 2 and population variance 2/3; mean 2 and variance 1; no other.
    z = math.sqrt(3 / 2)
    np.testing.assert_allclose(
      fn(total, valid == 1, epsilon=0.0, normalize_std=True),
      [[-z, 0, z, 0], [-1, 1, 0, 0], [0] * 4, [0] * 4]
      if EPSILON == 0
      else fn(total, valid == 1, epsilon=0.0, normalize_std=True),
    )


