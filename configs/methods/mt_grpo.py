"""MT-GRPO; presets as in configs/methods/__init__.py.

python -m launch.train --config=configs/methods/mt_grpo.py
"""

from __future__ import annotations

import dataclasses

from anysearch_jax import config as config_lib
from configs import methods
from configs.methods import published


def _original(
  config: config_lib.ExperimentConfig,
) -> config_lib.ExperimentConfig:
  """Returns GRPO with one search, and two epochs on each rollout."""
  length = published.Length(
    rollouts=150, questions=16, group=21, updates=2, searches=1
  )
  made = published.grpo(config, length, rate=1e-6, warmup=0.0)
  return dataclasses.replace(
    made,
    curriculum=dataclasses.replace(made.curriculum, epochs=2),
    objective=dataclasses.replace(
      made.objective,
      kl_coefficient=0.0,
      entropy_coefficient=0.0,
      advantage_epsilon=1e-4,
    ),
    optimizer=dataclasses.replace(
      made.optimizer, b2=0.99, max_grad_norm=0.1, warmup_steps=20
    ),
    episode=dataclasses.replace(made.episode, top_k=1),
  )


def get_config(preset: str = "") -> config_lib.ExperimentConfig:
  return methods.experiment("mt_grpo", preset, original=_original)
