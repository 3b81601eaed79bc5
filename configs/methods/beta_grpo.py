"""beta-GRPO; presets as in configs/methods/__init__.py.

python -m launch.train --config=configs/methods/beta_grpo.py
"""

from __future__ import annotations

from anysearch_jax import config as config_lib
from configs import methods


def get_config(preset: str = "") -> config_lib.ExperimentConfig:
  return methods.experiment("beta_grpo", preset)
