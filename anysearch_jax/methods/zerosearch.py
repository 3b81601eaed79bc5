"""ZeroSearch: a language model simulates the search engine during training.

The simulator (`retrieval.simulated`) knows the right answer and is asked for
useful or noisy passages; the share of noisy ones grows. Prompt and tags are
Search-R1's. A turn that neither searches nor answers uses up one of the B + 1
turns. Evaluations use the real retriever. Deviations: those of Search-R1's
loop, and passages are shown with their titles.
"""

from __future__ import annotations

import dataclasses

from anysearch_jax import config as config_lib
from anysearch_jax.environment import prompts
from anysearch_jax.methods import method, search_r1, zerosearch_reward

# The released code's prompted simulator, served by vLLM or SGLang next to the
# training.
_SIMULATOR = "Qwen/Qwen2.5-14B-Instruct"
_ADDRESS = "http://127.0.0.1:6001/v1"

ENVIRONMENTS = {
  "zerosearch": dataclasses.replace(search_r1.SEARCH_R1, turns_are_budget=True),
  "zerosearch_world": dataclasses.replace(
    prompts.PROMPTS["world"], turns_are_budget=True
  ),
}


def train(
  config: config_lib.ExperimentConfig,
) -> config_lib.ExperimentConfig:
  """Selects a fixed budget and a simulated search engine.

  Outside the generated world the simulator is a model at an address; one that
  the configuration already names is kept.
  """
  r = config.retrieval
  if config.data.source == "world":
    r = dataclasses.replace(r, simulated="world")
  elif not r.simulated:
    model = dataclasses.replace(r.model, name=_SIMULATOR)
    r = dataclasses.replace(r, simulated=_ADDRESS, model=model)
  return dataclasses.replace(method.fixed_budget(config), retrieval=r)


METHOD = method.Method(
  "zerosearch",
  "ZeroSearch",
  environments=ENVIRONMENTS,
  reward=method.by_own_constants(zerosearch_reward.reward, "zerosearch"),
  train=train,
)
