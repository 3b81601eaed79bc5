"""StepSearch: PPO with a reward for every search.

The policy plans, searches, reads `<information>` and writes what it concludes
in an `<observation>`. A warning follows the passages of the last search.
Deviation from the released code: the warning comes after the last search of the
budget; there, it comes shortly before a fixed number of turns.
"""
# ruff: noqa: E501 - prompts are not wrapped: they are sent exactly as written.

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
  """Returns `protocol.observation` with StepSearch's marks around titles."""
  return protocol.observation(
    passages, unwanted, layout="Doc {rank}<## Title: {title} ##> {text}"
  )


def warn(budget: int, used: int) -> str:
  """Returns the warning after the budget's last search, otherwise ""."""
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
  # The toy vocabulary has no plan or observation tags; the policy thinks
  # instead. The warning is omitted too: the only matching line already means
  # "budget exceeded", after which demonstrations guess.
  "stepsearch_world": prompts.PROMPTS["world"],
}


def steps(
  trajectory: types.Trajectory, config: config_lib.ExperimentConfig
) -> np.ndarray:
  """Returns `stepsearch_reward.steps` with this system's constants."""
  return stepsearch_reward.steps(trajectory, config.method.stepsearch)


def train(
  config: config_lib.ExperimentConfig,
) -> config_lib.ExperimentConfig:
  """Selects PPO with a fixed budget."""
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
