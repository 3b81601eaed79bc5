"""StepSearch with PPO; presets as in configs/methods/__init__.py.

Policy and critic have the same learning rate, as in StepSearch. Its questions
need evidence (docs/data.md). Questions of the generated world have it, and so
have prepared questions of MuSiQue, HotpotQA and 2WikiMultihopQA
(launch.prepare_data --evidence).

    python -m launch.train --config=configs/methods/stepsearch.py
"""

from __future__ import annotations

import functools

from anysearch_jax import config as config_lib
from configs import methods
from configs.methods import published


def _original(
  config: config_lib.ExperimentConfig,
) -> config_lib.ExperimentConfig:
  """Returns StepSearch's PPO: 5e-7 for the policy and the critic."""
  length = published.Length(
    rollouts=1120, questions=128, group=1, updates=4, searches=5
  )
  return published.ppo(
    config,
    length,
    rate=5e-7,
    warmup=0.285,
    critic_rate=5e-7,
    critic_warmup=0.05,
  )


def get_config(preset: str = "") -> config_lib.ExperimentConfig:
  return methods.experiment(
    "stepsearch",
    preset,
    functools.partial(methods.critic, ratio=1.0),
    _original,
  )
