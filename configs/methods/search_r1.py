"""Search-R1 with GRPO; presets as in configs/methods/__init__.py.

The original recipe trains by PPO.

python -m launch.train --config=configs/methods/search_r1.py
"""

from __future__ import annotations

from anysearch_jax import config as config_lib
from configs import methods
from configs.methods import published


def original(
  config: config_lib.ExperimentConfig,
) -> config_lib.ExperimentConfig:
  """Returns Search-R1's PPO, which is also its recipe with GRPO's file."""
  length = published.Length(
    rollouts=1005, questions=512, group=1, updates=2, searches=4
  )
  return published.ppo(
    config,
    length,
    rate=1e-6,
    warmup=0.285,
    critic_rate=1e-5,
    critic_warmup=0.015,
  )


def get_config(preset: str = "") -> config_lib.ExperimentConfig:
  return methods.experiment("search_r1", preset, original=original)
