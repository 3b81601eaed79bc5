"""Tests the configurations of the graded world."""

from __future__ import annotations

import pathlib

import pytest

from anysearch_jax.config import changes
from anysearch_jax.config import values as config_values
from anysearch_jax.training import validation
from configs import fair, quickstart_search_r1

ROOT = pathlib.Path(__file__).resolve().parents[2]


def differences(one, other):
  found = changes.changes(config_values.to_dict(one), other)
  return {change.path: change.new for change in found}


@pytest.mark.parametrize("preset", fair.PRESETS)
def test_presets_train_in_the_graded_world_from_one_policy(preset):
  config = fair.get_config(preset)
  validation.validate(config)
  assert config.data.world == "graded"
  assert (ROOT / config.policy / "config.json").is_file()


def test_presets_differ_only_in_what_they_are_named_for():
  base = fair.get_config()
  assert base == fair.get_config("anysearch")
  assert base.curriculum.max_budget == 8
  assert differences(base, fair.get_config("no_tool")) == {
    "reward.gamma_mode": "off"
  }
  assert differences(base, fair.get_config("priced")) == {
    "objective.normalize": "batch",
    "reward.gamma_mode": "fixed",
    "reward.gamma_fixed": 0.1,
    "reward.use_rel": False,
  }
  search_r1 = fair.get_config("search_r1")
  of_quickstart = quickstart_search_r1.get_config()
  assert search_r1.curriculum == of_quickstart.curriculum
  assert search_r1.reward == of_quickstart.reward
  assert search_r1.curriculum.total_steps == base.curriculum.total_steps


def test_an_unknown_preset_is_refused():
  with pytest.raises(ValueError, match="'thrifty', expected one of anysearch"):
    fair.get_config("thrifty")
