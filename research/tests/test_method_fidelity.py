"""The recipes of the plug-ins equal research/methods/fidelity.csv."""

from __future__ import annotations

import pathlib

import fidelity
import pytest

import anysearch_jax as aj
from anysearch_jax.configs import methods as configs
from research import methods, study

FILE = "research/methods/configs.py"
TABLES = fidelity.tables(pathlib.Path(methods.__file__).parent / "fidelity.csv")
# Their authors published no recipe.
WITHOUT = {"otc", "beta_grpo", "bavt", "slimsearcher"}


def test_every_recipe_has_a_table():
  assert {*TABLES} == {*methods.COMPARED} - WITHOUT


@pytest.mark.parametrize("system", sorted(TABLES))
def test_the_table_has_the_values_of_the_configurations(system):
  both = fidelity.recipes(FILE, system)
  fidelity.assert_has_values(TABLES[system], both)
  fidelity.assert_names_every_difference(TABLES[system], both)


@pytest.mark.parametrize("backbone", configs.BACKBONES)
@pytest.mark.parametrize("system", sorted(TABLES))
def test_original_recipes_are_valid(system, backbone):
  config = study.load_config(f"{FILE}:{system}:{backbone}:original")
  aj.validate(config)
  assert config.name == f"{system}-{backbone}-original"


@pytest.mark.parametrize("system", sorted(WITHOUT))
def test_a_system_without_a_recipe_is_refused(system):
  with pytest.raises(ValueError, match="published no recipe of their own"):
    study.load_config(f"{FILE}:{system}:qwen2_5_7b:original")
