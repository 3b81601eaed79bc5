"""ZeroSearch: a language model plays the search engine while training.

It is asked for useful or noisy passages with the right answer at hand
(`retrieval.simulated`), more and more often for noisy ones. Prompt and
tags are Search-R1's; a turn that neither searches nor answers uses one of the
B + 1 turns up. Evaluated against the real retriever. Deviations: those of
Search-R1's loop; passages are shown with their titles.
"""

from __future__ import annotations

import dataclasses

from anysearch_jax import config as config_lib
from anysearch_jax.environment import prompts
from anysearch_jax.methods import method, search_r1, zerosearch_reward

# The released code's, prompted; served by vLLM or SGLang beside the training.
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
  """Fixed budget, against a simulated search engine.

  Outside of the generated world that is a model at an address; it stays as it
  is where the configuration names one.
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
