"""The recipes of the compared systems equal configs/fidelity.csv."""

from __future__ import annotations

import pathlib

import fidelity
import pytest

from anysearch_jax.configs import methods
from anysearch_jax.launch import flags
from anysearch_jax.methods import systems

ROOT = pathlib.Path(__file__).parents[2]
FILE = "configs/methods.py"
SYSTEMS = (
  "anysearch",
  "search_r1",
  "search_r1_ppo",
  "stepsearch",
  "zerosearch",
  "search_o1",
  "bats",
)
UNTRAINED = ("search_o1", "bats")


def load(system, preset):
  return flags.load_config(f"{FILE}:{system}:{preset}")


TABLES = fidelity.tables(ROOT / "configs/fidelity.csv")


def test_every_recipe_has_a_table():
  assert sorted(TABLES) == sorted(SYSTEMS)


@pytest.mark.parametrize("system", sorted(TABLES))
def test_the_table_has_the_values_of_the_configurations(system):
  both = fidelity.recipes(FILE, system)
  fidelity.assert_has_values(TABLES[system], both)
  fidelity.assert_names_every_difference(TABLES[system], both)


@pytest.mark.parametrize("backbone", methods.BACKBONES)
@pytest.mark.parametrize("system", SYSTEMS)
def test_original_recipes_are_valid(system, backbone):
  config = load(system, f"{backbone}:original")
  systems.validate(config, trains=system not in UNTRAINED)
  assert config.name == f"{system}-{backbone}-original"
  assert config.policy == load(system, backbone).policy


def test_unknown_presets_are_refused():
  for system, preset, sentence in (
    ("search_r1", "original", "expected one of qwen2_5_7b"),
    ("search_r1", ":original", "expected one of qwen2_5_7b"),
    ("search_r1", "qwen2_5_7b:other", "with or without :original"),
  ):
    with pytest.raises(ValueError, match=sentence):
      load(system, preset)
