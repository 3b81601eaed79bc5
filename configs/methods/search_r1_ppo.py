"""Search-R1 with PPO; backbones as in configs/methods/__init__.py.

The critic's learning rate is ten times the policy's, as in Search-R1.

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
