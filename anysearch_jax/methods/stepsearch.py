"""StepSearch: PPO with a reward for every search.

The policy plans, searches, is shown `<information>` and writes down in an
`<observation>` what it makes of it. With the last search spent a warning
follows what was found. Deviation from the released code: a warning comes after
the last search of the budget, not before a fixed number of turns is over.
"""
# ruff: noqa: E501 - prompts stand as they are sent.

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from anysearch_jax import config as config_lib
from anysearch_jax import types
from anysearch_jax.environment import environment, prompts, protocol
from anysearch_jax.methods import method, stepsearch_reward

_PROMPT = """\
Answer the question below by a loop of plan, search, information and observation. Work in these steps and mark each one by its tags:
- <plan> what is still unknown, and what to look for next </plan>
- <search> one query to the search engine </search>; you have at most {B} of them
- <information> is what the search engine returns; you do not write it </information>
- <observation> what the information says about the question </observation>
Repeat as often as needed. As soon as you know enough, give a short answer: <answer> Beijing </answer>
Question: {Question}
"""
_WARNING = (
  "<warning>No search is left. Write down what was observed and give the "
  "answer.</warning>\n\n"
)
_MARKERS = tuple(
  f"<{slash}{name}>"
  for name in ("plan", "observation", "warning")
  for slash in ("", "/")
)


def observation(
  passages: Sequence[types.Passage], unwanted: Sequence[str]
) -> str:
  """`protocol.observation`, with StepSearch's marks around titles."""
  return protocol.observation(
    passages, unwanted, layout="Doc {rank}<## Title: {title} ##> {text}"
  )


def warn(budget: int, used: int) -> str:
  """The line that follows the last observation."""
  return _WARNING if used == budget else ""


STEPSEARCH = environment.Environment(
  scaffold=_PROMPT,
  plain=_PROMPT,
  over_budget="\n" + _WARNING,
  no_action=(
    "\nMy previous action is invalid: it was neither a search nor an answer "
    "between their tags. Let me try again.\n"
  ),
  format=None,
  observation=observation,
  after_search=warn,
  markers=_MARKERS,
)
ENVIRONMENTS = {
  "stepsearch": STEPSEARCH,
  # The world's policy knows neither of the tags: it thinks instead. Nor is it
  # warned: the only line it could be, it knows as the answer to a search too
  # many, after which its demonstrations guess.
  "stepsearch_world": prompts.PROMPTS["world"],
}


def steps(
  trajectory: types.Trajectory, config: config_lib.ExperimentConfig
) -> np.ndarray:
  """`stepsearch_reward.steps`."""
  return stepsearch_reward.steps(trajectory, config.method.stepsearch)


def train(
  config: config_lib.ExperimentConfig,
) -> config_lib.ExperimentConfig:
  """PPO under a fixed budget."""
  return method.ppo(method.fixed_budget(config))


METHOD = method.Method(
  "stepsearch",
  "StepSearch",
  environments=ENVIRONMENTS,
  reward=method.by_own_constants(stepsearch_reward.reward, "stepsearch"),
  train=train,
  measures=("search_keys",),
  measure=stepsearch_reward.measure,
  steps=steps,
)
