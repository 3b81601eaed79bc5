"""Search-R1 with GRPO; backbones as in configs/methods/__init__.py.

python -m launch.train --config=configs/methods/search_r1.py
"""

from __future__ import annotations

from anysearch_jax import config as config_lib
from configs import methods


def get_config(backbone: str = "") -> config_lib.ExperimentConfig:
  return methods.experiment("search_r1", backbone)
