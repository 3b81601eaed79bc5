"""Tests the GRPO loss of a step, and its terms, against Eq. 12."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from absl.testing import parameterized

from anysearch_jax import config as config_lib
from anysearch_jax.algorithms import grpo

CONFIG = config_lib.ObjectiveConfig()


class Step(NamedTuple):
  """The trajectories of a step, of different lengths, as lists of arrays."""

  mask: list[np.ndarray]
  logp: list[np.ndarray]
  behaviour: list[np.ndarray]
  old: list[np.ndarray]
  reference: list[np.ndarray]
  advantage: np.ndarray
  valid: np.ndarray


def ragged(rng, count):
  lengths = rng.integers(1, 13, count)
  logp = [-rng.exponential(1, n) for n in lengths]
  return Step(
    [rng.random(n) < 0.6 for n in lengths],
    logp,
    *([x + rng.normal(0, 0.3, len(x)) for x in logp] for _ in range(3)),
    rng.normal(size=count).round(1),
    rng.random(count) < 0.8,
  )


def oracle_loss(step, config):
  """Returns the paper's mean and its gradient for every token."""
  old = step.old if config.old_logp == "trainer" else step.behaviour
  tokens = (step.logp, step.behaviour, old, step.reference)
  kept = np.flatnonzero(step.valid)
  value, model = oracles.loss(
    [(*(x[i][step.mask[i]] for x in tokens), step.advantage[i]) for i in kept],
    config,
  )
  gradients = [np.zeros(len(m)) for m in step.mask]
  for i, gradient in zip(kept, model):
    gradients[i][step.mask[i]] = gradient
  return value, gradients


def padded(rows, width):
  out = np.zeros((len(rows), width), np.float32)
  for row, values in zip(out, rows):
    row[: len(values)] = values
  return out


@functools.partial(jax.jit, static_argnames="config")
def loss_and_gradient(logp, *rest, old_logp=None, config=CONFIG):
  fn = functools.partial(grpo.grpo_loss, config=config)
  return jax.value_and_grad(fn, has_aux=True)(logp, *rest, old_logp=old_logp)


# The cap is active for about every fourth token of `ragged`.
TRAINER = dataclasses.replace(CONFIG, old_logp="trainer", importance_cap=1.3)
VARIANTS = {
  "engine": CONFIG,
  "dual clip": dataclasses.replace(CONFIG, importance_cap=1.4),
  "trainer": dataclasses.replace(TRAINER, importance_cap=0.0),
  "capped": TRAINER,
  "token-mean": dataclasses.replace(TRAINER, reduction="token-mean"),
}


@pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS)
def test_the_oracles_gradient_is_the_slope_of_its_loss(config):
  step = ragged(np.random.default_rng(5), 6)
  _, gradients = oracle_loss(step, config)
  for i, row in enumerate(step.logp):
    for t in range(len(row)):
      ends = []
      for shift in (1e-6, -1e-6):
        moved = [x.copy() for x in step.logp]
        moved[i][t] += shift
        ends.append(oracle_loss(step._replace(logp=moved), config)[0])
      np.testing.assert_allclose(
        (ends[0] - ends[1]) / 2e-6, gradients[i][t], atol=1e-8
      )


@pytest.mark.parametrize(
  ("variant", "estimator"),
  [
    *(("engine", estimator) for estimator in grpo.KL_ESTIMATORS),
    ("dual clip", "k3"),
    ("trainer", "k1"),
    ("capped", "k2"),
    ("token-mean", "k3"),
  ],
)
def test_the_loss_equals_its_formula_however_packed(estimator, variant):
  config = dataclasses.replace(
    VARIANTS[variant], kl_estimator=estimator, kl_coefficient=0.1
  )
  rng = np.random.default_rng(0)
  step = ragged(rng, 24)
  expected, gradients = oracle_loss(step, config)

  # One trajectory per row.
  live = [m & v for m, v in zip(step.mask, step.valid)]
  weights = iter(
    grpo.token_weights(
      [m for m, v in zip(step.mask, step.valid) if v],
      reduction=config.reduction,
    )
  )
  weight = [next(weights) if v else 0 * m for m, v in zip(live, step.valid)]
  tokens = [
    *(padded(x, 12) for x in (step.logp, step.behaviour, step.reference)),
    np.repeat(np.float32(step.advantage)[:, None], 12, 1),
    *(padded(x, 12) for x in (weight, step.old)),
  ]

  def play(tokens):
    *tokens, old = tokens
    if config.old_logp == "engine":
      old = None
    return loss_and_gradient(*tokens, old_logp=old, config=config)

  (loss, whole), gradient = play(tokens)
  if variant == "dual clip":
    assert 0.02 < whole["importance_capped"] < 0.5
  np.testing.assert_allclose(loss, expected, rtol=1e-4, atol=1e-6)
  np.testing.assert_allclose(
    gradient, padded(gradients, 12), rtol=1e-4, atol=1e-7
  )

  # All tokens are shuffled into rows of 7, regardless of trajectories, and into
  # micro-batches that are summed; the last one is padded with weight 0.
  size = tokens[0].size
  order = rng.permutation(size)
  packed = [
    np.pad(x.reshape(-1)[order], (0, -size % 42)).reshape(-1, 6, 7)
    for x in tokens
  ]
  parts = [play([x[i] for x in packed]) for i in range(len(packed[0]))]
  np.testing.assert_allclose(
    sum(float(value) for (value, _), _ in parts), loss, rtol=1e-5, atol=1e-6
  )
  flat = np.concatenate([g.reshape(-1) for _, g in parts])[:size]
  np.testing.assert_allclose(
    flat, np.asarray(gradient).reshape(-1)[order], rtol=1e-6, atol=1e-9
  )
  metrics = [m for (_, m), _ in parts]
  for name, value in whole.items():
    total = (max if name.endswith("_max") else sum)(m[name] for m in metrics)
    np.testing.assert_allclose(total, value, rtol=1e-4, atol=1e-6, err_msg=name)


