"""BATS, an untrained system; backbones as in configs/methods/__init__.py.

    python -m launch.evaluate --config=configs/methods/bats.py \
        --policy=configs/graded_world_policy --budgets=0..8 \
        --output=runs/methods/bats/evaluation/plain
"""

from __future__ import annotations

from anysearch_jax import config as config_lib
from configs import methods


def get_config(backbone: str = "") -> config_lib.ExperimentConfig:
  return methods.experiment("bats", backbone)
