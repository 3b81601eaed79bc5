"""The bytes of a version that servers get, by the shapes of policies."""

from __future__ import annotations

import pathlib

import pytest

from anysearch_jax import config as config_lib
from anysearch_jax.host import json_files
from anysearch_jax.planning import plan
from anysearch_jax.policy import hf_architecture

_SHAPES = pathlib.Path(__file__).parents[2] / "configs" / "shapes"
# Parameters by the models' cards; of adapters of rank 32 on every projection,
# 32 (inputs + outputs) of the seven matrices, summed by hand over the layers.
_POLICIES = [
  ("Qwen3-4B", 4_022_468_096, 36 * 32 * 57_344),
  ("Qwen2.5-7B-Instruct", 7_615_616_512, 28 * 32 * 90_112),
]


@pytest.mark.parametrize(("name", "whole", "adapted"), _POLICIES)
def test_adapters_are_a_fiftieth_of_whole_weights(name, whole, adapted):
  a = hf_architecture.from_hf(json_files.read(_SHAPES / f"{name}.json"))
  config = config_lib.ExperimentConfig(compute_dtype="bfloat16")
  assert plan.sent_bytes_sentence(config, a) == []
  served = config_lib.changed(config, engine={"kind": "sglang"})
  gb = f"{2 * whole / 1e9:.1f} GB"
  assert plan.sent_bytes_sentence(served, a) == [f"Servers get {gb} a version."]
  deltas = config_lib.changed(served, servers={"deltas": True})
  assert plan.sent_bytes_sentence(deltas, a) == [
    f"Servers get {gb} a version at most, as deltas (servers.deltas)."
  ]
  lora = config_lib.changed(served, lora={"rank": 32})
  assert plan.sent_bytes_sentence(lora, a) == [
    f"Servers get {2 * adapted / 1e6:.0f} MB of adapters a version, and "
    f"once {gb} of the base."
  ]
  assert 2 * adapted < 2 * whole / 50
