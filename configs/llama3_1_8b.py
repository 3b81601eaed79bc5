"""Llama-3.1-8B-Instruct on one node of eight GPUs of 80 GB, as the paper trains it.

TODO-DOC
"""

from __future__ import annotations

from anysearch_jax import config as config_lib
from configs import paper


def get_config(preset: str = "") -> config_lib.ExperimentConfig:
  return paper.experiment(
    "llama3_1_8b",
    "models/Llama-3.1-8B-Instruct",
    preset,
    slots=paper.Slots(112, 12, 40),
  )
