"""The GRPO objective, against the page, at its kinks and under its mask."""

from __future__ import annotations

import dataclasses
import functools
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from absl.testing import parameterized

from anysearch_jax import config as config_lib
from anysearch_jax import objective

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
    assert 0.1 < out.clipped.mean() < 0.9

  @chex.variants(with_jit=True, without_jit=True)
  @parameterized.parameters(
    # At log pi - log ref = log 2: log 2; log(2)^2 / 2; 1/2 + log 2 - 1.
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


@pytest.mark.parametrize("estimator", objective.KL_ESTIMATORS)
def test_kl_against_float64(estimator):
  logp, ref = np.float32(np.random.default_rng(3).uniform(-6, 0, (2, 1000)))
  fn = jax.vmap(
    jax.value_and_grad(
      lambda x, y: objective.kl_estimate(x, y, estimator=estimator)
    )
  )
  value, gradient = fn(logp, ref)
  pairs = list(zip(logp.astype(float), ref.astype(float)))
  np.testing.assert_allclose(
    value, [oracles.kl(*p, estimator) for p in pairs], rtol=1e-5, atol=1e-6
  )
  np.testing.assert_allclose(
    gradient,
    [oracles.kl_gradient(*p, estimator) for p in pairs],
    rtol=1e-5,
    atol=1e-6,
  )


def test_k3_is_never_negative():
  logp = jnp.linspace(-3, 0, 4001)
  for shift in (1e-4, 1e-3, 0.1):
    k3 = objective.kl_estimate(logp, logp - shift, estimator="k3")
    assert np.all(np.asarray(k3) >= 0)


@pytest.mark.parametrize(
  "ratio, advantage, clipped",
  [
    # The clip holds what has already moved the advantage's way.
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

  # Behaviour log-probability 0 leaves log(ratio) its whole precision.
  (loss, terms), gradient = jax.value_and_grad(policy_loss, has_aux=True)(
    jnp.float32(math.log(ratio))
  )
  assert bool(terms.clipped) is clipped
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


def test_ratio_one_is_the_policy_gradient():
  rng = np.random.default_rng(4)
  logp, ref, advantage = np.float32(rng.normal(-2, 1, (3, 50)))
  weight = np.full(50, 0.02, np.float32)
  config = dataclasses.replace(CONFIG, kl_coefficient=0.0)

  def grpo(x):
    return objective.grpo_loss(x, logp, ref, advantage, weight, config=config)[
      0
    ]

  def reinforce(x):
    return -jnp.sum(weight * advantage * x)

  np.testing.assert_allclose(
    jax.grad(grpo)(logp), jax.grad(reinforce)(logp), rtol=1e-6
  )


def test_unknown_estimator():
  with pytest.raises(ValueError, match="kl_estimator 'k4'; expected one of k1"):
    objective.kl_estimate(jnp.zeros(1), jnp.zeros(1), estimator="k4")


def test_shapes_are_checked():
  token = jnp.zeros((2, 3))
  with pytest.raises(AssertionError):
    objective.grpo_loss(token, token, token, jnp.zeros(2), token, config=CONFIG)
  with pytest.raises(AssertionError):
    objective.kl_estimate(token, token[0], estimator="k1")
  with pytest.raises(AssertionError):
    objective.token_weights(token, jnp.ones(2, bool), num_valid=2)


def test_token_weights_by_hand():
  mask = np.array([[0, 1, 1, 0], [1, 1, 1, 1], [0, 0, 0, 1], [0, 0, 0, 0]]) == 1
  valid = np.array([True, True, False, True])
  np.testing.assert_array_equal(
    objective.token_weights(mask, valid, num_valid=4),
    [[0, 1 / 8, 1 / 8, 0], [1 / 16] * 4, [0] * 4, [0] * 4],
  )
  np.testing.assert_array_equal(
    objective.token_weights(mask, valid & False, num_valid=0), np.zeros((4, 4))
  )


def ragged(rng, count):
  """A step: masks, the five token arrays in lists, and who is valid."""
  lengths = rng.integers(1, 13, count)
  masks = [rng.random(n) < 0.6 for n in lengths]
  logp = [-rng.exponential(1, n) for n in lengths]
  old = [x + rng.normal(0, 0.3, len(x)) for x in logp]
  ref = [x + rng.normal(0, 0.3, len(x)) for x in logp]
  advantage = rng.normal(size=count).round(1)
  valid = rng.random(count) < 0.8
  return masks, logp, old, ref, advantage, valid


def oracle_loss(masks, logp, old, ref, advantage, valid, config):
  """The double mean; gradients back on the tokens of each trajectory."""
  kept = [i for i in range(len(masks)) if valid[i]]
  value, model = oracles.loss(
    [(*(x[i][masks[i]] for x in (logp, old, ref)), advantage[i]) for i in kept],
    config,
  )
  gradients = [np.zeros(len(m)) for m in masks]
  for i, gradient in zip(kept, model):
    gradients[i][masks[i]] = gradient
  return value, gradients


def padded(rows, width, fill=0.0):
  out = np.full((len(rows), width), fill, np.float32)
  for row, values in zip(out, rows):
    row[: len(values)] = values
  return out


@functools.partial(jax.jit, static_argnames="config")
def loss_and_gradient(logp, *rest, config=CONFIG):
  fn = functools.partial(objective.grpo_loss, config=config)
  return jax.value_and_grad(fn, has_aux=True)(logp, *rest)


def test_the_oracle_gradient_is_the_slope_of_the_oracle():
  step = ragged(np.random.default_rng(5), 6)
  _, gradients = oracle_loss(*step, CONFIG)
  masks, logp, *rest = step
  for i, row in enumerate(logp):
    for t in range(len(row)):
      ends = []
      for shift in (1e-6, -1e-6):
        moved = [x.copy() for x in logp]
        moved[i][t] += shift
        ends.append(oracle_loss(masks, moved, *rest, CONFIG)[0])
      np.testing.assert_allclose(
        (ends[0] - ends[1]) / 2e-6, gradients[i][t], atol=1e-8
      )


@pytest.mark.parametrize("estimator", objective.KL_ESTIMATORS)
@pytest.mark.parametrize("seed", range(3))
def test_the_double_mean_however_packed(estimator, seed):
  config = dataclasses.replace(
    CONFIG, kl_estimator=estimator, kl_coefficient=0.1
  )
  rng = np.random.default_rng(seed)
  step = masks, logp, old, ref, advantage, valid = ragged(rng, 24)
  expected, gradients = oracle_loss(*step, config)

  # One trajectory a row.
  mask = padded(masks, 12) == 1
  weight = objective.token_weights(mask, valid, num_valid=valid.sum())
  np.testing.assert_allclose(
    weight.sum(), np.mean([m.any() for m, v in zip(masks, valid) if v])
  )
  tokens = [
    *(padded(x, 12) for x in (logp, old, ref)),
    np.repeat(np.float32(advantage)[:, None], 12, 1),
    np.asarray(weight),
  ]
  (loss, whole), gradient = loss_and_gradient(*tokens, config=config)
  np.testing.assert_allclose(loss, expected, rtol=1e-4, atol=1e-6)
  np.testing.assert_allclose(
    gradient, padded(gradients, 12), rtol=1e-4, atol=1e-7
  )

  # All tokens shuffled into rows of 7 that know nothing of trajectories, in
  # micro-batches that are summed; the last is padded with weight 0.
  order = rng.permutation(mask.size)
  tail = -mask.size % 42
  packed = [
    np.pad(x.reshape(-1)[order], (0, tail)).reshape(-1, 6, 7) for x in tokens
  ]
  parts = [
    loss_and_gradient(*(x[i] for x in packed), config=config)
    for i in range(len(packed[0]))
  ]
  np.testing.assert_allclose(
    sum(float(value) for (value, _), _ in parts), loss, rtol=1e-5, atol=1e-6
  )
  flat = np.concatenate([g.reshape(-1) for _, g in parts])[: mask.size]
  np.testing.assert_allclose(
    flat, np.asarray(gradient).reshape(-1)[order], rtol=1e-6, atol=1e-9
  )
  metrics = [m for (_, m), _ in parts]
  for name, value in whole.items():
    total = (max if name.endswith("_max") else sum)(m[name] for m in metrics)
    np.testing.assert_allclose(total, value, rtol=1e-4, atol=1e-6, err_msg=name)


def test_metrics_by_hand():
  # Two tokens at half the weight each, and one that is masked.
  ratio = np.array([2.0, 0.5, 7.0])
  tokens = np.float32(
    [
      np.log(ratio),
      [0, 0, 0],
      np.log([1.0, 0.5, 9.0]),
      [3, 3, 3],
      [0.5, 0.5, 0],
    ]
  )
  loss, metrics = objective.grpo_loss(*tokens, config=CONFIG)
  policy_loss = -0.5 * (1.28 * 3 + 0.5 * 3)
  kl = 0.5 * (0.5 - math.log(0.5) - 1)
  np.testing.assert_allclose(loss, policy_loss + 0.001 * kl, rtol=1e-6)
  chex.assert_trees_all_close(
    metrics,
    {
      "policy_loss": policy_loss,
      "kl": kl,
      "ratio": 1.25,
      "clip_fraction": 0.5,
      "logp_difference": math.log(2),
      "logp_difference_max": math.log(2),
    },
    rtol=1e-6,
  )
  chex.assert_type(list(metrics.values()), np.float32)


@pytest.mark.parametrize("estimator", objective.KL_ESTIMATORS)
@pytest.mark.parametrize("garbage", [np.nan, np.inf, -np.inf, 1e30, -1e30])
def test_masked_tokens_are_inert(garbage, estimator):
  config = dataclasses.replace(CONFIG, kl_estimator=estimator)
  rng = np.random.default_rng(6)
  live = rng.random((3, 8)) < 0.5
  tokens = [np.float32(rng.normal(-1, 0.2, live.shape)) for _ in range(4)]
  weight = np.float32(live / live.sum())
  expected = loss_and_gradient(*tokens, weight, config=config)
  spoilt = [np.where(live, x, np.float32(garbage)) for x in tokens]
  actual = loss_and_gradient(*spoilt, weight, config=config)
  chex.assert_trees_all_equal(actual, expected)
  chex.assert_tree_all_finite(actual)
  gradient = np.asarray(actual[1])
  np.testing.assert_array_equal(gradient[~live], 0)
  assert np.all(gradient[live] != 0)


def test_nothing_to_learn_from_is_zero():
  token = np.full((2, 4), np.nan, np.float32)
  zero = np.zeros((2, 4), np.float32)
  (loss, metrics), gradient = loss_and_gradient(
    token, token, token, token, zero
  )
  chex.assert_trees_all_equal(
    (loss, metrics, gradient),
    jax.tree.map(np.zeros_like, (loss, metrics, gradient)),
  )


def test_equal_group_contributes_only_its_kl_term():
  rng = np.random.default_rng(7)
  logp, old, ref = np.float32(rng.normal(-1, 0.3, (3, 20)))
  zero, weight = np.zeros(20, np.float32), np.full(20, 0.05, np.float32)
  (loss, metrics), gradient = loss_and_gradient(logp, old, ref, zero, weight)
  np.testing.assert_allclose(loss, 0.001 * metrics["kl"], rtol=1e-6)
  np.testing.assert_allclose(
    gradient, 0.001 * 0.05 * (1 - np.exp(ref - logp)), rtol=1e-4, atol=1e-10
  )
