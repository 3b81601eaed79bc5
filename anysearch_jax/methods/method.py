"""The type of a compared system; `systems` lists all of them.

A `Method` holds what differs between systems: environments, reward and
training settings. All systems share the driver, the engines, the train step
and the evaluation. A `TrainedMethod` is a method in one run: its functions have
the constants of the run's configuration.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import chex
import numpy as np

from anysearch_jax import config as config_lib
from anysearch_jax import types
from anysearch_jax.environment import spec, wording
from anysearch_jax.methods import outcomes as outcomes_lib

# (outcomes, constants) -> float32 arrays `[..., G]` by name.
Reward = Callable[[outcomes_lib.Outcomes, Any], dict[str, chex.Array]]


# Values by name; a coroutine function, if it asks a server for them.
Measure = Callable[
  [types.Trajectory], Mapping[str, float] | Awaitable[Mapping[str, float]]
]


def _nothing(trajectory: types.Trajectory) -> dict[str, float]:
  return {}


@dataclasses.dataclass(frozen=True)
class Method:
  """A compared system.

  Attributes:
    name: the value of `method.name` that selects it.
    label: its name in tables.
    environments: its environments, by their value of `episode.prompts`; the
      first is for language models, the last for the generated world.
    wordings: the texts of those environments that `episode.prompt_file` may
      replace.
    constants: returns the part of a configuration that `reward` and `steps`
      get as their second argument; the default is all of it.
    reward: maps the outcomes of groups to float32 arrays `[..., G]` by name;
      `total` is the reward, the others are its terms. None if the system is
      not trained.
    train: returns a configuration with this system's training settings; it
      does not choose the environment.
    measures: the keys of the dictionary that `measure` returns.
    measure: computes values that the reward needs from a trajectory.
      It is not called for failed trajectories. It may be a coroutine function
      that raises `types.EngineError` or `types.RetrievalError` if a server is
      out of reach; the trajectory then counts as failed, as one does that takes
      longer than `method.measure_deadline`.
    measurer: makes `measure` of a configuration, for one that needs more than
      the trajectory, such as a judge's address; None: it is `measure`.
    steps: returns the reward of each search of a trajectory, float32
      `[searches]`, in the order of `search_ends`. None if the system has no
      step rewards.
  """

  name: str
  label: str
  environments: Mapping[str, spec.Environment]
  wordings: Mapping[str, wording.Wording] = dataclasses.field(
    default_factory=dict
  )
  constants: Callable[[config_lib.ExperimentConfig], Any] = lambda whole: whole
  reward: Reward | None = None
  train: Callable[
    [config_lib.ExperimentConfig], config_lib.ExperimentConfig
  ] = lambda config: config
  measures: tuple[str, ...] = ()
  measure: Measure = _nothing
  measurer: Callable[[config_lib.ExperimentConfig], Measure] | None = None
  steps: Callable[[types.Trajectory, Any], np.ndarray] | None = None

  @property
  def prompts(self) -> str:
    """The name of its environment for language models."""
    return tuple(self.environments)[0]

  @property
  def world_prompts(self) -> str:
    """The name of its environment for the generated world."""
    return tuple(self.environments)[-1]


@dataclasses.dataclass(frozen=True)
class TrainedMethod:
  """A method as a run trains it; see `Method` for the attributes.

  environment: the one that the run plays.
  reward, steps: without their second argument.
  measure_deadline: seconds in which an asynchronous `measure` ends.
  """

  environment: spec.Environment
  reward: Callable[[outcomes_lib.Outcomes], dict[str, chex.Array]]
  measures: tuple[str, ...]
  measure: Measure
  steps: Callable[[types.Trajectory], np.ndarray] | None = None
  measure_deadline: float = 120.0


def of_arrays(reward: Callable[..., dict[str, chex.Array]]) -> Reward:
  """Returns `reward(outcomes, config=constants)` of the numeric outcomes.

  It makes a jitted function a `Reward`: JAX traces arrays of numbers only.
  """

  def traced(
    outcomes: outcomes_lib.Outcomes, constants: Any
  ) -> dict[str, chex.Array]:
    arrays = outcomes._replace(answers=None, trajectories=None)
    return reward(arrays, config=constants)

  return traced


def fixed_budget(
  config: config_lib.ExperimentConfig,
) -> config_lib.ExperimentConfig:
  """Replaces the curriculum: every group gets the largest budget."""
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
  """Replaces group-relative advantages by those of a critic (GAE)."""
  return dataclasses.replace(
    config, objective=dataclasses.replace(config.objective, advantage="gae")
  )
