"""OTC-PO: a right answer is worth more, the fewer searches it took.

In Search-R1's environment. No budget is part of the method; the comparison
tells it one.
"""

from __future__ import annotations

from anysearch_jax.methods import method, otc_reward, search_r1

METHOD = method.Method(
  "otc",
  "OTC-PO",
  environments=search_r1.ENVIRONMENTS,
  reward=method.by_own_constants(otc_reward.reward, "otc"),
  train=method.fixed_budget,
)
