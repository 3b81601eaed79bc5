"""Tests the changes that a plan suggests if it does not fit."""

from __future__ import annotations

import dataclasses

import planned

from anysearch_jax import config as config_lib
from anysearch_jax.planning import planner

CONFIG, part = planned.CONFIG, planned.part
TRAINING = {"masters": 7.0, "moments": 14.0, "reference": 3.5}


def _advised(*parts, searched=False, **changes) -> str:
  config = dataclasses.replace(CONFIG, **changes)
  plan = planned.made(*parts, config=config)
  return "\n".join(planner.advise(plan, searched=searched))


def test_a_plan_that_fits_needs_no_advice():
  assert _advised(part(total=40, kinds=TRAINING)) == ""


def test_advice_for_a_large_state_is_devices_or_adapters():
  large = part(
    total=136, kinds={"masters": 28.0, "moments": 56.0, "reference": 14.0}
  )
  found = _advised(large)
  # Adapters remove masters, moments and gradients: 112 of 136.
  assert "lora.rank=64, lora.base_dtype=bfloat16): about 24.0 GiB" in found
  assert "2 times the devices that train (mesh.fsdp=4): about 68.0 GiB" in found
  # Only the smallest sufficient change is named; fewer tokens do not suffice.
  assert "4 times" not in found
  assert "micro_batch_tokens" not in found
  assert "--search" in found
  assert "--search" not in _advised(large, searched=True)


def test_advice_for_large_activations_is_smaller_micro_batches():
  # 31.5 GiB of state, 60 of activations.
  large = part(total=91.5, kinds=TRAINING)

  def advised(tokens):
    batch = dataclasses.replace(
      CONFIG.batch, micro_batch_tokens=tokens, remat="full"
    )
    return _advised(large, batch=batch)

  found = advised(1024)
  assert "batch.micro_batch_tokens=512: about 61.5 GiB" in found
  assert "batch.micro_batch_tokens=256" not in found
  assert "remat" not in found
  # Rows are sharded over two devices: the minimum is 256 tokens.
  assert "micro_batch_tokens" not in advised(256)


def test_advice_for_a_shared_engine_is_to_move_or_shrink_it():
  engine = {"engine weights": 3.5, "KV cache": 36.0}
  found = _advised(
    part(total=80, kinds=TRAINING, held=engine),
    part("decode", total=75, kinds=engine, held=TRAINING),
    engine=dataclasses.replace(CONFIG.engine, kv_tokens=3600),
  )
  assert "devices of its own for sampling (mesh.rollout): about 50.5" in found
  # 100 tokens take 1 GiB, and the excess is 7.2 GiB. Whole pages of 16 tokens.
  assert "engine.kv_tokens=2864: about 72.6 GiB" in found


def test_pairs_of_changes_are_named_if_no_single_one_suffices():
  kinds = {"masters": 200.0, "moments": 400.0, "reference": 100.0}
  found = _advised(part(total=1000, kinds=kinds))
  # With adapters 200 of 1000 remain: a quarter is 50, a half is too large.
  both = "lora.base_dtype=bfloat16) and 4 times the devices that train"
  assert f"{both} (mesh.fsdp=8): about 50.0 GiB" in found
  assert "2 times" not in found


def test_more_devices_do_not_shrink_the_engine():
  engine = {"engine weights": 10.0, "KV cache": 70.0}
  found = _advised(
    part(total=90, kinds=TRAINING), part("decode", total=81, kinds=engine)
  )
  *changes, _ = found.splitlines()
  assert changes
  assert all("engine.kv_tokens=" in change for change in changes)


def test_advice_says_if_no_pair_of_changes_suffices():
  found = _advised(part(total=10**6, kinds={"masters": 10**6 / 4}))
  assert found.startswith("No two changes")
  assert "activations, 750000.0 GiB a device, in the train step" in found


def test_advice_for_sampling_is_to_move_the_state_to_the_host():
  engine = {"engine weights": 3.5, "KV cache": 50.0}
  parts = (
    part(total=60, kinds=TRAINING, held={"engine weights": 3.5}),
    part("decode", total=80, kinds=engine, held=TRAINING),
  )

  def advised(**pipeline):
    return _advised(*parts, pipeline=config_lib.PipelineConfig(**pipeline))

  found = advised()
  # 14 of 80 GiB are moments, 7 masters; the first suffices.
  assert "pipeline.offload=moments): about 66.0 GiB" in found
  assert "offload=state" not in found
  # A search varies the train step, which fits.
  assert "--search" not in found
  assert "offload=moments" not in advised(offload="moments")
  assert "offload" not in advised(async_level=1)
