"""Compares a table of fidelity with the recipes of its configurations."""

from __future__ import annotations

import csv
import dataclasses

from anysearch_jax.config import settings as config_settings
from anysearch_jax.launch import flags
from anysearch_jax.methods import systems


def recipes(file, system):
  """Returns the settings of the equal and of the original recipe.

  Args:
    file: of configurations, such as configs/methods.py.
    system: the name of its preset.
  """
  return [
    _settings(flags.load_config(f"{file}:{system}:qwen2_5_7b{end}"))
    for end in ("", ":original")
  ]


def _settings(config):
  """Returns the settings, and the options of the system by `options.NAME`."""
  found = dict(config_settings.leaves(config_settings.to_dict(config)))
  given = found.pop("method.options")
  method = systems.get(config.method.name)
  if method.options is None:
    assert not given
    return found
  options = dataclasses.asdict(method.constants_of(config))
  return found | {f"options.{name}": value for name, value in options.items()}


def tables(path):
  """Returns the rows (setting, equal, original) by system."""
  found = {}
  with path.open(newline="") as file:
    for system, *row in list(csv.reader(file))[1:]:
      found.setdefault(system, []).append(tuple(row[:3]))
  return found


def assert_has_values(rows, both):
  """Compares rows of a table with the two recipes of their system."""
  found = {
    setting: tuple(str(recipe[setting]) for recipe in both)
    for setting, *_ in rows
  }
  assert rows and {setting: tuple(shown) for setting, *shown in rows} == found


def assert_names_every_difference(rows, both):
  equal, original = both
  differ = {key for key in equal if equal[key] != original[key]}
  # Without a critic its settings have no effect.
  if equal["objective.advantage"] == original["objective.advantage"] == "group":
    differ = {key for key in differ if not key.startswith("critic.")}
  assert differ - {"name"} <= {setting for setting, *_ in rows}
