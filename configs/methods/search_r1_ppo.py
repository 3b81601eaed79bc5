"""Search-R1 with PPO; presets as in configs/methods/__init__.py.

The critic's learning rate is ten times the policy's, as in Search-R1.

    python -m launch.train --config=configs/methods/search_r1_ppo.py
"""

from __future__ import annotations

import dataclasses

from anysearch_jax import config as config_lib
from configs import methods
from configs.methods import search_r1


def get_config(preset: str = "") -> config_lib.ExperimentConfig:
  config = methods.experiment(
    "search_r1", preset, methods.critic, search_r1.original
  )
  return dataclasses.replace(
    config, name=config.name.replace("search_r1", "search_r1_ppo")
  )
