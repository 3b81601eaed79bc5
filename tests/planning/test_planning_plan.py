"""Tests plans and what they suggest."""

from __future__ import annotations

import dataclasses
import json

import jax
import planned
import pytest

from anysearch_jax import config as config_lib
from anysearch_jax.planning import (
  compilation,
  plan,
  programs,
  targets,
  whole_step,
)

GIB = 2**30
A, CONFIG = planned.A, planned.CONFIG
made, part = planned.made, planned.part
TRAINING = {"masters": 7.0, "moments": 14.0, "reference": 3.5}


@pytest.mark.parametrize(
  ("train", "verdict"),
  [
    (
      {"total": 50},
      "fits: at most 60.0 of 72.8 GiB a device, in the decode. "
      "A step takes about 6.0 s, if it is as efficient as MaxText's "
      "published steps.",
    ),
    ({"total": 73}, "does not fit: train step 73.0 of 72.8 GiB a device."),
    # Bytes that other programs keep count.
    (
      {"total": 73, "held": {"KV cache": 30}},
      "does not fit: train step 73.0 of 72.8 GiB a device.",
    ),
    # The compiler refused it.
    (
      {"total": 10, "refused": True},
      "does not fit: train step 10.0 of 72.8 GiB a device.",
    ),
  ],
)
def test_a_plan_fits_if_its_largest_program_fits(train, verdict):
  found = made(part(kinds=TRAINING, **train), part("decode", total=60))
  assert found.verdict == verdict
  assert found.fits == verdict.startswith("fits")


def test_text_has_all_numbers():
  text = plan.text(
    made(
      part(total=40, kinds=TRAINING, held={"KV cache": 1.25}),
      part("decode", total=20, kinds={"KV cache": 1.25}),
    )
  )
  for words in (
    *("toy on h100:4", "8.000 B parameters, all trained", "masters"),
    *("gradients", "(1.25)", "72.77", "whole step", "Verdict: fits"),
    "This is assumed.",
  ):
    assert words in text
  # Columns are aligned.
  table = text.split("\n\n")[1].splitlines()
  ends = {len(line) for line in table if line.endswith(("40.00", "20.00"))}
  assert len(ends) == 1


def test_a_run_takes_the_hours_of_all_its_steps():
  curriculum = config_lib.CurriculumConfig(total_steps=1500)
  config = dataclasses.replace(CONFIG, curriculum=curriculum)
  step = whole_step.Step({"decode": 36.0}, training=36.0, overlapped=False)
  whole = made(part(kinds=TRAINING), config=config, step=step)
  (line,) = [x for x in plan.text(whole).splitlines() if "hours of" in x]
  assert line.split() == "hours of 1,500 steps 30.0".split()
  assert json.loads(plan.to_json(whole))["run_hours"] == 30.0


def test_json_holds_numbers():
  whole = made(part(total=40, kinds=TRAINING, held={"KV cache": 1.0}))
  found = json.loads(plan.to_json(whole))
  train = found["programs"]["train step"]
  assert found["fits"] is True
  assert found["capacity_bytes"] == whole.target.capacity
  # 24.5 GiB of arguments; temporaries without gradients are activations.
  assert train["kinds_bytes"]["masters"] == 7 * GIB
  assert train["kinds_bytes"]["gradients"] == 7 * GIB
  assert train["kinds_bytes"]["activations"] == (39 - 24.5 - 7) * GIB
  assert train["held_bytes"] == {"KV cache": GIB}
  assert found["step_seconds"] == {
    "decode": 2.0,
    "training": 4.0,
    "whole step": 6.0,
  }


@pytest.mark.parametrize(
  ("mesh", "sentence"),
  [
    ({"fsdp": 4, "tensor": 2}, "needs more devices than h100:4 has"),
    ({"fsdp": 2, "trainer": (4, 5)}, "needs more devices than h100:4 has"),
    ({"fsdp": 4, "rollout": (3, 4)}, "are not all on one h100:4"),
  ],
)
def test_a_mesh_larger_than_the_target_is_refused(mesh, sentence):
  with pytest.raises(ValueError, match=sentence):
    plan.devices(config_lib.MeshConfig(**mesh), targets.parse("h100:4"))


@pytest.mark.parametrize("name", ["h100:4", "v5p:2x2x1"])
def test_rollout_devices_beyond_the_target_are_another_target(name):
  planned.need(name)
  mesh = config_lib.MeshConfig(
    fsdp=4, trainer=(0, 1, 2, 3), rollout=(4, 5, 6, 7)
  )
  devices = plan.devices(mesh, targets.parse(name))
  assert len(set(devices)) == 8


@pytest.fixture(scope="module")
def toy():
  with pytest.MonkeyPatch.context() as patch:
    target = planned.on_cpu(patch)
    lines = []
    yield plan.make(CONFIG, A, target, log=lines.append), lines


