"""A compared system as a value; `systems` has all of them.

What is one system's own is here: its environments, its reward, how it is
trained. Driver, engines, train step and evaluation are everybody's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import chex
import numpy as np

from anysearch_jax import config as config_lib
from anysearch_jax import types
from anysearch_jax.environment import environment
from anysearch_jax.methods import outcomes as outcomes_lib

Reward = Callable[
  [outcomes_lib.Outcomes, config_lib.ExperimentConfig], dict[str, chex.Array]
]


def _nothing(trajectory: types.Trajectory) -> dict[str, float]:
  return {}


@dataclasses.dataclass(frozen=True)
class Method:
  """A system.

  Attributes:
    name: in `method.name`.
    label: in tables.
    environments: those it can be played in, by `episode.prompts`; the first is
      for language models, the last for the generated world.
    reward: of groups, float32 `[..., G]` by name, `total` among them; None for
      a system that is not trained.
    train: a configuration with this system's training in it, the environment
      left aside.
    measures: names of what `measure` finds in a trajectory for the reward.
    measure: of one that did not fail.
    steps: what each search of a trajectory earned, float32 `[searches]`, in
      the order of `search_ends`; None without step rewards.
  """

  name: str
  label: str
  environments: Mapping[str, environment.Environment]
  reward: Reward | None = None
  train: Callable[
    [config_lib.ExperimentConfig], config_lib.ExperimentConfig
  ] = lambda config: config
  measures: tuple[str, ...] = ()
  measure: Callable[[types.Trajectory], Mapping[str, float]] = _nothing
  steps: (
    Callable[[types.Trajectory, config_lib.ExperimentConfig], np.ndarray] | None
  ) = None

  @property
  def prompts(self) -> str:
    """Its environment for language models."""
    return next(iter(self.environments))

  @property
  def world_prompts(self) -> str:
    """Its environment for the generated world."""
    return next(reversed(self.environments))


def by_own_constants(
  reward: Callable[..., dict[str, chex.Array]], name: str
) -> Reward:
  """A reward that takes the constants of one system, `method.<name>`."""

  def of_config(
    outcomes: outcomes_lib.Outcomes, config: config_lib.ExperimentConfig
  ) -> dict[str, chex.Array]:
    return reward(outcomes, config=getattr(config.method, name))

  return of_config


def fixed_budget(
  config: config_lib.ExperimentConfig,
) -> config_lib.ExperimentConfig:
  """Without a curriculum: every group has the largest budget."""
  return dataclasses.replace(
    config,
    curriculum=dataclasses.replace(
      config.curriculum,
      phase1_steps=0,
      fixed_budget=config.curriculum.max_budget,
    ),
  )


def ppo(
  config: config_lib.ExperimentConfig,
) -> config_lib.ExperimentConfig:
  """With a critic in the place of groups."""
  return dataclasses.replace(
    config, objective=dataclasses.replace(config.objective, advantage="gae")
  )