def test_stale_tokens_are_weighted_by_hand():
  # Rows: pi, pi_old and pi_behaviour of two tokens of weight 1/2 and a masked
  # one. The first token's importance, 4, is capped at 2; its ratio, 1.5, is
  # clipped.
  policy, old, behaviour = np.log(
    [[6.0, 0.5, 1.0], [4.0, 0.5, 9.0], [1.0, 1.0, 1.0]]
  ).astype(np.float32)
  advantage, weight = np.float32([[3, -3, 3], [0.5, 0.5, 0]])
  config = dataclasses.replace(TRAINER, importance_cap=2.0, kl_coefficient=0.5)
  (loss, metrics), gradient = loss_and_gradient(
    policy, behaviour, policy - 1, advantage, weight, old_logp=old,
    config=config,
  )  # fmt: skip
  policy_loss = 0.5 * (2 * -1.28 * 3 + 0.5 * 1 * 3)
  expected = {
    "policy_loss": policy_loss,
    "kl": math.exp(-1),
    "ratio": 1.25,
    "ratio_max": 1.5,
    "clip_fraction": 0.5,
    "clip_fraction_low": 0.0,
    "clip_fraction_high": 0.5,
    "importance": 0.5 * (2 + 0.5),
    "importance_capped": 0.5,
    "logp_difference": 0.5 * (math.log(6) + math.log(2)),
    "logp_difference_max": math.log(6),
    "logp_difference_counts": [
      2,
      *(sum(math.log(x) > edge for x in (6, 2)) for edge in grpo.GAP_EDGES),
    ],
    "behaviour_kl": 0.5 * (6 - math.log(6) - 1 + 0.5 + math.log(2) - 1),
  }
  expected = {name: np.array(value) for name, value in expected.items()}
  chex.assert_trees_all_close(metrics, expected, rtol=1e-5)
  chex.assert_type(list(metrics.values()), np.float32)
  np.testing.assert_allclose(loss, policy_loss + 0.5 * math.exp(-1), rtol=1e-5)
  # The importance does not weight the KL term, whose slope is 1 - 1/e.
  kl = 0.5 * 0.5 * (1 - math.exp(-1))
  np.testing.assert_allclose(
    gradient, [kl, 0.5 * 0.5 * 1 * 3 + kl, 0], rtol=1e-5
  )


def test_no_gradient_flows_into_old_and_behaviour_log_probs():
  rng = np.random.default_rng(9)
  logp, behaviour, old, ref, advantage = np.float32(
    rng.normal(-1, 0.3, (5, 30))
  )
  weight = np.full(30, 1 / 30, np.float32)

  def loss(behaviour, old):
    return grpo.grpo_loss(
      logp, behaviour, ref, advantage, weight, old_logp=old, config=TRAINER
    )[0]

  for gradient in jax.grad(loss, argnums=(0, 1))(behaviour, old):
    np.testing.assert_array_equal(gradient, np.zeros(30))


@pytest.mark.parametrize("garbage", [np.nan, np.inf, -1e30])
def test_masked_tokens_are_inert(garbage):
  config = TRAINER
  rng = np.random.default_rng(6)
  live = rng.random((3, 8)) < 0.5
  tokens = [np.float32(rng.normal(-1, 0.2, live.shape)) for _ in range(5)]
  weight = np.float32(live / live.sum())
  *clean, old = tokens
  expected = loss_and_gradient(*clean, weight, old_logp=old, config=config)
  *spoilt, old = [np.where(live, x, np.float32(garbage)) for x in tokens]
  actual = loss_and_gradient(*spoilt, weight, old_logp=old, config=config)
  chex.assert_trees_all_equal(actual, expected)
  chex.assert_tree_all_finite(actual)
  gradient = np.asarray(actual[1])
  np.testing.assert_array_equal(gradient[~live], 0)
  assert np.all(gradient[live] != 0)


