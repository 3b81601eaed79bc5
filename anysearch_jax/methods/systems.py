"""All systems, by `method.name`, and all environments, by `episode.prompts`.

configs/fidelity_rules.csv lists what differs from the code of their authors.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TypeVar

from anysearch_jax import config as config_lib
from anysearch_jax.algorithms import method
from anysearch_jax.config import settings
from anysearch_jax.environment import spec, units, wording
from anysearch_jax.host import plugins
from anysearch_jax.methods import (
  anysearch,
  bats,
  search_o1,
  search_r1,
  stepsearch,
  zerosearch,
)
from anysearch_jax.training import validation

T = TypeVar("T")

METHODS: dict[str, method.Method] = {
  module.METHOD.name: module.METHOD
  for module in (
    anysearch,
    search_r1,
    stepsearch,
    zerosearch,
    search_o1,
    bats,
  )
}
ENVIRONMENTS: dict[str, spec.Environment] = {
  name: env
  for system in METHODS.values()
  for name, env in system.environments.items()
}
WORDINGS: dict[str, wording.Wording] = {
  name: words
  for system in METHODS.values()
  for name, words in system.wordings.items()
}
"""The texts that a prompt file may replace, by environment."""


def get(name: str) -> method.Method:
  """Returns a shipped system, or a user's own.

  Args:
    name: a name of `METHODS`, or `file.py:NAME` or `module:NAME`.

  Raises:
    ValueError: no system has this name.
  """
  if plugins.is_name(name):
    return _load_own(name).value
  return _look_up("method.name", METHODS, name)


def _load_own(name: str) -> plugins.Loaded:
  return plugins.load(
    name,
    setting="method.name",
    expected="a system, anysearch_jax.Method(...)",
    fits=lambda value: isinstance(value, method.Method),
  )


def prompts_of(name: str) -> tuple[str, ...]:
  """Returns the names of a system's environments, for `episode.prompts`.

  Environments of a user's system are named `file.py:NAME#environment`.
  """
  environments = tuple(get(name).environments)
  if not plugins.is_name(name):
    return environments
  return tuple(f"{name}#{environment}" for environment in environments)


def select(
  config: config_lib.ExperimentConfig, name: str
) -> config_lib.ExperimentConfig:
  """Returns a configuration that trains a system, in its environment.

  Args:
    config: a configuration of AnySearch.
    name: name of the system, as for `get`.

  Raises:
    ValueError: no system has this name, or the configuration is not of
      AnySearch: settings of another system would remain.
  """
  if config.method.name != anysearch.METHOD.name:
    raise ValueError(
      f"--method={name}: found the settings of {config.method.name!r}, "
      "expected those of AnySearch, as in configs/quickstart.py."
    )
  world = config.data.source == "world"
  prompts = prompts_of(name)[-1 if world else 0]
  config = config_lib.changed(
    config, method={"name": name}, episode={"prompts": prompts}
  )
  return get(name).train(config)


def trained(config: config_lib.ExperimentConfig) -> method.TrainedMethod:
  """Returns the system that a run trains, with the run's constants.

  Args:
    config: the whole configuration, which a user's reward function gets.

  Raises:
    ValueError: no system has this name, the system is not trained, or
      `reward.function` cannot be loaded.
  """
  from anysearch_jax.methods import own  # Imports JAX.

  system = get(config.method.name)
  if system.reward is None:
    raise ValueError(
      f"method.name: {system.name!r} is a system without training; evaluate a "
      f"policy with episode.prompts={system.prompts} instead."
    )
  name = config.method.name
  constants = system.constants_of(config)
  reward = system.reward
  steps = system.steps
  measure = system.measure
  turns = system.turns
  if system.measurer and not config.method.judge:
    measure = system.measurer(config)
  if plugins.is_name(name):
    # The functions of a user's system are checked like single functions.
    plugin = _load_own(name)
    setting = f"method.name {name!r}"
    reward = own.reward(plugin._replace(value=reward), setting)
    if system.measures:
      measure = own.judge(
        plugin._replace(value=measure), setting, system.measures
      )
    if steps:
      steps = own.steps(plugin._replace(value=steps), setting)
    if turns:
      turns = own.turns(plugin._replace(value=turns), setting)
  if function := config.reward.function:
    loaded = plugins.load(
      function,
      setting="reward.function",
      expected="a function (outcomes, config)",
    )
    constants = config
    reward = own.reward(loaded, f"reward.function {function!r}")
  if judge := config.method.judge:
    if not system.measures:
      raise ValueError(
        f"method.judge: found {judge!r}, but {name!r} measures nothing; "
        "expected none, or a system with measures, such as search_r1."
      )
    loaded = plugins.load(
      judge, setting="method.judge", expected="a function (trajectory)"
    )
    measure = own.judge(loaded, f"method.judge {judge!r}", system.measures)
  env = of_episode(config.episode)
  if system.step is not None:
    env = dataclasses.replace(env, step=system.step)
  # The system's, also if a reward function gets the whole configuration.
  step_constants = system.constants_of(config)
  return method.TrainedMethod(
    env,
    lambda outcomes: reward(outcomes, constants),
    system.measures,
    measure,
    None if steps is None else lambda t: steps(t, step_constants),
    config.method.measure_deadline,
    None if turns is None else lambda played: turns(played, step_constants),
  )


def validate(
  config: config_lib.ExperimentConfig,
  *,
  trains: bool = True,
  samples: bool = True,
  processes: int = 1,
) -> None:
  """Refuses a configuration that cannot run; needs no device.

  Args:
    config: the configuration.
    trains: whether a policy is trained by reinforcement learning.
    samples: whether an engine samples a policy.
    processes: number of processes that train together.

  Raises:
    ValueError: names the setting, its value and the expected values.
  """
  validation.check_settings(config, trains=trains, samples=samples)
  validation.validate(
    config,
    environment=of_episode(config.episode),
    method=trained(config) if trains else None,
    samples=samples,
    processes=processes,
  )
  if trains:
    if of_episode(config.episode).last:
      raise ValueError(
        f"config.episode.prompts: found {config.episode.prompts!r}, which asks "
        "models in several conversations, so that its answers do not follow "
        "the text that a step trains on; expected documents or paper."
      )
    settings.require(
      f"episode.prompts of method.name {config.method.name}",
      config.episode.prompts,
      prompts_of(config.method.name),
    )


def environment(name: str, prompt_file: str = "") -> spec.Environment:
  """Returns an environment.

  Args:
    name: a value of `episode.prompts`: a name of `ENVIRONMENTS`, or
      `file.py:NAME#environment` for one of a user's system.
    prompt_file: path of a file with its texts; "": the shipped texts.

  Raises:
    ValueError: no environment has this name, or the file does not fit it.
  """
  played, words = _environment(name)
  if not prompt_file:
    return played
  if words is None:
    raise ValueError(
      f"config.episode.prompt_file: found {prompt_file!r} for the environment "
      f"{name!r}, whose texts are no file; expected none, or one of "
      f"{', '.join(sorted(WORDINGS))} in episode.prompts."
    )
  return words.environment(prompt_file)


def wording_of(name: str) -> wording.Wording | None:
  """Returns the texts of an environment; None if they are not in a file.

  Args:
    name: the environment's name, as for `environment`.

  Raises:
    ValueError: no environment has this name.
  """
  return _environment(name)[1]


def _environment(name: str) -> tuple[spec.Environment, wording.Wording | None]:
  """Returns an environment and its texts, by a value of `episode.prompts`."""
  system, _, inner = name.rpartition("#")
  if plugins.is_name(system):
    own_system = get(system)
    key = f"episode.prompts {system}#"
    played = _look_up(key, own_system.environments, inner)
    return played, own_system.wordings.get(inner)
  return _look_up("episode.prompts", ENVIRONMENTS, name), WORDINGS.get(name)


def of_episode(config: config_lib.EpisodeConfig) -> spec.Environment:
  """Returns the environment of a configuration.

  Args:
    config: names the environment and the files of its texts.

  Raises:
    ValueError: no environment has this name, or a file does not fit it.
  """
  env = environment(config.prompts, config.prompt_file)
  file = config.budget_file
  return units.with_budget_file(env, file) if file else env


def texts(config: config_lib.EpisodeConfig) -> wording.Texts | None:
  """Returns the texts of an environment; None if it has none in a file.

  Raises ValueError as `environment`.
  """
  words = wording_of(config.prompts)
  return None if words is None else words.texts(config.prompt_file)


def _look_up(key: str, values: Mapping[str, T], name: str) -> T:
  settings.require(f"config.{key}", name, sorted(values))
  return values[name]
