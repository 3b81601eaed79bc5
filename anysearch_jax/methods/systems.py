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
  own,
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
  for each in METHODS.values()
  for name, env in each.environments.items()
}
WORDINGS: dict[str, wording.Wording] = {
  name: words
  for each in METHODS.values()
  for name, words in each.wordings.items()
}
"""The texts that a prompt file may replace, by environment."""


def get(name: str) -> method.Method:
  """Returns a shipped system, or a user's (`file.py:NAME`).

  Raises ValueError if no system has this name.
  """
  if plugins.is_name(name):
    return _own(name).value
  return _named("method.name", METHODS, name)


def _own(name: str) -> plugins.Loaded:
  return plugins.load(
    name,
    setting="method.name",
    expected="a system, anysearch_jax.Method(...)",
    fits=lambda value: isinstance(value, method.Method),
  )


def prompts_of(name: str) -> tuple[str, ...]:
  """Returns the values of `episode.prompts` that a system is played with.

  Those of a user's system are `file.py:NAME#environment`.
  """
  known = tuple(get(name).environments)
  if not plugins.is_name(name):
    return known
  return tuple(f"{name}#{each}" for each in known)


def select(
  config: config_lib.ExperimentConfig, name: str
) -> config_lib.ExperimentConfig:
  """Returns a configuration that trains a system, in its environment.

  Raises:
    ValueError: no system has this name, or the configuration is not of
      AnySearch: what another system set would remain.
  """
  if config.method.name != anysearch.METHOD.name:
    raise ValueError(
      f"--method={name}: found the settings of {config.method.name!r}, "
      "expected those of AnySearch, as in configs/quickstart.py."
    )
  world = config.data.source == "world"
  prompts = prompts_of(name)[-1 if world else 0]
  named = {"method": {"name": name}, "episode": {"prompts": prompts}}
  return get(name).train(config_lib.changed(config, **named))


def trained(config: config_lib.ExperimentConfig) -> method.TrainedMethod:
  """Returns the system that a run trains, with the run's constants.

  It takes the whole configuration because a reward function of the user's gets
  that. Raises ValueError if no system has this name, the system is not trained,
  or `reward.function` cannot be loaded.
  """
  system = get(config.method.name)
  if system.reward is None:
    raise ValueError(
      f"method.name: {system.name!r} is a system without training; evaluate a "
      f"policy with episode.prompts={system.prompts} instead."
    )
  constants, name = system.constants_of(config), config.method.name
  reward, steps, measure = system.reward, system.steps, system.measure
  turns = system.turns
  if system.measurer and not config.method.judge:
    measure = system.measurer(config)
  if plugins.is_name(name):
    change, where = _own(name)._replace, f"method.name {name!r}"
    reward = own.reward(change(value=reward), where)
    if system.measures:
      measure = own.judge(change(value=measure), where, system.measures)
    if steps:
      steps = own.steps(change(value=steps), where)
    if turns:
      turns = own.turns(change(value=turns), where)
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
  played = of_episode(config.episode)
  if system.step is not None:
    played = dataclasses.replace(played, step=system.step)
  return method.TrainedMethod(
    played,
    lambda outcomes: reward(outcomes, constants),
    system.measures,
    measure,
    None if steps is None else lambda t: steps(t, system.constants_of(config)),
    config.method.measure_deadline,
    turns,
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
    processes: how many train together.

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
    settings.require(
      f"episode.prompts of method.name {config.method.name}",
      config.episode.prompts,
      prompts_of(config.method.name),
    )


def environment(name: str, prompt_file: str = "") -> spec.Environment:
  """Returns an environment, with the texts of a file if one is given.

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
  """Returns the texts of an environment; None if they are no file.

  Raises ValueError as `environment`.
  """
  return _environment(name)[1]


def _environment(name: str) -> tuple[spec.Environment, wording.Wording | None]:
  """Returns the environment of a value of `episode.prompts`, and its texts.

  It is one of the shipped systems or, for `file.py:NAME#environment`, of a
  user's system.
  """
  system, _, inner = name.rpartition("#")
  if plugins.is_name(system):
    own_system = get(system)
    key = f"episode.prompts {system}#"
    played = _named(key, own_system.environments, inner)
    return played, own_system.wordings.get(inner)
  return _named("episode.prompts", ENVIRONMENTS, name), WORDINGS.get(name)


def of_episode(config: config_lib.EpisodeConfig) -> spec.Environment:
  """Returns the environment of a configuration.

  Raises ValueError as `environment`, or as `units.replaced`.
  """
  env = environment(config.prompts, config.prompt_file)
  file = config.budget_file
  return units.replaced(env, file) if file else env


def texts(config: config_lib.EpisodeConfig) -> wording.Texts | None:
  """Returns the texts of an environment; None if it has none in a file.

  Raises ValueError as `environment`.
  """
  words = wording_of(config.prompts)
  return None if words is None else words.texts(config.prompt_file)


def _named(key: str, known: Mapping[str, T], name: str) -> T:
  settings.require(f"config.{key}", name, sorted(known))
  return known[name]
