"""PPO: its step beside GRPO's, its estimates, learning, resuming."""

from __future__ import annotations

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import small_run

from anysearch_jax import config as config_lib
from anysearch_jax import objective, objective_ppo
from anysearch_jax.planning import flops, memory, programs
from anysearch_jax.policy import architecture as architecture_lib
from anysearch_jax.policy import critic as critic_lib
from anysearch_jax.policy import hf, transformer
from anysearch_jax.training import (
  batching,
  learner,
  ppo,
  throughput,
  train_step,
  validation,
)

A = architecture_lib.Architecture(
  "qwen2",
  vocab_size=8,
  d_model=16,
  layers=1,
  heads=2,
  kv_heads=1,
  head_dim=8,
  mlp_dim=24,
  qkv_bias=True,
)
PPO = config_lib.ObjectiveConfig(advantage="gae", kl_coefficient=0.0)
CONFIG = config_lib.ExperimentConfig(
  compute_dtype="float32",
  curriculum=config_lib.CurriculumConfig(steps_per_rollout=2),
  objective=PPO,
  optimizer=config_lib.OptimizerConfig(learning_rate=0.01, weight_decay=0.0),
  critic=config_lib.CriticConfig(learning_rate=0.02),
  batch=config_lib.BatchConfig(
    row_lengths=(8,), micro_batch_tokens=128, max_micro_batches=2
  ),
)
KEEP = optax.trace(0.0)


@pytest.fixture(scope="module")
def params():
  rng = np.random.default_rng(0)
  return jax.tree.map(
    lambda p: np.float32(p + 0.1 * rng.normal(size=p.shape)),
    transformer.initialize(A, 0),
  )


# A question c asks for the word 4 + c, after any word and a fixed observation.
QUESTIONS, OBSERVATION, EPISODES = 4, 3, 64
MODEL = np.array([False, True, False, True])


@jax.jit
def next_logp(params, tokens):
  positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
  hidden = transformer.forward(
    params, A, tokens, positions, jnp.ones_like(tokens)
  )
  return jax.nn.log_softmax(transformer.logits(params, hidden))


def play(params, rng):
  """Episodes of two turns by the policy: tokens, log-probs, rewards."""
  tokens = np.zeros((EPISODES, 4), np.int32)
  tokens[:, 0] = np.arange(EPISODES) % QUESTIONS
  logps = np.zeros(tokens.shape, np.float32)
  tokens[:, 2] = OBSERVATION
  for place in np.flatnonzero(MODEL):
    logp = np.asarray(next_logp(params, tokens))[:, place - 1]
    tokens[:, place] = np.argmax(logp + rng.gumbel(size=logp.shape), -1)
    logps[:, place] = np.take_along_axis(logp, tokens[:, [place]], -1)[:, 0]
  rewards = np.zeros(tokens.shape, np.float32)
  rewards[:, 3] = tokens[:, 3] == 4 + tokens[:, 0]
  return tokens, logps, rewards


def pack(episodes, steps=2):
  """The batches of a rollout."""
  per_step = EPISODES // steps
  weights = objective.token_weights(
    [MODEL] * per_step, reduction="sequence-mean"
  )
  examples = [
    batching.Example(tokens, weights[0], logps, rewards=rewards)
    for tokens, logps, rewards in zip(*episodes)
  ]
  return [
    batching.pack(examples[i : i + per_step], config=CONFIG.batch, rewards=True)
    for i in range(0, EPISODES, per_step)
  ]


def test_ppo_learns_a_bandit(params):
  rng = np.random.default_rng(1)
  trained = learner.Learner(CONFIG, hf.Policy(params, A, None))
  rewards, records = [], []
  for _ in range(60):
    episodes = play(trained.params(), rng)
    rewards.append(episodes[2].sum(-1))
    records += trained.steps(pack(episodes))
  before, after = np.concatenate(rewards[:5]), np.concatenate(rewards[-5:])
  noise = np.hypot(before.std(), after.std()) / np.sqrt(len(after))
  assert after.mean() - before.mean() > 8 * noise
  assert before.mean() < 0.3 and after.mean() > 0.9
  # A fresh critic knows nothing; while some questions are answered and others
  # are not, it learns which.
  explained = [r["value/explained_variance"] for r in records]
  assert explained[0] == 0 and max(explained) > 0.5
  assert all(r["finite"] == 1 for r in records)
  speed = trained.speed(pack(episodes), 1.0)
  assert [speed[f"compile/{n}"] for n in ("train_step", "values")] == [1, 1]


