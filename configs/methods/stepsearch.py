"""StepSearch, by PPO; backbones as in configs/methods/__init__.py.

Policy and critic have one learning rate, StepSearch's ratio. Its questions need
evidence (docs/data.md): the generated world's have it, and prepared ones of
MuSiQue, HotpotQA or 2WikiMultihopQA (launch.prepare_data --evidence).

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
