"""The configurations of research, and the warm start under caps on tokens."""

from __future__ import annotations

import dataclasses

import pytest

import anysearch_jax as aj
from anysearch_jax import config as config_lib
from configs import quickstart
from research import dual_budgets, other_worlds, warm_start


def test_other_worlds_differ_from_the_quickstart_in_seed_and_policy():
  base, found = quickstart.get_config(), other_worlds.get_config("2")
  assert found == config_lib.changed(
    base, name="world-2", policy="runs/world-2/policy", data={"world_seed": 2}
  )


@pytest.mark.parametrize("preset", ["0", "-1", "one", "1.5", ""])
def test_a_world_that_is_no_other_world_is_refused(preset):
  with pytest.raises(ValueError, match="expected the seed of a world, from 1"):
    other_worlds.get_config(preset)


def test_a_policy_learns_from_demonstrations_under_caps(tmp_path):
  config = dual_budgets.get_config()
  aj.validate(config)
  small = dataclasses.replace(
    config.warm_start, steps=2, demonstrations=24, batch_tokens=600
  )
  config = dataclasses.replace(config, warm_start=small)
  start = aj.load_policy("configs/graded_world_policy")
  made = warm_start.fitted(config, start, tmp_path / "saved", caps=(20, 40))
  changed = made.params["embed"] != start.params["embed"]
  assert changed.any() and made.architecture == start.architecture
  answered, right = warm_start.play(config, made, aj.Budget(5, 60), 8)
  assert 0 <= right <= answered <= 1
