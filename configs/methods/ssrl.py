"""SSRL; presets as in configs/methods/__init__.py.

python -m launch.train --config=configs/methods/ssrl.py
"""

from __future__ import annotations

import dataclasses

from anysearch_jax import config as config_lib
from configs import methods
from configs.methods import published


def _original(
  config: config_lib.ExperimentConfig,
) -> config_lib.ExperimentConfig:
  """Returns SSRL's GRPO, without entropy bonus."""
  # Its script runs five epochs; the repository does not say of how many
  # questions.
  length = published.Length(
    rollouts=200, questions=256, group=5, updates=1, searches=3
  )
  made = published.grpo(config, length, rate=1e-6, warmup=0.02)
  return dataclasses.replace(
    made,
    objective=dataclasses.replace(made.objective, entropy_coefficient=0.0),
    # A step has all 1,280 trajectories.
    batch=dataclasses.replace(made.batch, max_micro_batches=512),
  )


def get_config(preset: str = "") -> config_lib.ExperimentConfig:
  return methods.experiment("ssrl", preset, original=_original)
