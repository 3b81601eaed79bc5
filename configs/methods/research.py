"""ReSearch; presets as in configs/methods/__init__.py.

python -m launch.train --config=configs/methods/research.py
"""

from __future__ import annotations

import dataclasses

from anysearch_jax import config as config_lib
from configs import methods
from configs.methods import published


def _original(
  config: config_lib.ExperimentConfig,
) -> config_lib.ExperimentConfig:
  """Returns GRPO on two epochs of MuSiQue's 19,938 training questions."""
  # Its loop sets no number of searches; the comparison's budgets end at 8.
  length = published.Length(
    rollouts=155, questions=256, group=5, updates=1, searches=8
  )
  made = published.grpo(config, length, rate=1e-6, warmup=0.0)
  episode = dataclasses.replace(made.episode, top_k=5)
  # A step has all 1,280 trajectories.
  batch = dataclasses.replace(made.batch, max_micro_batches=512)
  return dataclasses.replace(made, episode=episode, batch=batch)


def get_config(preset: str = "") -> config_lib.ExperimentConfig:
  return methods.experiment("research", preset, original=_original)