def scored(params, tokens):
  logp = np.asarray(next_logp(params, tokens), np.float64)[:, :-1]
  return np.take_along_axis(logp, tokens[:, 1:, None], -1)[..., 0]


def of_tokens(batches, name):
  """An array of the packed model tokens by the token before them."""
  found = {}
  for rows in (rows for batch in batches for rows in batch):
    live = np.asarray(rows.weight) > 0
    keys = zip(*(np.asarray(x)[live] for x in (rows.tokens, rows.targets)))
    for key, value in zip(keys, np.asarray(getattr(rows, name))[live]):
      found.setdefault(tuple(map(int, key)), []).append(float(value))
  return {key: sorted(values) for key, values in found.items()}


def test_estimates_are_those_of_the_page(params):
  """Values, the KL penalty in the reward, GAE and whitening, in float64."""
  rng = np.random.default_rng(2)
  tokens, logps, rewards = play(params, rng)
  reference = jax.tree.map(lambda p: 0.9 * p, params)
  critic = critic_lib.initialize(params, A)
  critic["value"] = rng.normal(size=A.d_model).astype(np.float32)
  state = train_step.init(params, train_step.Pair(KEEP, KEEP), critic=critic)
  c = config_lib.CriticConfig(gamma=0.9, lam=0.8, reward_kl=0.3)
  estimate = ppo.Estimator(A, c, temperature=1.0)
  batches = pack((tokens, logps, rewards))
  found = estimate(state, reference, batches)

  positions = np.broadcast_to(np.arange(4), tokens.shape)
  values = np.asarray(
    critic_lib.values(critic, None, A, tokens, positions, tokens * 0 + 1)
  ).astype(float)
  penalty = 0.3 * (logps[:, 1:] - scored(reference, tokens))
  reward = (rewards[:, 1:] - penalty)[:, [0, 2]]
  value = values[:, [0, 2]]  # Of the state before each of the two words.
  last = reward[:, 1] - value[:, 1]
  first = reward[:, 0] + 0.9 * value[:, 1] - value[:, 0] + 0.9 * 0.8 * last
  advantage = np.stack([first, last], 1)
  white = (advantage - advantage.mean()) / advantage.std()
  expected = {}
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


def test_ppo_and_grpo_take_the_same_step_by_the_same_advantages(params):
  (batch,) = pack(play(params, np.random.default_rng(3)), steps=1)
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
    params,
    valued,
    train_step.Pair(KEEP, KEEP),
    PPO,
    critic_lib.initialize(params, A),
  )
  np.testing.assert_allclose(expected["loss/ratio"], 1, atol=1e-5)
  for name in ("loss/policy_loss", "loss/ratio", "grad_norm"):
    np.testing.assert_allclose(found[name], expected[name], rtol=1e-6)
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-8),
    both.opt_state.policy.trace,
    grpo.opt_state.trace,
  )
  assert optax.global_norm(both.opt_state.critic.trace) > 0


def test_without_a_spread_of_rewards_neither_has_an_advantage():
  rewards = np.full((3, 4), 0.7, np.float32)
  group = objective.advantages(
    rewards, np.ones((3, 4), bool), epsilon=1e-6, normalize_std=True
  )
  # A fresh critic, one token an episode: every advantage is the reward.
  mask, segments = np.ones((12, 1), bool), np.ones((12, 1), np.int32)
  estimated, _ = objective_ppo.gae(
    rewards.reshape(12, 1), 0 * mask.astype(np.float32), mask, segments,
    gamma=1.0, lam=0.95,
  )  # fmt: skip
  np.testing.assert_array_equal(group, np.zeros((3, 4)))
  np.testing.assert_array_equal(
    objective_ppo.whiten(estimated, mask), np.zeros((12, 1))
  )


