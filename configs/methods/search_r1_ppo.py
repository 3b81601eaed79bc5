"""Search-R1, by PPO; backbones as in configs/methods/__init__.py.

The critic learns at ten times the policy's rate, Search-R1's ratio.

    python -m launch.train --config=configs/methods/search_r1_ppo.py
"""

from __future__ import annotations

import dataclasses

from anysearch_jax import config as config_lib
from configs import methods


def get_config(backbone: str = "") -> config_lib.ExperimentConfig:
  config = methods.experiment("search_r1", backbone, methods.critic)
  return dataclasses.replace(
    config, name=config.name.replace("search_r1", "search_r1_ppo")
  )
