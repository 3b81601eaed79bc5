"""Tests PPO's estimates, and its step against GRPO's."""

from __future__ import annotations

import dataclasses

import bandit
import jax
import numpy as np
import optax
import pytest
import small_policy

from anysearch_jax import config as config_lib
from anysearch_jax.training import optimizers, ppo, train_step

A, CONFIG, PPO = bandit.A, bandit.CONFIG, bandit.PPO
KEEP = small_policy.KEEP


@pytest.fixture(scope="module")
def params():
  return bandit.params()


def scored(params, tokens):
  logp = np.asarray(bandit.next_logp(params, tokens), np.float64)[:, :-1]
  return np.take_along_axis(logp, tokens[:, 1:, None], -1)[..., 0]


def of_tokens(batches, name):
  """Returns an array's values at model tokens, keyed by (previous id, id)."""
  found = {}
  for rows in (rows for batch in batches for rows in batch):
    live = np.asarray(rows.weight) > 0
    keys = zip(*(np.asarray(x)[live] for x in (rows.tokens, rows.targets)))
    for key, value in zip(keys, np.asarray(getattr(rows, name))[live]):
      found.setdefault(tuple(map(int, key)), []).append(float(value))
  return {key: sorted(values) for key, values in found.items()}


def test_estimates_equal_their_formulas(params):
  """Compares values, KL penalty, GAE and whitening with float64 formulas."""
  rng = np.random.default_rng(2)
  tokens, logps, rewards = bandit.play(params, rng)
  reference = jax.tree.map(lambda p: 0.9 * p, params)
  critic = ppo.initialize(params, A)
  critic["value"] = rng.normal(size=A.d_model).astype(np.float32)
  state = train_step.init(params, optimizers.Pair(KEEP, KEEP), critic=critic)
  c = config_lib.CriticConfig(gamma=0.9, lam=0.8, reward_kl=0.3)
  estimate = ppo.Estimator(A, c, temperature=1.0)
  batches = bandit.pack((tokens, logps, rewards))
  found = estimate(state, reference, batches)

  positions = np.broadcast_to(np.arange(4), tokens.shape)
  values = np.asarray(
    ppo.values(critic, None, A, tokens, positions, tokens * 0 + 1)
  ).astype(float)
  penalty = 0.3 * (logps[:, 1:] - scored(reference, tokens))
  reward = (rewards[:, 1:] - penalty)[:, [0, 2]]
  value = values[:, [0, 2]]  # The states before each of the two words.
  last = reward[:, 1] - value[:, 1]
  first = reward[:, 0] + 0.9 * value[:, 1] - value[:, 0] + 0.9 * 0.8 * last
  advantage = np.stack([first, last], 1)
  white = (advantage - advantage.mean()) / advantage.std()
  for name, array in (
    ("advantage", white),
    ("old_value", value),
    ("returns", advantage + value),
  ):
    expected = {}
    for row, of_row in zip(tokens, array):
      for place, x in zip((1, 3), of_row):
        expected.setdefault((row[place - 1], row[place]), []).append(x)
    mine = of_tokens(found, name)
    assert mine.keys() == expected.keys()
    for key, theirs in expected.items():
      np.testing.assert_allclose(
        mine[key], sorted(theirs), atol=2e-4, err_msg=name
      )
  assert all(rows.reward is None for batch in found for rows in batch)


def one_step(params, batch, tx, config, critic=None):
  loss = train_step.grpo_loss(A, config, temperature=1.0)
  if critic is not None:
    loss = ppo.with_critic(loss, A, CONFIG.critic)
  state = train_step.init(params, tx, critic=critic)
  return train_step.make(loss, tx)(state, None, batch)


def test_with_equal_advantages_ppo_and_grpo_take_the_same_step(params):
  (batch,) = bandit.pack(bandit.play(params, np.random.default_rng(3)), steps=1)
  advantage = np.random.default_rng(4).normal(size=batch[0].weight.shape)
  batch = tuple(
    rows._replace(reward=None, advantage=np.float32(advantage))
    for rows in batch
  )
  valued = tuple(
    rows._replace(old_value=rows.advantage, returns=rows.advantage)
    for rows in batch
  )
  group = dataclasses.replace(PPO, advantage="group")
  grpo, expected = one_step(params, batch, KEEP, group)
  both, found = one_step(
    params, valued, optimizers.Pair(KEEP, KEEP), PPO, ppo.initialize(params, A)
  )
  np.testing.assert_allclose(expected["loss/ratio"], 1, atol=1e-5)
  for name in ("loss/policy_loss", "loss/ratio", "grad_norm"):
    np.testing.assert_allclose(found[name], expected[name], rtol=1e-6)
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-8),
    both.opt_state.policy.trace,
    grpo.opt_state.trace,
  )
  assert optax.tree.norm(both.opt_state.critic.trace) > 0


def test_with_a_new_critic_every_advantage_is_the_episodes_reward(params):
  """At gamma = lambda = 1 this is REINFORCE, GRPO without its baseline."""
  episodes = bandit.play(params, np.random.default_rng(5))
  state = train_step.init(
    params, optimizers.Pair(KEEP, KEEP), critic=ppo.initialize(params, A)
  )
  c = config_lib.CriticConfig(whiten=False)
  batches = bandit.pack(episodes)
  found = ppo.Estimator(A, c, temperature=1.0)(state, None, batches)
  for packed, batch in zip(batches, found):
    for before, rows in zip(packed, batch):
      live, ids = before.weight > 0, before.segment_ids
      for segment in range(1, ids.max() + 1):
        here = ids == segment
        total = (before.reward * here).sum(-1, keepdims=True)
        np.testing.assert_array_equal(
          np.where(live & here, rows.advantage, 0), total * (live & here)
        )
  assert sum(rows.reward.sum() for batch in batches for rows in batch) > 0


def test_the_critic_learns_alone_first_and_at_its_own_rate(params):
  c = config_lib.CriticConfig(learning_rate=0.5, warmup_steps=2, alone_steps=2)
  o = config_lib.OptimizerConfig(
    learning_rate=0.25, warmup_steps=4, weight_decay=0.0, eps=1e-12
  )
  tx = optimizers.adamw(A, o, critic=c)
  trained = params, ppo.initialize(params, A)
  state = tx.init(trained)
  # Each is clipped by its own norm.
  grads = (
    jax.tree.map(lambda x: 0 * x + 1e-4, trained[0]),
    jax.tree.map(lambda x: 0 * x + 1e4, trained[1]),
  )
  update = jax.jit(tx.update)
  # With constant gradients Adam's update equals the rate, whatever the clip.
  for step, (of_policy, of_critic) in enumerate(
    ((0, 0.25), (0, 0.5), (0.0625, 0.5), (0.125, 0.5), (0.1875, 0.5))
  ):
    before = state
    updates, state = update(grads, state, trained)
    for part, rate in zip(updates, (of_policy, of_critic)):
      for x in jax.tree.leaves(part):
        np.testing.assert_allclose(x, -rate, rtol=1e-4)
    if not of_policy:
      jax.tree.map(np.testing.assert_array_equal, state.policy, before.policy)
    # The first moment is a tenth of the clipped gradient after one step.
    if step in (0, 2):
      clipped = state.critic if step == 0 else state.policy
      norm = 10 * optax.tree.norm(optax.tree_utils.tree_get(clipped, "mu"))
      expected = 1 if step == 0 else optax.tree.norm(grads[0])
      np.testing.assert_allclose(norm, expected, rtol=1e-4)
