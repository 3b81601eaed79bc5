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
from anysearch_jax.config import settings
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


@dataclasses.dataclass(frozen=True)
class Options:
  """ZeroSearch's schedule of noisy answers from the simulated search engine."""

  noise_start: float = settings.learning(0.0, settings.SHARE)
  """Probability of a noisy answer at the start of training."""
  noise_end: float = settings.learning(0.5, settings.SHARE)
  """Probability of a noisy answer at the end of training."""
  noise_base: float = settings.learning(4.0, settings.POSITIVE)
  """Base of the exponential schedule: 1 is a straight line, a larger base rises
  later."""


# For other systems that search a simulated engine.
NO_NOISE = Options(noise_start=0.0, noise_end=0.0)


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
def reward(o: method.Outcomes, c: Options) -> method.Terms:
  """Returns the answer's F1."""
  del c  # Every reward takes the constants of its system.
  return {"f1": o.f1, "total": o.f1}


def noise(progress: float, options: Options) -> float:
  """Returns the probability that a search gets noisy passages.

      p = p_s + (b^progress - 1) / (b - 1) * (p_e - p_s)

  For b = 1 this is linear in `progress`. p_s, p_e and b are `noise_start`,
  `noise_end` and `noise_base`.

  Args:
    progress: the completed share of the training, in [0, 1].
    options: the schedule.
  """
  base = options.noise_base
  risen = progress if base == 1 else (base**progress - 1) / (base - 1)
  span = options.noise_end - options.noise_start
  return options.noise_start + risen * span


METHOD = method.compared(
  "zerosearch",
  "ZeroSearch",
  WORDINGS,
  reward,
  train=train,
  options=Options(),
)
