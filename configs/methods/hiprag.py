"""HiPRAG; presets as in configs/methods/__init__.py.

python -m launch.train --config=configs/methods/hiprag.py
"""

from __future__ import annotations

from anysearch_jax import config as config_lib
from configs import methods
from configs.methods import published


def _original(
  config: config_lib.ExperimentConfig,
) -> config_lib.ExperimentConfig:
  """Returns the PPO that its README trains by."""
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
  return methods.experiment("hiprag", preset, original=_original)
