"""BATS, an untrained system; presets as in configs/methods/__init__.py.

    python -m launch.evaluate --config=configs/methods/bats.py \
        --policy=configs/graded_world_policy --budgets=0..8 \
        --output=runs/methods/bats/evaluation/plain
"""

from __future__ import annotations

import dataclasses

from anysearch_jax import config as config_lib
from configs import methods


def _original(
  config: config_lib.ExperimentConfig,
) -> config_lib.ExperimentConfig:
  """Returns the paper's tracker, which gives numbers and no advice."""
  episode = dataclasses.replace(config.episode, prompts="bats_numbers")
  return dataclasses.replace(config, episode=episode)


def get_config(preset: str = "") -> config_lib.ExperimentConfig:
  return methods.experiment("bats", preset, original=_original)
