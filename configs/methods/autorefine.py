"""AutoRefine; presets as in configs/methods/__init__.py.

python -m launch.train --config=configs/methods/autorefine.py
"""

from __future__ import annotations

from anysearch_jax import config as config_lib
from configs import methods
from configs.methods import published


def _original(
  config: config_lib.ExperimentConfig,
) -> config_lib.ExperimentConfig:
  """Returns GRPO, 300 rollouts with 5 searches."""
  length = published.Length(
    rollouts=300, questions=256, group=5, updates=5, searches=5
  )
  return published.grpo(config, length, rate=1e-6, warmup=0.0)


def get_config(preset: str = "") -> config_lib.ExperimentConfig:
  return methods.experiment("autorefine", preset, original=_original)