def test_a_batch_of_zero_weight_has_zero_loss_and_gradient():
  token = np.full((2, 4), np.nan, np.float32)
  zero = np.zeros((2, 4), np.float32)
  (loss, metrics), gradient = loss_and_gradient(
    *[token] * 4, zero, old_logp=token, config=TRAINER
  )
  chex.assert_trees_all_equal(
    (loss, metrics, gradient),
    jax.tree.map(np.zeros_like, (loss, metrics, gradient)),
  )


# The terms and weights of single tokens.


class TokenTest(chex.TestCase):
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
        lambda x, y: grpo.kl_estimate(x, y, estimator=estimator)
      )
    )
    low, high = jnp.float32(math.log(0.25)), jnp.float32(math.log(0.5))
    np.testing.assert_allclose(
      [value_and_grad(high, low), value_and_grad(low, high)],
      [(above, slope_above), (below, slope_below)],
      rtol=1e-6,
    )
    np.testing.assert_allclose(value_and_grad(low, low)[0], 0, atol=1e-7)


@pytest.mark.parametrize("estimator", ["k3", "low_var_kl"])
def test_log_ratios_beyond_float32_s_exponent_are_clamped(estimator):
  """Without the clamp, k3 and the ratio would be inf from 88.8 on."""
  kl = functools.partial(grpo.kl_estimate, estimator=estimator)
  for log_ratio in (-1e4, -90.0, -21, -19, -9, 2.5, 2.7, 19.0, 21.0, 90.0, 1e4):
    logp, ref = jnp.float32(0), jnp.float32(log_ratio)
    both = (oracles.kl, oracles.kl_gradient)
    expected = [oracle(0.0, log_ratio, estimator) for oracle in both]
    found = jax.value_and_grad(kl)(logp, ref)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    for advantage in (-1.0, 1.0):

      def policy_loss(x, old, a=advantage):
        return grpo.token_terms(
          x, old, x, jnp.float32(a), config=CONFIG
        ).policy_loss

      both = (oracles.surrogate, oracles.surrogate_gradient)
      expected = [-oracle(log_ratio, 0.0, advantage, CONFIG) for oracle in both]
      found = jax.value_and_grad(policy_loss)(ref, logp)
      np.testing.assert_allclose(found, expected, rtol=1e-5)


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
    old = reference = jnp.float32(0)
    terms = grpo.token_terms(
      logp, old, reference, jnp.float32(advantage), config=CONFIG
    )
    return terms.policy_loss, terms

  # With an old log-probability of 0, log(ratio) keeps its full precision.
  (loss, terms), gradient = jax.value_and_grad(policy_loss, has_aux=True)(
    jnp.float32(math.log(ratio))
  )
  # The low side clips negative advantages, the high side positive ones.
  assert bool(terms.clipped_low) is (clipped and advantage < 0)
  assert bool(terms.clipped_high) is (clipped and advantage > 0)
  bound = 1.28 if advantage > 0 else 0.8
  slope, ratio = (0, bound) if clipped else (-ratio * advantage, ratio)
  np.testing.assert_allclose(gradient, slope, rtol=1e-6)
  np.testing.assert_allclose(loss, -ratio * advantage, rtol=1e-6)


def test_a_ratio_on_the_edge_keeps_its_gradient():
  config = dataclasses.replace(CONFIG, clip_low=0.0, clip_high=0.0)
  for advantage in (-1.0, 1.0):
    gradient = jax.grad(
      lambda x, a=advantage: (
        grpo.token_terms(
          x, jnp.float32(-1), jnp.float32(-1), jnp.float32(a), config=config
        ).policy_loss
      )
    )(jnp.float32(-1))
    assert gradient == -advantage


def test_unknown_names_and_other_shapes_are_refused():
  token = jnp.zeros((2, 3))
  with pytest.raises(ValueError, match="'k4', expected one of k1"):
    grpo.kl_estimate(token, token, estimator="k4")
  with pytest.raises(ValueError, match="'mean', expected one of sequence-mean"):
    grpo.token_weights([], reduction="mean")
  with pytest.raises(AssertionError):
    grpo.grpo_loss(token, token, token, jnp.zeros(2), token, config=CONFIG)
  with pytest.raises(AssertionError):
    grpo.kl_estimate(token, token[0], estimator="k1")


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
  weights = grpo.token_weights(masks, reduction=reduction)
  for weight, row in zip(weights, expected, strict=True):
    assert weight.dtype == np.float32
    np.testing.assert_array_equal(weight, np.float32(row))
