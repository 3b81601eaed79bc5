"""The Search-R1-like control of the quickstart.

It has only the outcome reward, a fixed budget of 5 and no scaffold. Everything
else, including the number of steps, is as in configs/quickstart.py.

    python -m launch.train --config=configs/quickstart_search_r1.py \
        --output=runs/quickstart/search_r1
"""

from __future__ import annotations

import dataclasses

from anysearch_jax import config as config_lib
from configs import quickstart


def get_config() -> config_lib.ExperimentConfig:
  base = quickstart.get_config()
  return dataclasses.replace(
    base,
    name="quickstart-search-r1",
    reward=dataclasses.replace(
      base.reward, alpha=1.0, beta=0.0, delta=0.0, gamma_mode="off"
    ),
    curriculum=dataclasses.replace(
      base.curriculum, phase1_steps=0, fixed_budget=5
    ),
  )
