"""SSRL: in training, the policy is its own search engine.

    total = right * EM + formed * (the response is well formed)

`retrieval.simulated=policy`: the policy itself is asked, in a call of its own,
for what a search would find. These calls are not trained on, and neither are
the passages that they yield. The search engine of an evaluation is real. In the
generated world, whose policy reads no such request, it is asked the query as a
question without a budget, and its answer is the passage.
https://arxiv.org/abs/2508.10874
"""

from __future__ import annotations

import dataclasses

from anysearch_jax import config as config_lib
from anysearch_jax.config import methods as constants
from anysearch_jax.environment import wording
from anysearch_jax.methods import method, search_r1

# Tokens of a call in the generated world: a thought and an answer.
_WORLD_TOKENS = 64

WORDINGS = search_r1.wordings(
  "ssrl", {"simulator_useful": wording.Slots(needs=("query",), may=("k",))}
)


def train(config: config_lib.ExperimentConfig) -> config_lib.ExperimentConfig:
  """Selects a fixed budget and the policy as its search engine, never noisy."""
  world = config.data.source == "world"
  tokens = _WORLD_TOKENS if world else config.retrieval.model.max_tokens
  noise = dataclasses.replace(
    config.method.zerosearch, noise_start=0.0, noise_end=0.0
  )
  return method.searching_with_policy(
    config_lib.changed(
      method.fixed_budget(config), method={"zerosearch": noise}
    ),
    tokens,
    simulated="policy",
  )


@method.jitted
def reward(o: method.Outcomes, c: constants.SsrlConfig) -> method.Terms:
  """Returns the weighted sum of exact match and format."""
  total = c.right * o.em + c.formed * o.format
  return {"em": o.em, "total": total}


METHOD = method.compared("ssrl", "SSRL", WORDINGS, reward, train=train)
