"""Tests PPO in the generated world, with the configuration of a study."""

from __future__ import annotations

import json

import numpy as np
import pytest

from anysearch_jax.policy import hf
from anysearch_jax.training import loop, validation
from launch import flags as launch_flags
from launch import parts

_ROLLOUTS, _MEASURED = 16, 5


@pytest.mark.slow
def test_ppo_raises_the_reward_of_the_world_beyond_noise(tmp_path):
  config = launch_flags.override(
    launch_flags.load_config("configs/methods.py:search_r1_ppo"),
    [
      "curriculum.steps_per_rollout=2",
      f"curriculum.total_steps={2 * _ROLLOUTS}",
      "optimizer.learning_rate=4e-4",
      "critic.learning_rate=4e-3",
      # One shape, compiled once.
      "batch.row_lengths=576,",
      "batch.micro_batch_tokens=2304",
    ],
  )
  validation.validate(config)
  source = parts.source(config)
  loop.Trainer(
    config,
    folder=tmp_path,
    policy=hf.load(config.policy),
    questions=source.questions("train", 512, config.seed),
    retriever=source.retriever,
  ).run()
  rewards = [
    json.loads(line)["reward/total"]
    for line in (tmp_path / "metrics.jsonl").open()
  ]
  assert len(rewards) == _ROLLOUTS
  before, after = rewards[:_MEASURED], rewards[-_MEASURED:]
  noise = np.sqrt((np.var(before, ddof=1) + np.var(after, ddof=1)) / _MEASURED)
  assert np.mean(after) - np.mean(before) > 3 * noise
