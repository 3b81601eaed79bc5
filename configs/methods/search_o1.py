"""Search-o1, an untrained system; presets as in configs/methods/__init__.py.

    python -m launch.evaluate --config=configs/methods/search_o1.py \
        --policy=configs/graded_world_policy --budgets=0..8 \
        --output=runs/methods/search_o1/evaluation/plain
"""

from __future__ import annotations

import dataclasses

from anysearch_jax import config as config_lib
from configs import methods


def _original(
  config: config_lib.ExperimentConfig,
) -> config_lib.ExperimentConfig:
  """Returns the sampling and the number of documents of its script."""
  return dataclasses.replace(
    config,
    sampling=config_lib.SamplingConfig(temperature=0.7, top_p=0.8, top_k=20),
    episode=dataclasses.replace(config.episode, top_k=10),
  )


def get_config(preset: str = "") -> config_lib.ExperimentConfig:
  return methods.experiment("search_o1", preset, original=_original)
