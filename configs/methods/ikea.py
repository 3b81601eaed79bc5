"""IKEA; presets as in configs/methods/__init__.py.

python -m launch.train --config=configs/methods/ikea.py
"""

from __future__ import annotations

import dataclasses

from anysearch_jax import config as config_lib
from configs import methods
from configs.methods import published


def _original(
  config: config_lib.ExperimentConfig,
) -> config_lib.ExperimentConfig:
  """Returns GRPO with 16 samples, 3 searches, and a prompt to skip them."""
  # Its script runs two epochs; the repository does not say of how many
  # questions.
  length = published.Length(
    rollouts=100, questions=256, group=16, updates=16, searches=3
  )
  made = published.grpo(config, length, rate=1e-7, warmup=0.75)
  episode = dataclasses.replace(made.episode, prompts="ikea")
  return dataclasses.replace(made, episode=episode)


def get_config(preset: str = "") -> config_lib.ExperimentConfig:
  return methods.experiment("ikea", preset, original=_original)
