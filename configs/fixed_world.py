"""The quickstart in an easier world, where memory is right or wrong for good.

A tenth of what the policy remembers is wrong in every snapshot, so that it can
learn by heart what to search; budgets above 5 hardly bind. It starts from
demonstrations that search only what memory does not hold. Everything else is as
in configs/quickstart.py; docs/quickstart.md compares the two worlds.

    python -m launch.train --config=configs/fixed_world.py \
        --output=runs/fixed_world

Presets are those of configs/quickstart.py.
To make the warm start in configs/fixed_world_policy/ again:
    python -m launch.warm_start --config=configs/fixed_world.py
"""

from __future__ import annotations

import dataclasses

from anysearch_jax import config as config_lib
from configs import quickstart


def get_config(preset: str = "anysearch") -> config_lib.ExperimentConfig:
  config = quickstart.get_config(preset)
  # Its policies were always trained with these steps.
  curriculum = dataclasses.replace(
    config.curriculum,
    max_budget=5,
    phase1_steps=40 if config.curriculum.phase1_steps else 0,
    total_steps=240,
    steps_per_rollout=2,
  )
  return dataclasses.replace(
    config,
    name=config.name.replace("quickstart", "fixed_world"),
    policy="configs/fixed_world_policy",
    curriculum=curriculum,
    optimizer=dataclasses.replace(config.optimizer, decay=0.0),
    data=dataclasses.replace(config.data, world="fixed"),
    warm_start=dataclasses.replace(
      config.warm_start, expert="thrifty", demonstrations=40000
    ),
  )
