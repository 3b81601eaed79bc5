"""HiPRAG; presets as in configs/methods/__init__.py.

The original recipe is the PPO that its README trains by, Search-R1's.

python -m launch.train --config=configs/methods/hiprag.py
"""

from __future__ import annotations

from anysearch_jax import config as config_lib
from configs import methods
from configs.methods import search_r1


def get_config(preset: str = "") -> config_lib.ExperimentConfig:
  return methods.experiment("hiprag", preset, original=search_r1.original)
