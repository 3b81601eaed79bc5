"""ZeroSearch: a language model simulates the search engine during training.

The simulator (`retrieval.simulated`) knows the right answer and is asked for
useful or noisy passages; the share of noisy ones grows. Prompt and tags are
Search-R1's. A turn that neither searches nor answers uses up one of the B + 1
turns. Evaluations use the real retriever.
"""

from __future__ import annotations

import dataclasses

from anysearch_jax import config as config_lib
from anysearch_jax.algorithms import method
from anysearch_jax.config import methods as constants
from anysearch_jax.environment import prompts, wording
from anysearch_jax.methods import search_r1

# The released code's prompted simulator, served by vLLM or SGLang next to the
# training.
_SIMULATOR = "Qwen/Qwen2.5-14B-Instruct"
_ADDRESS = "http://127.0.0.1:6001/v1"

_SLOTS = wording.Slots(needs=("query",), may=("k", "question", "answer"))

WORDINGS = {
  "zerosearch": search_r1.wordings(
    "zerosearch",
    {"simulator_useful": _SLOTS, "simulator_noisy": _SLOTS},
    turns_are_budget=True,
  )["zerosearch"],
  "zerosearch_world": prompts.WORLD.then(
    lambda env: dataclasses.replace(env, turns_are_budget=True)
  ),
}


def train(config: config_lib.ExperimentConfig) -> config_lib.ExperimentConfig:
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


@method.jitted
def reward(o: method.Outcomes, c: constants.ZeroSearchConfig) -> method.Terms:
  """Returns the answer's F1."""
  del c  # Every reward takes the constants of its system.
  return {"f1": o.f1, "total": o.f1}


def noise(progress: float, config: constants.ZeroSearchConfig) -> float:
  """Returns the probability that a search gets noisy passages.

      p = p_s + (b^progress - 1) / (b - 1) * (p_e - p_s)

  For b = 1 this is linear in `progress`, the completed share of the training
  in [0, 1]; p_s, p_e and b are the `noise_start`, `_end` and `_base`.
  """
  base = config.noise_base
  risen = progress if base == 1 else (base**progress - 1) / (base - 1)
  return config.noise_start + risen * (config.noise_end - config.noise_start)


METHOD = method.compared(
  "zerosearch", "ZeroSearch", WORDINGS, reward, train=train
)
