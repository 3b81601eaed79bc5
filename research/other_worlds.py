"""The quickstart in a world of another seed: other names, facts and memory.

    python -m research.warm_start --config=research/other_worlds.py:1 \
        --output=runs/world-1/policy
    python -m research.study --config=research/other_worlds.py:1 --seeds=2 \
        --rows=anysearch,priced,no_tool --output=runs/world-1/study

The preset is the seed of the world, and the quickstart's world has 0. Each
world needs its own warm start, because a policy remembers its world's facts.
Everything else is as in configs/quickstart.py. Expected: docs/evidence.md.
"""

from __future__ import annotations

import anysearch_jax as aj
from anysearch_jax import config as config_lib
from configs import quickstart


def get_config(preset: str = "1") -> aj.ExperimentConfig:
  if not (preset.isascii() and preset.isdigit() and int(preset)):
    raise ValueError(
      f"research/other_worlds.py: found preset {preset!r}, expected the seed "
      "of a world, from 1 on."
    )
  seed = int(preset)
  config = quickstart.get_config()
  return config_lib.changed(
    config,
    name=f"world-{seed}",
    policy=f"runs/world-{seed}/policy",
    data={"world_seed": seed},
  )
