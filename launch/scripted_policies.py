"""Policies without a model, by the name that `--scripted` gives."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from launch import parts


def find(name: str, source: parts.Source | None) -> Callable[..., Any]:
  """Returns the function of (config, source) that makes an engine and codec.

  Args:
    name: a policy of the generated world, see `world.expert_policy` and
      `world.priced_policy`, or `module:function`.
    source: source of the questions.

  Raises:
    ValueError: there is no such policy, or it knows another source.
  """
  from anysearch_jax.world import expert_policy, priced_policy

  module, _, function = name.partition(":")
  names = (*expert_policy.NAMES, *priced_policy.NAMES)
  if module in names:
    from launch import world_source

    if not isinstance(source, world_source.WorldSource):
      raise ValueError(
        f"--scripted={name}: it knows the generated world only; expected "
        "data.source 'world'."
      )
    world = source.world
    if module in priced_policy.NAMES:
      return lambda config, source: priced_policy.named(
        name, world, config.evaluation.prices
      )
    made = expert_policy.named(name, world)
    return lambda config, source: made
  try:
    make = getattr(importlib.import_module(module), function)
  except (ImportError, AttributeError, ValueError) as error:
    raise ValueError(
      f"--scripted={name}: {error}; expected one of "
      f"{', '.join(names)}, or module:function."
    ) from error
  if not callable(make):
    raise ValueError(f"--scripted={name}: {make!r} is no function.")
  return make
