"""Tests the quickstart's presets."""

from __future__ import annotations

import pathlib

import pytest

from anysearch_jax.config import settings as config_settings
from anysearch_jax.training import validation
from configs import quickstart, qwen3_4b

ROOT = pathlib.Path(__file__).resolve().parents[2]


def differences(one, other):
  found = config_settings.changes(config_settings.to_dict(one), other)
  return {change.path: change.new for change in found}


@pytest.mark.parametrize("preset", quickstart.PRESETS)
def test_presets_train_from_the_shipped_policy(preset):
  config = quickstart.get_config(preset)
  validation.validate(config)
  assert (ROOT / config.policy / "config.json").is_file()
  assert config.curriculum.max_budget == (5 if preset == "search_r1" else 8)


def test_presets_differ_only_in_what_they_are_named_for():
  base = quickstart.get_config()
  assert base == quickstart.get_config("anysearch")

  def change(preset):
    found = differences(base, quickstart.get_config(preset))
    assert found.pop("name") == f"quickstart-{preset}"
    return found

  assert change("no_tool") == {"reward.gamma_mode": "off"}
  assert change("priced") == {
    "objective.normalize": "batch",
    "reward.gamma_mode": "fixed",
    "reward.gamma_fixed": 0.1,
    "reward.use_rel": False,
  }
  assert change("search_r1") == {
    "reward.alpha": 1.0,
    "reward.beta": 0.0,
    "reward.delta": 0.0,
    "reward.gamma_mode": "off",
    "curriculum.max_budget": 5,
    "curriculum.phase1_steps": 0,
    "curriculum.fixed_budget": 5,
  }


def test_the_priced_preset_of_a_backbone_changes_the_objective_alone():
  found = differences(qwen3_4b.get_config(), qwen3_4b.get_config("priced"))
  assert found == {
    "name": "qwen3_4b-priced",
    "objective.normalize": "batch",
    "reward.gamma_mode": "fixed",
    "reward.gamma_fixed": 0.1,
    "reward.use_rel": False,
  }


def test_an_unknown_preset_is_refused():
  with pytest.raises(ValueError, match="'thrifty', expected one of anysearch"):
    quickstart.get_config("thrifty")
