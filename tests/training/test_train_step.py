"""Tests the train step against unpacked rows, and AdamW by its equations."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_policy

from anysearch_jax import config as config_lib
from anysearch_jax.policy import decoder
from anysearch_jax.training import batching, logprobs, optimizers, train_step

A = small_policy.architecture(vocab_size=23)
OBJECTIVE = config_lib.ObjectiveConfig(kl_coefficient=0.05)
TEMPERATURE = 0.8
PACKED = config_lib.BatchConfig(
  row_lengths=(8, 16), micro_batch_tokens=32, max_micro_batches=4
)
WIDE = config_lib.BatchConfig(
  row_lengths=(40,), micro_batch_tokens=40, max_micro_batches=6
)
KEEP = small_policy.KEEP
SIZES = (6, 16, 3, 9, 12, 17, 5, 8)
FAILED = 3  # Place of a trajectory that carries no weight.


def random_params(seed):
  return small_policy.noisy(decoder.initialize(A, 0), seed, 0.2)


@jax.jit
def score(params, sequences):
  """Returns log-probs and entropies `[B, T]` of `[B, T + 1]`, row by row."""
  tokens, targets = sequences[:, :-1], sequences[:, 1:]
  positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
  hidden = decoder.forward(params, A, tokens, positions, jnp.ones_like(tokens))
  logits = decoder.logits(params, hidden) / TEMPERATURE
  p = jnp.exp(logits) / jnp.sum(jnp.exp(logits), -1, keepdims=True)
  entropy = -jnp.sum(p * jnp.log(p), -1)
  logp = jnp.log(jnp.take_along_axis(p, targets[..., None], -1))
  return logp[..., 0], entropy


@pytest.fixture(scope="module")
def params():
  return random_params(1)


@pytest.fixture(scope="module")
def reference():
  return random_params(2)


@pytest.fixture(scope="module")
def trajectories(params):
  """Trajectories with masked tokens inside; one of them failed."""
  rng = np.random.default_rng(3)
  padded = rng.integers(0, A.vocab_size, (len(SIZES), max(SIZES)))
  logps = np.asarray(score(params, padded)[0])
  out = []
  for i, size in enumerate(SIZES):
    mask = rng.random(size) < 0.7
    mask[:2] = False, True
    if i == FAILED:
      mask[:] = False
    # Far enough off policy that some tokens are clipped on either side.
    behaviour = np.append(0.0, logps[i, : size - 1])
    behaviour += 0.3 * rng.normal(size=size)
    weights = mask / max(mask.sum(), 1) / (len(SIZES) - 1)
    out.append(
      batching.Example(
        token_ids=padded[i, :size].astype(np.int32),
        weights=weights.astype(np.float32),
        logps=(behaviour * mask).astype(np.float32),
        advantage=float(np.float32(rng.normal())),
      )
    )
  return out


@pytest.fixture(scope="module")
def expected(params, reference, trajectories):
  """Returns metrics and gradient of a step with one trajectory a row."""
  size = max(SIZES)

  def padded(name):
    values = [np.asarray(getattr(t, name)) for t in trajectories]
    return np.stack([np.pad(v, (0, size - len(v))) for v in values])

  tokens, weight = padded("token_ids"), padded("weights")[:, 1:]
  behaviour = padded("logps")[:, 1:]
  advantage = np.array([[t.advantage] for t in trajectories])
  reference_logp = np.asarray(score(reference, tokens)[0])

  def loss(params):
    logp, entropy = score(params, tokens)
    ratio = jnp.exp(logp - behaviour)
    clipped = jnp.clip(ratio, 1 - 0.2, 1 + 0.28)
    surrogate = jnp.minimum(ratio * advantage, clipped * advantage)
    kl = jnp.exp(reference_logp - logp) - (reference_logp - logp) - 1
    terms = jnp.sum(-weight * surrogate), jnp.sum(weight * kl)
    difference = jnp.where(weight > 0, jnp.abs(logp - behaviour), 0)
    auxiliary = (*terms, difference.max(), jnp.sum(weight * entropy))
    return terms[0] + 0.05 * terms[1], auxiliary

  (total, (policy, kl, difference, entropy)), grads = jax.jit(
    jax.value_and_grad(loss, has_aux=True)
  )(params)
  metrics = {
    "loss/total": total,
    "loss/policy_loss": policy,
    "loss/kl": kl,
    "loss/logp_difference_max": difference,
    "policy/entropy": entropy,
    "grad_norm": np.sqrt(sum((g**2).sum() for g in jax.tree.leaves(grads))),
    "finite": 1.0,
  }
  return metrics, grads


def make(*, tx=KEEP, **kwargs):
  loss = train_step.grpo_loss(A, OBJECTIVE, temperature=TEMPERATURE, **kwargs)
  return train_step.make(loss, tx)


@pytest.fixture(scope="module")
def step():
  return make()


def assert_expected(state, metrics, expected):
  values, grads = expected
  for name, value in values.items():
    np.testing.assert_allclose(metrics[name], value, rtol=1e-5, err_msg=name)
  # The order of sums differs; the tolerance is relative to the gradient's size.
  jax.tree.map(
    lambda found, g: np.testing.assert_allclose(
      found, g, rtol=0, atol=1e-5 * np.abs(g).max()
    ),
    state.opt_state.trace,
    grads,
  )
  assert all(np.abs(g).max() > 0 for g in jax.tree.leaves(grads))


def run(step, params, reference, examples, config=PACKED):
  batch = batching.pack(examples, config=config)
  return step(train_step.init(params, KEEP), reference, batch)


def test_packed_micro_batches_sum_to_one_row_a_trajectory(
  step, params, reference, trajectories, expected
):
  batch = batching.pack(trajectories, config=PACKED)
  assert min(rows.used for rows in batch) >= 1
  assert sum(rows.used for rows in batch) >= 3
  for examples in (trajectories, trajectories[::-1]):
    state, metrics = run(step, params, reference, examples)
    assert_expected(state, metrics, expected)
  assert metrics["loss/clip_fraction"] > 0
  np.testing.assert_allclose(  # The step's weights sum to one.
    sum(rows.weight.sum() for rows in batch), 1, rtol=1e-6
  )


@pytest.mark.slow
def test_another_packing_with_layers_recomputed_gives_the_same(
  params, reference, trajectories, expected
):
  step = make(compute=decoder.Compute(remat="full"))
  found = run(step, params, reference, trajectories, WIDE)
  assert_expected(*found, expected)


def test_values_on_masked_tokens_have_no_effect(
  step, params, reference, trajectories
):
  batch = batching.pack(trajectories, config=PACKED)
  changed = tuple(
    rows._replace(
      **{
        name: np.where(rows.weight > 0, getattr(rows, name), np.float32(np.nan))
        for name in ("behaviour_logp", "advantage")
      }
    )
    for rows in batch
  )
  assert any(
    np.isnan(new.advantage)[old.segment_ids > 0].any()
    for new, old in zip(changed, batch)
  )
  before, after = (
    step(train_step.init(params, KEEP), reference, b) for b in (batch, changed)
  )
  jax.tree.map(np.testing.assert_array_equal, after, before)


@pytest.mark.parametrize("field", ["logps", "advantage"])
def test_a_step_that_is_not_finite_changes_nothing(
  step, params, reference, trajectories, field
):
  state, _ = run(step, params, reference, trajectories)
  kept = jax.tree.map(np.array, state)
  assert any(x.any() for x in jax.tree.leaves(kept.opt_state))
  bad = {"logps": np.full(SIZES[0], np.nan, np.float32), "advantage": np.inf}[
    field
  ]
  first = trajectories[0]._replace(**{field: bad})
  # Nor does one without tokens, which is finite.
  for examples, finite in (([first, *trajectories[1:]], 0), ([], 1)):
    batch = batching.pack(examples, config=PACKED)
    state, metrics = step(state, reference, batch)
    jax.tree.map(np.testing.assert_array_equal, state, kept)
    assert metrics["finite"] == finite
  batch = batching.pack(trajectories, config=PACKED)
  state, metrics = step(state, reference, batch)
  assert (metrics["finite"], state.step) == (1, kept.step + 1)


@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_tokens_that_were_sampled_from_nan_train_nothing(
  params, reference, trajectories, value
):
  """With the trainer's own old log-probs the loss does not contain theirs."""
  objective = dataclasses.replace(OBJECTIVE, old_logp="trainer")
  loss = train_step.grpo_loss(A, objective, temperature=TEMPERATURE)
  step = train_step.make(loss, KEEP)
  logps = np.full(SIZES[0], value, np.float32)
  broken = trajectories[0]._replace(logps=logps)

  def packed(examples):
    rows = batching.pack(examples, config=PACKED)
    return tuple(
      x._replace(old_logp=np.full_like(x.old_logp, batching.OWN)) for x in rows
    )

  state = train_step.init(params, KEEP)
  kept = jax.tree.map(np.array, state)
  state, metrics = step(state, reference, packed([broken, *trajectories[1:]]))
  assert np.isfinite(metrics["loss/total"])
  assert metrics["finite"] == 0
  jax.tree.map(np.testing.assert_array_equal, state, kept)
  state, metrics = step(state, reference, packed(trajectories))
  assert (metrics["finite"], state.step) == (1, kept.step + 1)


