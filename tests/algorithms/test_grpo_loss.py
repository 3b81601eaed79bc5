"""Tests the GRPO loss of a step: its formula, packing and masking."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import NamedTuple

import chex
import jax
import numpy as np
import oracles
import pytest

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


def padded(rows, width, fill=0.0):
  out = np.full((len(rows), width), fill, np.float32)
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
    padded(step.logp, 12),
    padded(step.behaviour, 12),
    padded(step.reference, 12),
    np.repeat(np.float32(step.advantage)[:, None], 12, 1),
    padded(weight, 12),
    padded(step.old, 12),
  ]

  def play(tokens):
    *tokens, old = tokens
    if config.old_logp == "engine":
      old = None
    return loss_and_gradient(*tokens, old_logp=old, config=config)

  (loss, whole), gradient = play(tokens)
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
