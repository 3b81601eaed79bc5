"""OTC-PO: a right answer is worth more, the fewer searches it took.

In Search-R1's environment. No budget is part of the method; the comparison
tells it one.
"""

from __future__ import annotations

import chex

from anysearch_jax import config as config_lib
from anysearch_jax.methods import method, otc_reward, outcomes, search_r1


def reward(
  o: outcomes.Outcomes, config: config_lib.ExperimentConfig
) -> dict[str, chex.Array]:
  """`otc_reward.reward`."""
  return otc_reward.reward(o, config=config.method.otc)


METHOD = method.Method(
  "otc",
  "OTC-PO",
  environments=search_r1.ENVIRONMENTS,
  reward=reward,
  train=method.fixed_budget,
)