def test_different_batches_are_one_trace_and_the_state_is_donated(
  step, params, reference, trajectories
):
  state = train_step.init(params, KEEP)
  for examples in (trajectories[:2], trajectories[3:4], []):
    old = state
    state, metrics = step(
      state, reference, batching.pack(examples, config=PACKED)
    )
    assert metrics["finite"] == 1
    assert all(x.is_deleted() for x in jax.tree.leaves(old))
  assert state.step == 2  # The last one has nothing to learn from.
  # All tests that use this step gave it different batches.
  assert step._cache_size() == 1
  # `init` copied the parameters, which other tests may still use.
  assert not any(x.is_deleted() for x in jax.tree.leaves((params, reference)))


def test_other_losses_of_a_micro_batch(params, trajectories):
  """Cross entropy, and GRPO with an entropy bonus and without a KL term."""
  rows = train_step.micro_batch(
    batching.pack(trajectories, config=PACKED)[0], 0
  )

  def grpo(params, coefficient):
    objective = dataclasses.replace(
      OBJECTIVE, kl_coefficient=0.0, entropy_coefficient=coefficient
    )
    loss = train_step.grpo_loss(A, objective, temperature=TEMPERATURE)
    return loss(params, None, rows)  # Without KL, no reference is needed.

  def bonus(params):
    return grpo(params, 0.0)[0] - grpo(params, 0.5)[0]

  def entropy(params):
    hidden = decoder.forward(
      params, A, rows.tokens, rows.positions, rows.segment_ids
    )
    logp = jax.nn.log_softmax(decoder.logits(params, hidden) / TEMPERATURE)
    return -jnp.sum(rows.weight[..., None] * jnp.exp(logp) * logp)

  @jax.jit
  def computed(params):
    return (
      grpo(params, 0.0),
      jax.value_and_grad(bonus)(params),
      jax.value_and_grad(entropy)(params),
      train_step.cross_entropy_loss(A)(params, None, rows),
      logprobs.token_logprobs(params, A, *rows.inputs)[0],
    )

  (loss, metrics), (half, d_half), (mean, d_mean), (nll, none), logp = computed(
    params
  )
  assert loss == metrics["loss/policy_loss"] != 0
  assert metrics["loss/kl"] == 0
  assert mean > 0.1
  np.testing.assert_allclose([2 * half, metrics["policy/entropy"]], mean, 1e-4)
  assert any(np.abs(g).max() > 1e-2 for g in jax.tree.leaves(d_mean))
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(2 * x, y, rtol=1e-3, atol=2e-5),
    d_half,
    d_mean,
  )
  expected = -np.sum(rows.weight * np.asarray(logp, np.float64))
  assert expected > 0.1 and none == {}
  np.testing.assert_allclose(nll, expected, rtol=1e-5)


# AdamW.

NOT_DECAYED = "attention_norm mlp_norm norm q_bias k_bias v_bias".split()
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
  ("max_norm", "decayed"),
  [
    (1.0, "matrices"),
    (1.0, "all"),
    pytest.param(0.0, "all", marks=[pytest.mark.slow]),
  ],
)
def test_adamw_matches_its_equations(params, max_norm, decayed):
  c = dataclasses.replace(OPTIMIZER, max_grad_norm=max_norm, decayed=decayed)
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
      kept = decayed == "matrices" and name in NOT_DECAYED
      decay = 0.0 if kept else 0.5 * p
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