def test_a_fresh_critic_hands_the_outcome_to_every_token(params):
  """At gamma = lambda = 1: REINFORCE, what GRPO is without its baseline."""
  episodes = play(params, np.random.default_rng(5))
  state = train_step.init(
    params,
    train_step.Pair(KEEP, KEEP),
    critic=critic_lib.initialize(params, A),
  )
  c = config_lib.CriticConfig(whiten=False)
  batches = pack(episodes)
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


def test_the_critic_learns_alone_at_first_and_each_at_its_own_rate(params):
  c = config_lib.CriticConfig(learning_rate=0.5, warmup_steps=2, alone_steps=2)
  o = config_lib.OptimizerConfig(
    learning_rate=0.25, warmup_steps=4, weight_decay=0.0, eps=1e-12
  )
  tx = train_step.optimizer(A, o, critic=c)
  trained = params, critic_lib.initialize(params, A)
  state = tx.init(trained)
  grads = jax.tree.map(np.ones_like, trained)
  update = jax.jit(tx.update)
  # Of equal gradients Adam's update is the rate; the clip takes no part in it.
  for of_policy, of_critic in (
    (0, 0.25),
    (0, 0.5),
    (0.0625, 0.5),
    (0.125, 0.5),
    (0.1875, 0.5),
  ):
    before = state
    updates, state = update(grads, state, trained)
    for part, rate in zip(updates, (of_policy, of_critic)):
      for x in jax.tree.leaves(part):
        np.testing.assert_allclose(x, -rate, rtol=1e-5)
    if not of_policy:
      jax.tree.map(np.testing.assert_array_equal, state.policy, before.policy)


def test_each_gradient_is_clipped_by_its_own_norm(params):
  o = config_lib.OptimizerConfig(max_grad_norm=1.0)
  tx = train_step.optimizer(A, o, critic=config_lib.CriticConfig())
  trained = params, critic_lib.initialize(params, A)
  small = jax.tree.map(lambda x: 0 * x + 1e-4, trained[0])
  huge = jax.tree.map(lambda x: 0 * x + 1e4, trained[1])
  _, state = jax.jit(tx.update)((small, huge), tx.init(trained), trained)
  # The first moments are a tenth of the clipped gradients.
  of_policy, of_critic = (
    10 * optax.global_norm(optax.tree_utils.tree_get(s, "mu"))
    for s in (state.policy, state.critic)
  )
  np.testing.assert_allclose(of_policy, optax.global_norm(small), rtol=1e-4)
  np.testing.assert_allclose(of_critic, 1, rtol=1e-4)


def test_a_mesh_trains_as_one_device_does(params):
  """Passes, estimates and steps of a rollout."""
  made = []
  a = dataclasses.replace(A, kv_heads=2)
  start = transformer.initialize(a, 1)
  episodes = play(params, np.random.default_rng(6))
  config = dataclasses.replace(
    CONFIG,
    critic=dataclasses.replace(CONFIG.critic, reward_kl=0.1, lam=0.9),
    optimizer=dataclasses.replace(CONFIG.optimizer, learning_rate=1e-3),
  )
  for mesh in (
    config_lib.MeshConfig(),
    config_lib.MeshConfig(data=2, fsdp=2, tensor=2, sequence_parallel=True),
  ):
    trained = learner.Learner(
      dataclasses.replace(config, mesh=mesh), hf.Policy(start, a, None)
    )
    batches = pack(episodes)
    assert batches[0][0].tokens.shape[1] % trained.placement.row_multiple == 0
    made.append(list(trained.steps(batches)))
    speed = trained.speed(batches, 1.0)
    assert speed["compile/train_step"] == speed["compile/values"] == 1
  for one, cut in zip(*made, strict=True):
    assert one["value/loss"] > 0
    for name, value in one.items():
      np.testing.assert_allclose(
        cut[name], value, rtol=2e-4, atol=1e-5, err_msg=name
      )


