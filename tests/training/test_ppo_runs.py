"""Tests PPO in whole runs: learning, a mesh, a plan, resuming, refusals."""

from __future__ import annotations

import dataclasses
import json

import bandit
import jax
import numpy as np
import pytest
import small_run

from anysearch_jax import config as config_lib
from anysearch_jax.launch import flags as flags_lib
from anysearch_jax.launch import parts as parts_lib
from anysearch_jax.methods import systems
from anysearch_jax.planning import compilation, programs
from anysearch_jax.policy import hf
from anysearch_jax.training import learner, loop

A, CONFIG, PPO = bandit.A, bandit.CONFIG, bandit.PPO


@pytest.fixture(scope="module")
def params():
  return bandit.params()


def test_ppo_learns_a_bandit(params):
  rng = np.random.default_rng(1)
  trained = learner.Learner(CONFIG, hf.Policy(params, A, None))
  rewards, records = [], []
  for _ in range(60):
    episodes = bandit.play(trained.params(), rng)
    rewards.append(episodes[2].sum(-1))
    records += trained.steps(bandit.pack(episodes))
  before, after = np.concatenate(rewards[:5]), np.concatenate(rewards[-5:])
  noise = np.hypot(before.std(), after.std()) / np.sqrt(len(after))
  assert after.mean() - before.mean() > 8 * noise
  assert before.mean() < 0.3 and after.mean() > 0.9
  # A fresh critic knows nothing; while some questions are answered and others
  # are not, it learns which.
  explained = [r["value/explained_variance"] for r in records]
  assert explained[0] == 0 and max(explained) > 0.5
  assert all(r["finite"] == 1 for r in records)
  speed = trained.speed(bandit.pack(episodes), 1.0)
  assert [speed[f"compile/{n}"] for n in ("train_step", "values")] == [1, 1]


def test_a_plan_includes_the_critic_and_its_pass():
  config = dataclasses.replace(
    small_run.CONFIG, objective=PPO, mesh=config_lib.MeshConfig(fsdp=2)
  )
  a = dataclasses.replace(A, tied=False)
  found = programs.programs(config, a, devices=jax.devices())
  step, values = found[:2]
  assert (step.name, values.name) == ("train step", "value pass")
  kinds = compilation.kinds(step)
  # The policy without its head, sharded by fsdp, and a head of 16 numbers.
  assert kinds["critic"] == kinds["masters"] - 4 * 8 * 16 // 2 + 4 * 16


SMALL = dataclasses.replace(
  small_run.CONFIG,
  group=1,
  questions=8,
  objective=dataclasses.replace(PPO, kl_coefficient=0.01),
  critic=config_lib.CriticConfig(
    lam=0.95, learning_rate=1e-2, warmup_steps=3, alone_steps=2, reward_kl=0.01
  ),
)


@pytest.mark.slow
def test_a_killed_run_resumes_to_the_same_bits(tmp_path):
  parts = small_run.parts()
  whole, killed = tmp_path / "whole", tmp_path / "killed"
  small_run.train(whole, parts, SMALL)
  small_run.train(killed, parts, SMALL, rollouts=3)
  small_run.train(killed, parts, SMALL)
  small_run.assert_same_bits(whole, killed)
  steps = small_run.records(whole, "steps.jsonl")
  assert len(steps) == 8
  # While only the critic is trained, the policy does not change.
  stands = [abs(r["loss/kl"]) < 1e-12 for r in steps]
  assert stands == [True] * 3 + [False] * 5
  assert all(r["value/loss"] > 0 and r["value/grad_norm"] > 0 for r in steps)
  assert (whole / "checkpoints" / "4" / "critic").is_dir()
  moved = jax.tree.map(
    lambda x, y: float(np.abs(x - y).max()),
    hf.load(whole / "policy").params,
    parts["policy"].params,
  )
  assert min(jax.tree.leaves(moved)) > 0


@pytest.mark.slow
def test_it_raises_the_reward_of_the_world_beyond_noise(tmp_path):
  config = flags_lib.override(
    flags_lib.load_config("configs/methods.py:search_r1_ppo"),
    [
      *("curriculum.steps_per_rollout=2", "curriculum.total_steps=32"),
      *("optimizer.learning_rate=4e-4", "critic.learning_rate=4e-3"),
      # One shape, compiled once.
      "batch.row_lengths=576,",
      "batch.micro_batch_tokens=2304",
    ],
  )
  source = parts_lib.source(config)
  loop.Trainer(
    config,
    method=systems.trained(config),
    folder=tmp_path,
    policy=hf.load(config.policy),
    questions=source.questions("train", 512, config.seed),
    retriever=source.retriever,
  ).run()
  rewards = [
    json.loads(line)["reward/total"]
    for line in (tmp_path / "metrics.jsonl").open()
  ]
  assert len(rewards) == 16
  before, after = rewards[:5], rewards[-5:]
  noise = np.sqrt((np.var(before, ddof=1) + np.var(after, ddof=1)) / 5)
  assert np.mean(after) - np.mean(before) > 3 * noise
