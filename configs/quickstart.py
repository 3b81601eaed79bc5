"""The whole method on a laptop: a tiny policy in the generated world.

Hardware: one CPU core, about 1 GB of memory. Time: four minutes a training, the
first also half a minute for its programs. `make quickstart` takes half the
steps.

    python -m launch.train --config=configs/quickstart.py:priced \
        --output=runs/quickstart/priced

Presets, `--config=configs/quickstart.py:<preset>`:
    priced       the one to train: advantages divided by the rollout's
                 deviation; a right answer earns .6 and loses .1 / B for each
                 search
    anysearch    as published; also without a preset
    no_tool      no tool reward
    search_r1    outcome reward, a fixed budget of 5, no scaffold
Expected: docs/quickstart.md has what each measures, beside exact agents.
To make the warm start in configs/graded_world_policy/ again:
    python -m research.warm_start --config=configs/quickstart.py
"""

from __future__ import annotations

import dataclasses

from anysearch_jax import config as config_lib
from anysearch_jax.config import settings
from anysearch_jax.configs import objectives

PRESETS = ("anysearch", "priced", "no_tool", "search_r1")


def get_config(preset: str = "anysearch") -> config_lib.ExperimentConfig:
  settings.require("preset", preset, PRESETS)
  config = _anysearch()
  reward = config.reward
  curriculum = config.curriculum
  match preset:
    case "anysearch":
      return config
    case "priced":
      config = objectives.priced(config)
      reward = config.reward
    case "no_tool":
      reward = dataclasses.replace(reward, gamma_mode="off")
    case "search_r1":
      reward = dataclasses.replace(
        reward, alpha=1.0, beta=0.0, delta=0.0, gamma_mode="off"
      )
      curriculum = dataclasses.replace(
        curriculum, max_budget=5, phase1_steps=0, fixed_budget=5
      )
  return dataclasses.replace(
    config, name=f"quickstart-{preset}", reward=reward, curriculum=curriculum
  )


def _anysearch() -> config_lib.ExperimentConfig:
  return config_lib.ExperimentConfig(
    name="quickstart",
    policy="configs/graded_world_policy",
    compute_dtype="float32",
    questions=16,
    group=5,
    save_every=40,
    # The lengths suit the world: an episode generates 20 to 120 tokens.
    reward=config_lib.RewardConfig(length_limit=200, length_tolerance=100),
    curriculum=config_lib.CurriculumConfig(
      max_budget=8, phase1_steps=120, total_steps=600, steps_per_rollout=5
    ),
    # The rate is higher than the paper's 1e-6, because the policy has 0.3 M
    # parameters, not 7 B. It falls in Phase II: docs/quickstart.md has what
    # other rates and numbers of steps give.
    optimizer=config_lib.OptimizerConfig(learning_rate=2e-4, decay=0.8),
    episode=config_lib.EpisodeConfig(
      prompts="world", max_generated=300, max_context=544
    ),
    engine=config_lib.EngineConfig(
      slots=80, max_context=544, page=8, prefill_chunk=16
    ),
    batch=config_lib.BatchConfig(
      row_lengths=(128, 192, 320, 576),
      micro_batch_tokens=640,
      max_micro_batches=48,
    ),
    # The policy is small enough to export in float32.
    checkpoint=config_lib.CheckpointConfig(export_dtype="float32"),
    evaluation=config_lib.EvaluationConfig(budgets=(0, 1, 2, 3, 5, 8)),
  )
