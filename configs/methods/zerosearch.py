"""ZeroSearch; presets as in configs/methods/__init__.py.

python -m launch.train --config=configs/methods/zerosearch.py
"""

from __future__ import annotations

import dataclasses

from anysearch_jax import config as config_lib
from configs import methods
from configs.methods import published


def _original(
  config: config_lib.ExperimentConfig,
) -> config_lib.ExperimentConfig:
  """Returns ZeroSearch's GRPO, whose simulator writes five documents."""
  # Its mini-batches of 256 trajectories are one of 256 and one of 64.
  length = published.Length(
    rollouts=203, questions=64, group=5, updates=2, searches=5
  )
  made = published.grpo(config, length, rate=1e-6, warmup=0.95)
  episode = dataclasses.replace(made.episode, top_k=5)
  return dataclasses.replace(made, episode=episode)


def get_config(preset: str = "") -> config_lib.ExperimentConfig:
  return methods.experiment("zerosearch", preset, original=_original)
