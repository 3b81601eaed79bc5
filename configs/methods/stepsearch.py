"""StepSearch with PPO; backbones as in configs/methods/__init__.py.

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


def get_config(backbone: str = "") -> config_lib.ExperimentConfig:
  return methods.experiment(
    "stepsearch", backbone, functools.partial(methods.critic, ratio=1.0)
  )
