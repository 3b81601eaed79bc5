"""IKEA: a reward for searching only where the policy lacks knowledge.

It is played in Search-R1's environment. The policy can answer half of IKEA's
training questions without a search; the generated world has both kinds too.
"""

from __future__ import annotations

from anysearch_jax.methods import ikea_reward, method, search_r1

METHOD = method.Method(
  "ikea",
  "IKEA",
  environments=search_r1.ENVIRONMENTS,
  reward=method.by_own_constants(ikea_reward.reward, "ikea"),
  train=method.fixed_budget,
  measures=("well_formed",),
  measure=ikea_reward.measure,
)
