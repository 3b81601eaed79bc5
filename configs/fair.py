"""A laptop's run in the world of graded memory: is the question fair?

Hardware: one CPU core, about 1 GB of memory. Time: about four minutes a run.
Memory is right with a probability that depends on the relation, and budgets
bind up to 8, so a policy has to weigh each search. It starts without thrift:
the reward has to teach it.

    python -m launch.train --config=configs/fair.py --output=runs/fair/anysearch

Presets name the rows:
    fair.py               AnySearch as published
    fair.py:priced        advantages divided by the rollout's deviation, and a
                          search costs .1 / B of a right answer's reward
    fair.py:no_tool       no tool reward
    fair.py:search_r1     outcome reward, fixed budget, no scaffold
Exact rows, of an agent that knows the world's statistics:
    python -m launch.evaluate --config=configs/fair.py --scripted=optimum ...
To make the warm start again (`warm_start.expert` soft, or blind):
    python -m launch.warm_start --config=configs/fair.py --output=warm_start
"""

from __future__ import annotations

import dataclasses

from anysearch_jax import config as config_lib
from configs import quickstart, quickstart_search_r1

PRESETS = ("anysearch", "priced", "no_tool", "search_r1")


def get_config(preset: str = "anysearch") -> config_lib.ExperimentConfig:
  if preset not in PRESETS:
    raise ValueError(f"Found {preset!r}, expected one of {', '.join(PRESETS)}.")
  config = _in_graded_world(quickstart.get_config())
  match preset:
    case "search_r1":
      return _in_graded_world(quickstart_search_r1.get_config())
    case "no_tool":
      reward = dataclasses.replace(config.reward, gamma_mode="off")
      return dataclasses.replace(config, reward=reward)
    case "priced":
      return dataclasses.replace(
        config,
        reward=dataclasses.replace(
          config.reward, gamma_mode="fixed", gamma_fixed=0.1, use_rel=False
        ),
        objective=dataclasses.replace(config.objective, normalize="batch"),
      )
  return config


def _in_graded_world(
  config: config_lib.ExperimentConfig,
) -> config_lib.ExperimentConfig:
  c = config.curriculum
  if c.fixed_budget < 0:
    c = dataclasses.replace(c, max_budget=8, phase1_steps=48)
  return dataclasses.replace(
    config,
    name=config.name.replace("quickstart", "fair"),
    policy="configs/fair_policy",
    curriculum=c,
    data=dataclasses.replace(config.data, world="graded"),
    warm_start=dataclasses.replace(
      config.warm_start, expert="soft", demonstrations=24000
    ),
    evaluation=dataclasses.replace(
      config.evaluation, budgets=(0, 1, 2, 3, 5, 6, 8)
    ),
  )
