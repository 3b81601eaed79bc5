"""The quickstart with a cheap and a dear search under a budget of cents.

Hardware and time: as configs/quickstart.py. Every group gets a budget of cents
alone, and a right answer earns the share of it that is left. The policy chooses
between two searches: one costs 1 cent and knows some relations well and others
badly; the other is the quickstart's and costs 3 cents. docs/budgets.md has what
came out.

    python -m launch.train --config=configs/priced_tools.py \
        --output=runs/priced_tools/mixed

Presets, `--config=configs/priced_tools.py:<preset>`:
    mixed    both searches; also without a preset
    cheap    every query asks the cheap one
    dear     every query asks the dear one
To make the warm start in configs/priced_world_policy/ again:
    python -m launch.warm_start --config=configs/priced_tools.py \
        --start=configs/graded_world_policy --output=mine
"""

from __future__ import annotations

import dataclasses

from anysearch_jax import config as config_lib
from configs import objectives, quickstart

# Of 1,000 calls in US dollars: 1 and 3 cents a call.
CHEAP, DEAR = "cheap=10", "search=30"
# Environment and prices of each preset.
_TOOLS = {
  "mixed": ("world_priced", (CHEAP, DEAR)),
  "cheap": ("world_cheap", (CHEAP,)),
  "dear": ("world_dear", (DEAR,)),
}
CENTS = (1, 2, 4, 6, 8, 11, 15, 20)


def get_config(preset: str = "mixed") -> config_lib.ExperimentConfig:
  if preset not in _TOOLS:
    raise ValueError(
      f"configs/priced_tools.py: found preset {preset!r}, expected one of "
      f"{', '.join(_TOOLS)}."
    )
  prompts, prices = _TOOLS[preset]
  config = objectives.priced(quickstart.get_config())
  return dataclasses.replace(
    config,
    name=f"priced-tools-{preset}",
    policy="configs/priced_world_policy",
    reward=dataclasses.replace(
      config.reward, abs_searches=0.0, abs_dollars=1.0
    ),
    # The world's scaffold cannot state cents, so there is no Phase I.
    curriculum=dataclasses.replace(
      config.curriculum,
      cent_levels=CENTS,
      max_budget=len(CENTS),
      phase1_steps=0,
    ),
    episode=dataclasses.replace(config.episode, prompts=prompts),
    evaluation=dataclasses.replace(
      config.evaluation,
      budgets=(),
      pairs=tuple(f"dollars={cents / 100}" for cents in CENTS),
      tool_prices=prices,
    ),
    warm_start=config_lib.WarmStartConfig(
      expert="priced", steps=320, learning_rate=2e-3, demonstrations=3000
    ),
  )
