"""Tests the quickstart's presets, in the default world and in the fixed one."""

from __future__ import annotations

import pathlib

import pytest

from anysearch_jax.config import changes
from anysearch_jax.config import values as config_values
from anysearch_jax.training import validation
from configs import (
  ablations,
  fixed_world,
  other_worlds,
  quickstart,
  qwen3_4b,
)
from launch import flags

ROOT = pathlib.Path(__file__).resolve().parents[2]


def differences(one, other):
  found = changes.changes(config_values.to_dict(one), other)
  return {change.path: change.new for change in found}


@pytest.mark.parametrize("preset", quickstart.PRESETS)
@pytest.mark.parametrize(
  "file, world, max_budget",
  [(quickstart, "graded", 8), (fixed_world, "fixed", 5)],
)
def test_presets_train_in_one_world_from_one_policy(
  file, world, max_budget, preset
):
  config = file.get_config(preset)
  validation.validate(config)
  assert config.data.world == world
  assert config.policy == f"configs/{world}_world_policy"
  assert (ROOT / config.policy / "config.json").is_file()
  expected = 5 if preset == "search_r1" else max_budget
  assert config.curriculum.max_budget == expected


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


@pytest.mark.parametrize("preset", quickstart.PRESETS)
def test_the_fixed_world_changes_the_world_its_start_and_its_steps(preset):
  names = {
    "name",
    "policy",
    "data.world",
    "warm_start.expert",
    "warm_start.demonstrations",
    "curriculum.max_budget",
    "curriculum.phase1_steps",
    "curriculum.total_steps",
    "curriculum.steps_per_rollout",
    "optimizer.decay",
  }
  if preset == "search_r1":  # Its budget is 5 in both worlds.
    names -= {"curriculum.max_budget", "curriculum.phase1_steps"}
  found = differences(
    quickstart.get_config(preset), fixed_world.get_config(preset)
  )
  assert set(found) == names
  assert found["name"].startswith("fixed_world")


@pytest.mark.parametrize(
  "row, preset",
  [
    ("priced", "priced"),
    ("no_tool", "no_tool"),
    ("search_r1", "search_r1"),
  ],
)
def test_rows_of_the_study_are_the_presets(row, preset):
  base = quickstart.get_config()
  rows = {each.name: each for each in ablations.rows(base)}
  found = flags.override(base, rows[row].overrides)
  expected = quickstart.get_config(preset)
  assert differences(found, expected) == {"name": expected.name}


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


def test_other_worlds_differ_from_the_quickstart_in_seed_and_policy():
  found = differences(quickstart.get_config(), other_worlds.get_config("2"))
  assert found == {
    "name": "world-2",
    "policy": "runs/world-2/policy",
    "data.world_seed": 2,
  }


@pytest.mark.parametrize("preset", ["0", "-1", "one", "1.5", ""])
def test_a_world_that_is_no_other_world_is_refused(preset):
  with pytest.raises(ValueError, match="expected the seed of a world, from 1"):
    other_worlds.get_config(preset)
