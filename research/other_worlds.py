"""The quickstart in another world, or with a policy ten times as large.

    python -m research.warm_start --config=research/other_worlds.py:1 \
        --output=runs/world-1/policy
    python -m research.study --config=research/other_worlds.py:1 --seeds=5 \
        --rows=anysearch,priced,no_tool --output=runs/world-1/study

The preset is the seed of the world: other names, facts and memory. Each world
needs its own warm start, because a policy remembers its world's facts. The
preset `large` is the quickstart's world with 3 million parameters, warmed up in
half of the steps. All else is as in configs/quickstart.py. See docs/evidence.md
"""

from __future__ import annotations

import anysearch_jax as aj
from anysearch_jax import config as config_lib
from anysearch_jax.configs import quickstart
from research import warm_start_settings

LARGE = "large"


def get_config(preset: str = "1") -> aj.ExperimentConfig:
  seed = preset if preset.isascii() and preset.isdigit() else "0"
  if preset != LARGE and not int(seed):
    raise ValueError(
      f"research/other_worlds.py: found preset {preset!r}, expected the seed "
      f"of a world, from 1 on, or {LARGE!r}."
    )
  return config_lib.changed(
    quickstart.get_config(),
    name=f"world-{preset}",
    policy=f"runs/world-{preset}/policy",
    data={"world_seed": int(seed)},
  )


def get_warm_start(preset: str = "1") -> warm_start_settings.WarmStart:
  if preset != LARGE:
    return warm_start_settings.WarmStart()
  return warm_start_settings.WarmStart(
    steps=1000,
    learning_rate=2e-3,
    layers=4,
    hidden=256,
    heads=8,
    kv_heads=4,
    mlp=768,
  )
