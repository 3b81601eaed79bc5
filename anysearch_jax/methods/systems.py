"""All systems, by `method.name`, and all environments, by `episode.prompts`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from anysearch_jax import config as config_lib
from anysearch_jax.environment import spec, units, wording
from anysearch_jax.methods import (
  anysearch,
  autorefine,
  bats,
  beta_grpo,
  hiprag,
  ikea,
  method,
  mt_grpo,
  otc,
  own_reward,
  r1_searcher,
  research,
  search_o1,
  search_r1,
  ssrl,
  stepsearch,
  zerosearch,
)

T = TypeVar("T")
X = TypeVar("X")

METHODS: dict[str, method.Method] = {
  each.name: each
  for each in (
    anysearch.METHOD,
    search_r1.METHOD,
    stepsearch.METHOD,
    zerosearch.METHOD,
    search_o1.METHOD,
    bats.METHOD,
    otc.METHOD,
    ikea.METHOD,
    research.METHOD,
    autorefine.METHOD,
    mt_grpo.METHOD,
    r1_searcher.METHOD,
    ssrl.METHOD,
    hiprag.METHOD,
    beta_grpo.METHOD,
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
_SHIPPED = frozenset(METHODS)


def register(added: method.Method) -> None:
  """Adds a system, which `method.name` and `episode.prompts` may then name.

  It is known to this process only. Registering its name again replaces it.

  Raises:
    ValueError: a shipped system has its name, or one of its environments' names
      for another environment.
  """
  for name, env in added.environments.items():
    if any(METHODS[s].environments.get(name, env) is not env for s in _SHIPPED):
      raise ValueError(
        f"Method {added.name!r}: found environment {name!r}, which a shipped "
        "system has; expected another name."
      )
  if added.name in _SHIPPED:
    raise ValueError(
      f"Method {added.name!r}: found the name of a shipped system; expected "
      "another one."
    )
  METHODS[added.name] = added
  ENVIRONMENTS.update(added.environments)
  WORDINGS.update(added.wordings)


def get(name: str) -> method.Method:
  """Returns a system. Raises ValueError if no system has this name."""
  return _named("method.name", METHODS, name)


def trained(config: config_lib.ExperimentConfig) -> method.TrainedMethod:
  """Returns the system that a run trains, with the run's constants.

  It takes the whole configuration because a reward function of the user's gets
  that.

  Raises:
    ValueError: no system has this name, the system is not trained, or
      `reward.function` cannot be loaded.
  """
  system = get(config.method.name)
  if system.reward is None:
    raise ValueError(
      f"method.name: {system.name!r} is a system without training; evaluate a "
      f"policy with episode.prompts={system.prompts} instead."
    )
  constants, steps = system.constants(config), system.steps
  if config.reward.function:
    reward = own_reward.reward(config.reward.function, config)
  else:
    reward = functools.partial(_call, system.reward, constants)
  return method.TrainedMethod(
    of_episode(config.episode),
    reward,
    system.measures,
    system.measurer(config) if system.measurer else system.measure,
    None if steps is None else functools.partial(_call, steps, constants),
    config.method.measure_deadline,
  )


def _call(function: Callable[[X, Any], T], constants: Any, given: X) -> T:
  return function(given, constants)


def environment(name: str, prompt_file: str = "") -> spec.Environment:
  """Returns an environment, with the texts of a file if one is given.

  Raises:
    ValueError: no environment has this name, or the file does not fit it.
  """
  found = _named("episode.prompts", ENVIRONMENTS, name)
  return _wording(name).environment(prompt_file) if prompt_file else found


def of_episode(config: config_lib.EpisodeConfig) -> spec.Environment:
  """Returns the environment of a configuration.

  Raises:
    ValueError: as `environment`, or as `units.replaced`.
  """
  env = environment(config.prompts, config.prompt_file)
  file = config.budget_file
  return units.replaced(env, file) if file else env


def texts(config: config_lib.EpisodeConfig) -> wording.Texts | None:
  """Returns the texts of an environment; None if it has none in a file.

  Raises:
    ValueError: as `environment`.
  """
  environment(config.prompts, config.prompt_file)
  if config.prompts not in WORDINGS:
    return None
  return WORDINGS[config.prompts].texts(config.prompt_file)


def _wording(name: str) -> wording.Wording:
  if name not in WORDINGS:
    raise ValueError(
      f"config.episode.prompt_file: found a file for the environment {name!r}, "
      "whose texts are no file; expected one of "
      f"{', '.join(sorted(WORDINGS))} in episode.prompts."
    )
  return WORDINGS[name]


def _named(key: str, known: Mapping[str, T], name: str) -> T:
  if name not in known:
    raise ValueError(
      f"config.{key}: found {name!r}, expected one of "
      f"{', '.join(sorted(known))}."
    )
  return known[name]
