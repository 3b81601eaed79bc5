"""The optimizer against its equations."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_policy

from anysearch_jax import config as config_lib
from anysearch_jax.policy import decoder
from anysearch_jax.training import batching, optimizers, train_step

A = small_policy.architecture(vocab_size=23)
PACKED = config_lib.BatchConfig(
  row_lengths=(8, 16), micro_batch_tokens=32, max_micro_batches=4
)

KEEP = small_policy.KEEP


def random_params(seed):
  return small_policy.noisy(decoder.initialize(A, 0), seed, 0.2)


@pytest.fixture(scope="module")
def params():
  return random_params(1)


NOT_DECAYED = {
  "attention_norm",
  "mlp_norm",
  "norm",
  "q_bias",
  "k_bias",
  "v_bias",
}
OPTIMIZER = config_lib.OptimizerConfig(learning_rate=0.01, weight_decay=0.5)


def linear_loss(params, gradient, rows):
  """Returns a loss whose gradient is `gradient` for every batch."""
  del rows
  terms = jax.tree.map(lambda p, g: jnp.sum(p * g), params, gradient)
  return sum(jax.tree.leaves(terms)), {}


def one_micro_batch():
  example = batching.Example(
    np.zeros(4, np.int32), np.ones(4, np.float32), np.zeros(4, np.float32)
  )
  batch = batching.pack([example], config=PACKED)
  assert [int(rows.used) for rows in batch] == [1, 0]
  return batch


def named(tree):
  """Returns (last key, float64 array) of all leaves, in a fixed order."""
  return [
    (path[-1].key, np.array(leaf, np.float64))
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
  ]


@pytest.mark.parametrize(
  "max_norm", [1.0, pytest.param(0.0, marks=pytest.mark.slow)]
)
def test_adamw_matches_its_equations(params, max_norm):
  c = dataclasses.replace(OPTIMIZER, max_grad_norm=max_norm)
  # The rate depends on the step, to test that the schedule counts from 0.
  tx = optimizers.adamw(A, c, schedule=lambda step: 0.01 * (1 + step))
  step = train_step.make(linear_loss, tx)
  state = train_step.init(params, tx)
  expected = named(params)
  m = [np.zeros_like(p) for _, p in expected]
  v = [np.zeros_like(p) for _, p in expected]
  for t, scale in enumerate((10.0, 1e-3, 1.0), start=1):
    gradient = jax.tree.map(
      lambda p, s=scale: s * jnp.sin(100 * p), random_params(t)
    )
    g = [leaf for _, leaf in named(gradient)]
    norm = np.sqrt(sum((x**2).sum() for x in g))
    clip = min(1.0, max_norm / norm) if max_norm else 1.0
    state, metrics = step(state, gradient, one_micro_batch())
    np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=1e-5)
    for i, (name, p) in enumerate(expected):
      m[i] = 0.9 * m[i] + 0.1 * clip * g[i]
      v[i] = 0.98 * v[i] + 0.02 * (clip * g[i]) ** 2
      update = m[i] / (1 - 0.9**t) / (np.sqrt(v[i] / (1 - 0.98**t)) + 1e-8)
      decay = 0.0 if name in NOT_DECAYED else 0.5 * p
      expected[i] = name, p - 0.01 * t * (update + decay)
    for (name, found), (_, p) in zip(named(state.params), expected):
      np.testing.assert_allclose(found, p, rtol=1e-5, atol=2e-6, err_msg=name)


@pytest.mark.parametrize(
  ("warmup", "decay", "rates"),
  [
    (0, 4, (1, 1, 1, 3 / 4, 2 / 4, 1 / 4)),
    (2, 2, (1 / 2, 1, 1, 1, 1, 1 / 2)),
    # The lower of the two.
    (4, 6, (1 / 4, 1 / 2, 2 / 3, 1 / 2, 1 / 3, 1 / 6)),
  ],
)
def test_the_learning_rate_rises_and_falls_linearly(warmup, decay, rates):
  found = optimizers.learning_rate(0.25, warmup, decay, 6)
  np.testing.assert_allclose(
    [found(step) for step in range(6)], 0.25 * np.array(rates), rtol=1e-6
  )


def test_without_warmup_and_decay_the_rate_is_a_number():
  assert optimizers.learning_rate(0.25, 0, 0, 6) == 0.25


def test_a_non_finite_gradient_of_a_finite_loss_is_found(params):
  def loss_fn(params, reference, rows):
    del reference, rows
    # The root's derivative at 0 is infinite, and infinity times 0 is NaN.
    return jnp.sqrt(jnp.sum(0 * params["norm"])), {}

  state = train_step.init(params, KEEP)
  state, metrics = train_step.make(loss_fn, KEEP)(
    state, None, one_micro_batch()
  )
  assert (metrics["loss/total"], metrics["finite"], state.step) == (0, 0, 0)
  jax.tree.map(np.testing.assert_array_equal, state.params, params)
