"""Tests the terms and weights of the GRPO objective against Eq. 12."""

from __future__ import annotations

import dataclasses
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from absl.testing import parameterized

from anysearch_jax import config as config_lib
from anysearch_jax.algorithms import grpo as objective

CONFIG = config_lib.ObjectiveConfig()


class TokenTest(chex.TestCase):
  @chex.variants(with_jit=True, without_jit=True)
  @parameterized.parameters(*objective.KL_ESTIMATORS)
  def test_equations(self, estimator):
    config = dataclasses.replace(CONFIG, kl_estimator=estimator)
    terms = self.variant(objective.token_terms, static_argnames="config")
    rng = np.random.default_rng(0)
    logp = -rng.exponential(1, 2000)
    old, ref = (logp + rng.normal(0, 0.3, (2, 2000))).clip(max=0)
    tokens = np.float32([logp, old, ref, rng.normal(size=2000)])
    out = terms(*tokens, config=config)
    expected = [
      (
        -oracles.surrogate(new, old, a, config),
        oracles.kl(new, ref, estimator),
        math.exp(new - old),
      )
      for new, old, ref, a in tokens.T.astype(float)
    ]
    np.testing.assert_allclose(
      np.transpose(out[:3]), expected, rtol=1e-5, atol=1e-6
    )
    for side in (out.clipped_low, out.clipped_high):
      assert 0.05 < side.mean() < 0.5

  @chex.variants(with_jit=True, without_jit=True)
  @parameterized.parameters(
    # Values at log pi - log ref = log 2: log 2; log(2)^2 / 2; 1/2 + log 2 - 1.
    ("k1", 0.6931472, 1.0, -0.6931472, 1.0),
    ("k2", 0.2402265, 0.6931472, 0.2402265, -0.6931472),
    ("k3", 0.1931472, 0.5, 0.3068528, -1.0),
  )
  def test_kl_by_hand(self, estimator, above, slope_above, below, slope_below):
    value_and_grad = self.variant(
      jax.value_and_grad(
        lambda x, y: objective.kl_estimate(x, y, estimator=estimator)
      )
    )
    low, high = jnp.float32(math.log(0.25)), jnp.float32(math.log(0.5))
    np.testing.assert_allclose(
      [value_and_grad(high, low), value_and_grad(low, high)],
      [(above, slope_above), (below, slope_below)],
      rtol=1e-6,
    )
    np.testing.assert_allclose(value_and_grad(low, low)[0], 0, atol=1e-7)


def test_log_ratios_beyond_float32_s_exponent_are_clamped():
  """Without the clamp, k3 and the ratio would be inf from 88.8 on."""
  for log_ratio in (-1e4, -90.0, -21.0, -19.0, 19.0, 21.0, 90.0, 1e4):
    logp, ref = jnp.float32(0), jnp.float32(log_ratio)
    np.testing.assert_allclose(
      jax.value_and_grad(
        lambda x, y: objective.kl_estimate(x, y, estimator="k3")
      )(logp, ref),
      [
        oracles.kl(0.0, log_ratio, "k3"),
        oracles.kl_gradient(0.0, log_ratio, "k3"),
      ],
      rtol=1e-5,
    )
    for advantage in (-1.0, 1.0):

      def policy_loss(x, old, a=advantage):
        return objective.token_terms(
          x, old, x, jnp.float32(a), config=CONFIG
        ).policy_loss

      np.testing.assert_allclose(
        jax.value_and_grad(policy_loss)(ref, logp),
        [
          -oracles.surrogate(log_ratio, 0.0, advantage, CONFIG),
          -oracles.surrogate_gradient(log_ratio, 0.0, advantage, CONFIG),
        ],
        rtol=1e-5,
      )


@pytest.mark.parametrize(
  "ratio, advantage, clipped",
  [
    # The clip stops tokens that already moved in the advantage's direction.
    (0.79, +2.0, False), (0.81, +2.0, False),
    (1.27, +2.0, False), (1.29, +2.0, True),
    (0.79, -2.0, True), (0.81, -2.0, False),
    (1.27, -2.0, False), (1.29, -2.0, False),
    (1.28 * (1 - 1e-6), +2.0, False), (1.28 * (1 + 1e-6), +2.0, True),
    (0.8 * (1 - 1e-6), -2.0, True), (0.8 * (1 + 1e-6), -2.0, False),
    (0.1, 0.0, False), (1.0, 0.0, False), (9.0, 0.0, False),
  ],
)  # fmt: skip
def test_clip_edges(ratio, advantage, clipped):
  def policy_loss(logp):
    terms = objective.token_terms(
      logp,
      jnp.float32(0),
      jnp.float32(0),
      jnp.float32(advantage),
      config=CONFIG,
    )
    return terms.policy_loss, terms

  # With an old log-probability of 0, log(ratio) keeps its full precision.
  (loss, terms), gradient = jax.value_and_grad(policy_loss, has_aux=True)(
    jnp.float32(math.log(ratio))
  )
  # The low side clips negative advantages, the high side positive ones.
  assert bool(terms.clipped_low) is (clipped and advantage < 0)
  assert bool(terms.clipped_high) is (clipped and advantage > 0)
  if clipped:
    bound = 1.28 if advantage > 0 else 0.8
    assert gradient == 0
    np.testing.assert_allclose(loss, -bound * advantage, rtol=1e-6)
  else:
    np.testing.assert_allclose(gradient, -ratio * advantage, rtol=1e-6)
    np.testing.assert_allclose(loss, -ratio * advantage, rtol=1e-6)


def test_a_ratio_on_the_edge_keeps_its_gradient():
  config = dataclasses.replace(CONFIG, clip_low=0.0, clip_high=0.0)
  for advantage in (-1.0, 1.0):
    gradient = jax.grad(
      lambda x, a=advantage: (
        objective.token_terms(
          x, jnp.float32(-1), jnp.float32(-1), jnp.float32(a), config=config
        ).policy_loss
      )
    )(jnp.float32(-1))
    assert gradient == -advantage


def test_unknown_names_and_other_shapes_are_refused():
  token = jnp.zeros((2, 3))
  with pytest.raises(ValueError, match="kl_estimator 'k4'; expected one of k1"):
    objective.kl_estimate(token, token, estimator="k4")
  with pytest.raises(ValueError, match="'mean'; expected one of sequence-mean"):
    objective.token_weights([], reduction="mean")
  with pytest.raises(AssertionError):
    objective.grpo_loss(token, token, token, jnp.zeros(2), token, config=CONFIG)
  with pytest.raises(AssertionError):
    objective.kl_estimate(token, token[0], estimator="k1")


@pytest.mark.parametrize(
  ("reduction", "expected"),
  [
    # Four trajectories with 2, 4, 1 and 0 model tokens, 7 in total.
    (
      "sequence-mean",
      [[0, 1 / 8, 1 / 8, 0, 0], [1 / 16] * 4, [0, 0, 0, 1 / 4], [0, 0]],
    ),
    (
      "token-mean",
      [[0, 1 / 7, 1 / 7, 0, 0], [1 / 7] * 4, [0, 0, 0, 1 / 7], [0, 0]],
    ),
  ],
)
def test_token_weights_by_hand(reduction, expected):
  masks = [[0, 1, 1, 0, 0], [1, 1, 1, 1], [0, 0, 0, 1], [0, 0]]
  masks = [np.array(mask, bool) for mask in masks]
  weights = objective.token_weights(masks, reduction=reduction)
  for weight, row in zip(weights, expected, strict=True):
    assert weight.dtype == np.float32
    np.testing.assert_array_equal(weight, np.float32(row))