def test_a_plan_has_the_critic_and_its_pass():
  config = dataclasses.replace(
    small_run.CONFIG, objective=PPO, mesh=config_lib.MeshConfig(fsdp=2)
  )
  a = dataclasses.replace(A, tied=False)
  found = programs.programs(config, a, devices=jax.devices(), micro_batches=1)
  step, values = found[:2]
  assert (step.name, values.name) == ("train step", "value pass")
  kinds = memory.kinds(step)
  # All of the policy but its head, which fsdp cuts, and a head of 16 numbers.
  assert kinds["critic"] == kinds["masters"] - 4 * 8 * 16 // 2 + 4 * 16
  assert memory.gradients(kinds) == kinds["critic"] + kinds["masters"]
  tokens = step.tokens
  # Every score is computed, also those that are masked.
  work = throughput.Work(tokens, tokens, pairs=tokens * 128)
  counted = sum(
    flops.count(p.fn.trace(*p.args).jaxpr, trips=p.trips) for p in found[:2]
  )
  # Backwards the head's logits are computed again.
  again = 2 * tokens * 8 * 16
  assert counted == throughput.model_flops(a, work, critic=True) + again


SMALL = dataclasses.replace(
  small_run.CONFIG,
  group=1,
  questions=8,
  objective=dataclasses.replace(PPO, kl_coefficient=0.01),
  critic=config_lib.CriticConfig(
    lam=0.95, learning_rate=1e-2, warmup_steps=3, alone_steps=2, reward_kl=0.01
  ),
)


def records(folder):
  """What a run wrote, less what the clock says and what was compiled."""
  passing = ("time/", "compile/", "train/tokens_per_second")
  return [
    {k: v for k, v in json.loads(x).items() if not k.startswith(passing)}
    for name in ("metrics.jsonl", "steps.jsonl")
    for x in (folder / name).open()
  ]


def test_a_killed_run_resumes_to_the_same_bits(tmp_path):
  parts = small_run.parts()
  whole, killed = tmp_path / "whole", tmp_path / "killed"
  small_run.train(whole, parts, SMALL)
  small_run.train(killed, parts, SMALL, rollouts=3)
  small_run.train(killed, parts, SMALL)
  assert records(whole) == records(killed)
  ours, theirs = (hf.load(f / "policy").params for f in (whole, killed))
  jax.tree.map(np.testing.assert_array_equal, ours, theirs)
  steps = [r for r in records(whole) if "rollout/searches" not in r]
  assert len(steps) == 8
  # While the critic learns alone the policy stands still.
  stands = [abs(r["loss/kl"]) < 1e-12 for r in steps]
  assert stands == [True] * 3 + [False] * 5
  assert all(r["value/loss"] > 0 and r["value/grad_norm"] > 0 for r in steps)
  assert (whole / "checkpoints" / "4" / "critic").is_dir()
  moved = jax.tree.map(
    lambda x, y: float(np.abs(x - y).max()), ours, parts["policy"].params
  )
  assert min(jax.tree.leaves(moved)) > 0


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    (
      {"objective": dataclasses.replace(PPO, advantage="rloo")},
      "objective.advantage: found 'rloo', expected one of group, gae.",
    ),
    ({"critic": config_lib.CriticConfig(lam=1.1)}, "critic.lam: found 1.1"),
    ({"critic": config_lib.CriticConfig(gamma=-1)}, "critic.gamma: found -1"),
    (
      {"critic": config_lib.CriticConfig(alone_steps=8)},
      "critic.alone_steps: found 8, expected below curriculum.total_steps, 8",
    ),
    (
      {
        "group": 2,
        "objective": config_lib.ObjectiveConfig(),
        "critic": config_lib.CriticConfig(reward_kl=0.1),
      },
      "critic.reward_kl: found 0.1 with objective.advantage 'group'",
    ),
    (
      {
        "objective": config_lib.ObjectiveConfig(),
        "critic": config_lib.CriticConfig(),
      },
      "group: found 1, expected at least 2",
    ),
  ],
)
def test_what_cannot_run_is_refused(changes, message):
  validation.validate(SMALL)
  with pytest.raises(ValueError, match=message):
    validation.validate(dataclasses.replace(SMALL, **changes))
