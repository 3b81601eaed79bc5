"""R1-Searcher; presets as in configs/methods/__init__.py.

python -m launch.train --config=configs/methods/r1_searcher.py
"""

from __future__ import annotations

import dataclasses

from anysearch_jax import config as config_lib
from configs import methods
from configs.methods import published


def _original(
  config: config_lib.ExperimentConfig,
) -> config_lib.ExperimentConfig:
  """Returns REINFORCE++ with the group's mean as baseline, without KL."""
  # 350 questions in stage 1, 15 a rollout, then 8,148 of 64, each asked once.
  length = published.Length(
    rollouts=150, questions=64, group=16, updates=4, searches=10
  )
  made = published.grpo(config, length, rate=2e-6, warmup=0.0)
  return dataclasses.replace(
    made,
    objective=dataclasses.replace(
      made.objective,
      kl_coefficient=0.0,
      entropy_coefficient=0.0,
      normalize="batch",
      reduction="sequence-mean",
    ),
    optimizer=dataclasses.replace(made.optimizer, b2=0.95),
  )


def get_config(preset: str = "") -> config_lib.ExperimentConfig:
  return methods.experiment("r1_searcher", preset, original=_original)
