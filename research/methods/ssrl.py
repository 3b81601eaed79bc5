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
import pathlib

import anysearch_jax as aj

# Tokens of a call in the generated world: a thought and an answer.
_WORLD_TOKENS = 64

WORDINGS = aj.search_r1.wordings(
  "ssrl",
  {"simulator_useful": aj.wording.Slots(needs=("query",), may=("k",))},
  folder=pathlib.Path(__file__).with_name("texts"),
)


@dataclasses.dataclass(frozen=True)
class Options:
  """SSRL's reward."""

  right: float = aj.settings.learning(0.9, aj.settings.at_least(0))
  """Weight of exact match."""
  formed: float = aj.settings.learning(0.1, aj.settings.at_least(0))
  """Weight of a well-formed response."""


def train(config: aj.ExperimentConfig) -> aj.ExperimentConfig:
  """Selects a fixed budget and the policy as its search engine."""
  world = config.data.source == "world"
  tokens = _WORLD_TOKENS if world else config.retrieval.model.max_tokens
  return aj.method.searching_with_policy(
    aj.method.fixed_budget(config),
    tokens,
    simulated="policy",
  )


@aj.method.jitted
def reward(o: aj.Outcomes, c: Options) -> aj.method.Terms:
  """Returns the weighted sum of exact match and format."""
  total = c.right * o.em + c.formed * o.format
  return {"total": total}


METHOD = aj.method.compared(
  "ssrl",
  "SSRL",
  WORDINGS,
  reward,
  train=train,
  options=Options(),
)
