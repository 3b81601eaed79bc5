"""The recipes of the compared systems equal configs/fidelity.csv."""

from __future__ import annotations

import csv
import pathlib

import pytest

from anysearch_jax.config import settings as config_settings
from anysearch_jax.configs import methods
from anysearch_jax.launch import flags
from anysearch_jax.training import validation

ROOT = pathlib.Path(__file__).parents[2]
SYSTEMS = (
  *("anysearch", "search_r1", "search_r1_ppo", "stepsearch"),
  *("zerosearch", "ikea", "search_o1", "bats"),
  *("research", "autorefine", "mt_grpo", "r1_searcher", "ssrl", "hiprag"),
  *("saas", "autosearch"),
)
UNTRAINED = ("search_o1", "bats")


def load(system, preset):
  return flags.load_config(f"configs/methods.py:{system}:{preset}")


def recipes(system):
  """Returns the settings of the equal and of the original recipe."""
  both = (load(system, f"qwen2_5_7b{end}") for end in ("", ":original"))
  dicts = map(config_settings.to_dict, both)
  return [dict(config_settings.leaves(values)) for values in dicts]


def tables():
  """Returns the rows (setting, equal, original) by system."""
  found = {}
  with (ROOT / "configs/fidelity.csv").open(newline="") as file:
    for system, *row in list(csv.reader(file))[1:]:
      found.setdefault(system, []).append(tuple(row[:3]))
  return found


def test_every_recipe_has_a_table():
  assert sorted(tables()) == sorted(SYSTEMS)


@pytest.mark.parametrize("system", sorted(tables()))
def test_the_table_has_the_values_of_the_configurations(system):
  rows, both = tables()[system], recipes(system)
  assert rows
  found = {
    setting: tuple(str(recipe[setting]) for recipe in both)
    for setting, *_ in rows
  }
  assert {setting: tuple(shown) for setting, *shown in rows} == found


@pytest.mark.parametrize("system", sorted(tables()))
def test_the_table_names_every_difference_of_the_recipes(system):
  equal, original = recipes(system)
  differ = {key for key in equal if equal[key] != original[key]}
  # Without a critic its settings have no effect.
  if equal["objective.advantage"] == original["objective.advantage"] == "group":
    differ = {key for key in differ if not key.startswith("critic.")}
  assert differ - {"name"} <= {setting for setting, *_ in tables()[system]}


@pytest.mark.parametrize("backbone", methods.BACKBONES)
@pytest.mark.parametrize("system", SYSTEMS)
def test_original_recipes_are_valid(system, backbone):
  config = load(system, f"{backbone}:original")
  validation.validate(config, trains=system not in UNTRAINED)
  assert config.name == f"{system}-{backbone}-original"
  assert config.policy == load(system, backbone).policy


def test_unknown_presets_are_refused():
  for system, preset, sentence in (
    ("search_r1", "original", "expected one of qwen2_5_7b"),
    ("search_r1", ":original", "expected one of qwen2_5_7b"),
    ("search_r1", "qwen2_5_7b:other", "with or without :original"),
    ("otc", "qwen2_5_7b:original", "published no recipe of their own"),
    ("beta_grpo", "qwen3_4b:original", "published no recipe of their own"),
  ):
    with pytest.raises(ValueError, match=sentence):
      load(system, preset)
