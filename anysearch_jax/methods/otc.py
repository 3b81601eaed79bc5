"""OTC-PO: a right answer is worth more if it took fewer searches.

It is played in Search-R1's environment. The method itself has no budget; the
comparison states one in the prompt.
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
