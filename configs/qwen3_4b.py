"""Qwen3-4B on one node of eight GPUs of 80 GB, as the paper trains it.

TODO-DOC
"""

from __future__ import annotations

from anysearch_jax import config as config_lib
from configs import paper


def get_config(preset: str = "") -> config_lib.ExperimentConfig:
  return paper.experiment(
    "qwen3_4b",
    "models/Qwen3-4B",
    preset,
    slots=paper.Slots(112, 20, 48),
  )
