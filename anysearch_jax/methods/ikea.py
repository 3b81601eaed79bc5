"""IKEA: a reward for knowing what one knows.

In Search-R1's environment. Its data are half questions that the policy can
answer without a search, half others; the generated world's are both.
"""

from __future__ import annotations

import chex

from anysearch_jax import config as config_lib
from anysearch_jax.methods import ikea_reward, method, outcomes, search_r1


def reward(
  o: outcomes.Outcomes, config: config_lib.ExperimentConfig
) -> dict[str, chex.Array]:
  """`ikea_reward.reward`."""
  return ikea_reward.reward(o, config=config.method.ikea)


METHOD = method.Method(
  "ikea",
  "IKEA",
  environments=search_r1.ENVIRONMENTS,
  reward=reward,
  train=method.fixed_budget,
  measures=("well_formed",),
  measure=ikea_reward.measure,
)
