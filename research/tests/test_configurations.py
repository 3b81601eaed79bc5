"""The configurations of research."""

from __future__ import annotations

import jax
import pytest

import anysearch_jax as aj
from anysearch_jax import config as config_lib
from anysearch_jax.configs import quickstart
from research import fitting, other_worlds, reliability


def test_other_worlds_differ_from_the_quickstart_in_seed_and_policy():
  base, found = quickstart.get_config(), other_worlds.get_config("2")
  assert found == config_lib.changed(
    base, name="world-2", policy="runs/world-2/policy", data={"world_seed": 2}
  )


def test_the_larger_policy_has_ten_times_the_parameters():
  config = other_worlds.get_config("large")
  size = other_worlds.get_warm_start("large")
  sizes = [
    sum(leaf.size for leaf in jax.tree.leaves(policy.params))
    for policy in (
      aj.load_policy("configs/graded_world_policy"),
      fitting.fresh(aj.World(), size, seed=config.seed),
    )
  ]
  assert 9 < sizes[1] / sizes[0] < 12
  assert config.data == quickstart.get_config().data


@pytest.mark.parametrize("preset", ["0", "-1", "one", "1.5", ""])
def test_a_world_that_is_no_other_world_is_refused(preset):
  with pytest.raises(ValueError, match="expected the seed of a world, from 1"):
    other_worlds.get_config(preset)


def test_trust_costs_little_where_memory_is_reliable():
  assert reliability.costs_of_trust(0.65, 12).shape == (8,)
  assert reliability.costs_of_trust(0.65, 12).mean() > 0.1
  assert reliability.costs_of_trust(1.0, 12).mean() < 0.05
  assert reliability.get_config("0.9").data.world_reliability == 0.9
  with pytest.raises(ValueError, match=r"expected one of 0\.2, 0\.35"):
    reliability.get_config("0.7")