def test_a_configuration_is_planned_program_by_program(toy):
  whole, lines = toy
  names = ["train step", "prefill", "decode"]
  assert [p.name for p in whole.parts] == [*names, "hand-over"]
  assert [line.split(" for ")[0] for line in lines] == [
    f"compiling the {name}" for name in names
  ]
  assert whole.fits
  # The embedding, and the matrices and norms of a layer.
  layer = 64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 128 + 2 * 64 + 2 * 16
  parameters = 512 * 64 + 2 * layer + 64
  assert whole.parameters == whole.trained == parameters


def test_a_hand_over_has_one_copy_of_the_weights_and_a_cast_one(toy):
  train, _, decode, hand_over = toy[0].parts
  weights = decode.kinds["engine weights"]
  masters = train.kinds["masters"]
  assert hand_over.peak == weights + masters // 2
  # The cache is freed for training, and the state is still on the device.
  assert set(hand_over.held) == {"masters", "moments", "reference"}


@pytest.mark.parametrize(
  ("apart", "cast"),
  [
    # float32 masters of 4 GiB are cast to 2, which become weights of 1.5.
    (False, 2.0),
    # The sampling devices receive the copy.
    (True, 1.5),
  ],
)
def test_a_hand_over_is_counted_by_hand(apart, cast):
  devices = jax.devices()

  def program(device, **gib):
    placed = jax.sharding.SingleDeviceSharding(device)
    kinds = {
      name.replace("_", " "): jax.ShapeDtypeStruct(
        (int(size * GIB),), "int8", sharding=placed
      )
      for name, size in gib.items()
    }
    return programs.Program("", None, (), {}, kinds)

  trained = program(devices[0], masters=4)
  sampled = program(devices[int(apart)], engine_weights=1.5)
  found = compilation.hand_over([trained, sampled], itemsize=2)
  assert found.temporary == cast * GIB


def _programs(a=A, **changes):
  """Returns a changed configuration and its programs."""
  config = dataclasses.replace(CONFIG, **changes)
  return config, programs.programs(config, a, devices=jax.devices())


def test_old_log_probabilities_are_a_program_where_a_run_computes_them():
  def names(**objective):
    _, found = _programs(objective=config_lib.ObjectiveConfig(**objective))
    return [p.name for p in found]

  assert "old log-probabilities" in names(old_logp="trainer")
  assert "old log-probabilities" not in names(old_logp="engine")


@pytest.mark.parametrize(
  ("changes", "trains", "samples"),
  [
    ({}, {"engine weights"}, {"masters", "moments", "reference"}),
    ({"offload": "moments"}, {"engine weights"}, {"masters", "reference"}),
    ({"offload": "state"}, {"engine weights"}, {"reference"}),
    (
      {"async_level": 1},
      {"engine weights", "KV cache"},
      {"masters", "moments", "reference"},
    ),
  ],
)
def test_phases_hold_what_the_configuration_leaves_them(
  changes, trains, samples
):
  _, found = _programs(pipeline=config_lib.PipelineConfig(**changes))

  def held(name):
    program = next(p for p in found if p.name == name)
    return set(compilation.held_by_others(program, found))

  assert held("train step") == trains
  assert held("prefill") == held("decode") == samples


def test_servers_beside_the_trainer_may_take_what_it_does_not_hold():
  config, found = _programs(
    engine=config_lib.EngineConfig(kind="sglang"),
    servers=config_lib.ServersConfig(colocated=True),
  )
  for program in found:
    sampled = program.name in ("prefill", "decode")
    assert ("engine weights" in program.freed) is not sampled
  target = targets.parse("h100:1")
  decode = part(
    name="decode",
    kinds={"engine weights": 7.0, "KV cache": 9.0},
    held={"masters": 14.0, "moments": 10.0},
  )
  (said,) = plan._servers_sentence(config, decode, target)
  # 72.77 GiB for programs of 79.1 in all; 24 are the trainer's.
  assert "beside 24.0 GiB of the trainer: weights (7.0 GiB)" in said
  assert "may take 0.61 of a device" in said
  assert plan._servers_sentence(CONFIG, decode, target) == []


def test_kinds_sum_to_the_arguments_of_the_compiler(toy):
  train = toy[0].parts[0]
  assert set(train.kinds) == {"masters", "moments", "reference", "batch"}
  assert set(train.held) == {"engine weights"}
  # The counter of steps belongs to no kind. This step's ratio does not read the
  # old log-probabilities, an argument that newer versions of JAX leave out.
  counter, unused = 4, 4 * 512 * 4 // 2
  rest = train.arguments - sum(train.kinds.values())
  assert rest in (counter, counter - unused)
  # Every matrix is sharded in four; norms are replicated.
  assert train.kinds["masters"] == pytest.approx(
    toy[0].parameters * 4 / 4, rel=0.02
  )
