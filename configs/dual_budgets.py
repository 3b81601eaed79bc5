"""The quickstart with budgets of searches and tokens, see docs/budgets.md.

Hardware: as configs/quickstart.py, and three times its rollouts: about ten
minutes of one core.

    python -m launch.train --config=configs/dual_budgets.py \
        --config.policy=capped_policy --output=runs/dual

Every group gets a pair of searches and tokens, and a right answer earns the
mean of the shares of both that it saved. Phase I anneals pairs without the
scaffold, which cannot state a cap on tokens in this world, and Phase II draws
them evenly. All else is the quickstart's preset `priced`.

The shipped warm start has never seen a cap on tokens nor been asked for its
answer. This makes `capped_policy`, which has, in about seven minutes:

    python -m launch.warm_start --config=configs/dual_budgets.py \
        --start=configs/graded_world_policy --output=capped_policy
"""

from __future__ import annotations

import dataclasses

from anysearch_jax import config as config_lib
from configs import quickstart

TOKENS = (40, 60, 90, 140)


def get_config() -> config_lib.ExperimentConfig:
  config = quickstart.get_config("priced")
  return dataclasses.replace(
    config,
    name="dual-budgets",
    reward=dataclasses.replace(config.reward, abs_tokens=1.0),
    curriculum=dataclasses.replace(
      config.curriculum,
      token_levels=TOKENS,
      phase1_scaffold=False,
      phase1_steps=3 * config.curriculum.phase1_steps,
      total_steps=3 * config.curriculum.total_steps,
      uniform_mix=1.0,
    ),
    # An answer to what a search has found takes 8 tokens.
    episode=dataclasses.replace(config.episode, answer_room=8),
    warm_start=dataclasses.replace(
      config.warm_start,
      expert="interruptible",
      steps=1000,
      learning_rate=5e-4,
      demonstrations=12000,
    ),
  )
