"""IKEA: a reward for knowing what one knows.

In Search-R1's environment. Its data are half questions that the policy can
answer without a search, half others; the generated world's are both.
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
