"""Tests plans and what they suggest."""

from __future__ import annotations

import dataclasses
import json

import jax
import planned
import pytest

from anysearch_jax import config as config_lib
from anysearch_jax.planning import compilation, plan, planner, programs, targets

GIB = 2**30
A, CONFIG = planned.A, planned.CONFIG
made, part = planned.made, planned.part
TRAINING = {"masters": 7.0, "moments": 14.0, "reference": 3.5}


@pytest.mark.parametrize(
  ("train", "verdict"),
  [
    ({"total": 50}, "fits: at most 60.0 of 72.8 GiB a device, in the decode."),
    ({"total": 73}, "does not fit: train step 73.0 of 72.8 GiB a device."),
    # Bytes that other programs keep count.
    (
      {"total": 73, "held": {"KV cache": 30}},
      "does not fit: train step 73.0 of 72.8 GiB a device.",
    ),
    # The compiler refused it.
    (
      {"total": 10, "traffic": None},
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
      advice=("Do this.",),
    )
  )
  for words in (
    *("toy on h100:4", "8.000 B parameters, all trained", "masters"),
    *("gradients", "(1.25)", "72.77", "1.000", "Verdict: fits", "Do this."),
    "This is assumed.",
  ):
    assert words in text
  # Columns are aligned.
  table = text.split("\n\n")[1].splitlines()
  ends = {len(line) for line in table if line.endswith(("40.00", "20.00"))}
  assert len(ends) == 1


def test_a_run_takes_the_hours_of_all_its_steps():
  phases = plan.Phase("decode", 36, 18, 9), plan.Phase("train", 36, 18, 9)
  step = plan.Step(phases[:1], phases[1:], overlapped=False)
  curriculum = config_lib.CurriculumConfig(total_steps=1500)
  config = dataclasses.replace(CONFIG, curriculum=curriculum)
  whole = made(part(kinds=TRAINING), config=config)
  whole = dataclasses.replace(whole, step=step)
  (line,) = [x for x in plan.text(whole).splitlines() if "hours of" in x]
  assert line.split() == "hours of 1,500 steps 30.0 15.0 7.5".split()
  hours = {"predicted": 30.0, "sixty": 15.0, "floor": 7.5}
  assert json.loads(plan.to_json(whole))["run_hours"] == hours


def test_an_earlier_plan_stands_beside():
  whole = made(part(kinds=TRAINING))
  decode, train, old = (
    plan.Phase("decode", 3.0, 2.5, 2.0),
    plan.Phase("train step", 6.0, 4.0, 3.0),
    plan.Phase("old log-probabilities", 1.0, 0.5, 0.2),
  )
  steps = [
    plan.Step((decode,), training, overlapped=False)
    for training in ((old, train), (train,))
  ]
  earlier, now = (dataclasses.replace(whole, step=step) for step in steps)
  before = json.loads(plan.to_json(earlier))["step_seconds"]
  rows = [line.split() for line in plan.text(now, before=before).splitlines()]
  assert "train step 6.0 4.0 3.0 6.0 4.0 3.0".split() in rows
  assert "old log-probabilities 0.0 0.0 0.0 1.0 0.5 0.2".split() in rows
  assert "whole step 9.0 6.5 5.0 10.0 7.0 5.2".split() in rows


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
  assert train["collectives"] == {"all-gather": {"operations": 3, "bytes": 2e9}}
  assert train["predicted_tokens_per_second"] == 2000


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
    planner.devices(config_lib.MeshConfig(**mesh), targets.parse("h100:4"))


@pytest.mark.parametrize("name", ["h100:4", "v5p:2x2x1"])
def test_rollout_devices_beyond_the_target_are_another_target(name):
  planned.need(name)
  mesh = config_lib.MeshConfig(
    fsdp=4, trainer=(0, 1, 2, 3), rollout=(4, 5, 6, 7)
  )
  devices = planner.devices(mesh, targets.parse(name))
  assert len(set(devices)) == 8


@pytest.fixture(scope="module")
def toy():
  with pytest.MonkeyPatch.context() as patch:
    target = planned.on_cpu(patch)
    lines = []
    yield planner.make(CONFIG, A, target, log=lines.append), lines


def test_a_configuration_is_planned_program_by_program(toy):
  whole, lines = toy
  names = ["train step", "prefill", "decode"]
  assert [p.name for p in whole.parts] == [*names, "hand-over"]
  assert [line.split(" for ")[0] for line in lines] == [
    f"compiling the {name}" for name in names
  ]
  assert whole.fits
  assert whole.advice == ()
  # The embedding, and the matrices and norms of a layer.
  layer = 64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 128 + 2 * 64 + 2 * 16
  parameters = 512 * 64 + 2 * layer + 64
  assert whole.parameters == whole.trained == parameters


def test_a_hand_over_has_one_copy_of_the_weights_and_a_cast_one(toy):
  train, _, decode, hand_over = toy[0].parts
  weights = decode.kinds["engine weights"]
  masters = train.kinds["masters"]
  assert hand_over.peak == weights + masters // 2
  assert hand_over.read == masters + 2 * (masters // 2) + weights
  # The cache is freed for training, and the state is still on the device.
  assert set(hand_over.held) == {"masters", "moments", "reference"}


@pytest.mark.parametrize(
  ("apart", "adapters", "cast", "moved"),
  [
    # float32 masters of 4 GiB are cast to 2, which become weights of 1.5.
    (False, False, 2.0, 4 + 2 * 2 + 1.5),
    # Adapters are merged into the frozen base.
    (False, True, 2.0, 4 + 2 * 2 + 1.5 + 1.5),
    # The sampling devices receive the copy.
    (True, False, 1.5, 2 * 1.5 + 1.5),
  ],
)
def test_a_hand_over_is_counted_by_hand(apart, adapters, cast, moved):
  devices = jax.devices()

  def program(device, **gib):
    placed = jax.sharding.SingleDeviceSharding(device)
    kinds = {
      name.replace("_", " "): jax.ShapeDtypeStruct(
        (int(size * GIB),), "int8", sharding=placed
      )
      for name, size in gib.items()
    }
    return programs.Program("", None, (), {}, 1, 1, kinds)

  trained = program(devices[0], masters=4)
  sampled = program(devices[int(apart)], engine_weights=1.5)
  found = compilation.hand_over(
    [trained, sampled], planned.target(2), itemsize=2, adapters=adapters
  )
  assert (found.temporary, found.read) == (cast * GIB, moved * GIB)


def _programs(a=A, **changes):
  """Returns a changed configuration and its programs."""
  config = dataclasses.replace(CONFIG, **changes)
  how = {"devices": jax.devices(), "micro_batches": 1, "segment": 128}
  return config, programs.programs(config, a, **how)


def test_decode_reads_the_pages_of_windows():
  engine = dataclasses.replace(CONFIG.engine, page=8, max_context=256)
  a = dataclasses.replace(A, window=20, windowed=(1,))
  *_, decode = _programs(a, engine=engine)[1]
  _, layers = decode.reads
  # Four rows, of 32 pages each, or three.
  assert [layer.k.shape[1] for layer in layers] == [128, 12]
  # Of 64 tokens each: 256 and 20 are 138 on average.
  assert decode.blocks == 3


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
    return set(compilation.held(program, found))

  assert held("train step") == trains
  assert held("prefill") == held("decode") == samples


def test_servers_beside_the_trainer_may_take_what_it_does_not_hold():
  config, found = _programs(
    engine=config_lib.EngineConfig(kind="sglang"),
    sglang=config_lib.SglangConfig(colocated=True),
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
  (said,) = planner._servers_sentence(config, [decode], target)
  # 72.77 GiB for programs of 79.1 in all; 24 are the trainer's.
  assert "beside 24.0 GiB of the trainer: weights (7.0 GiB)" in said
  assert "may take 0.61 of a device" in said
  assert planner._servers_sentence(CONFIG, [decode], target) == []


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


def test_the_train_step_has_the_flops_counted_by_hand(toy):
  train = toy[0].parts[0]
  tokens = 4 * 512
  matrices = 2 * (64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 128)
  # Forward, twice that backward, and the reference. The head is recomputed, and
  # only half of the tokens, those that were sampled, have logits.
  products = 2 * tokens * (4 * matrices + 5 * 512 * 64 // 2)
  # Scores and values of two layers: T keys a query, three times the forward.
  attention = 2 * 4 * tokens * 128 * 4 * 16 * 4
  assert train.tokens == tokens
  assert train.flops == pytest.approx(products + attention, rel=0.06)


# What would make it fit.


def _advised(*parts, **changes) -> str:
  config = dataclasses.replace(CONFIG, **changes)
  plan = planned.made(*parts, config=config)
  return "\n".join(planner.advise(plan))


def test_advice_for_a_large_state_is_devices_or_adapters():
  large = part(
    total=136, kinds={"masters": 28.0, "moments": 56.0, "reference": 14.0}
  )
  found = _advised(large)
  # Adapters remove masters, moments and gradients: 112 of 136.
  assert "lora.targets=q,k,v,o): about 24.0 GiB" in found
  assert "2 times the devices that train (mesh.fsdp=4): about 68.0 GiB" in found
  # Only the smallest sufficient change is named; fewer tokens do not suffice.
  assert "4 times" not in found
  assert "micro_batch_tokens" not in found


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
  # The pages of windows are 9 GiB: 133 tokens take 1, and the excess is 2.2.
  large = part("decode", total=75, kinds=engine)
  config = config_lib.changed(CONFIG, engine={"kv_tokens": 3600})
  windows = planned.made(large, config=config, sized=0.75)
  found = "\n".join(planner.advise(windows))
  assert "engine.kv_tokens=3296: about 72.7 GiB" in found


def test_pairs_of_changes_are_named_if_no_single_one_suffices():
  kinds = {"masters": 200.0, "moments": 400.0, "reference": 100.0}
  found = _advised(part(total=1000, kinds=kinds))
  # With adapters 200 of 1000 remain: a quarter is 50, a half is too large.
  both = "lora.targets=q,k,v,o) and 4 times the devices that train"
  assert f"{both} (mesh.fsdp=8): about 50.0 GiB" in found
  assert "2 times" not in found


def test_more_devices_do_not_shrink_the_engine():
  engine = {"engine weights": 10.0, "KV cache": 70.0}
  found = _advised(
    part(total=90, kinds=TRAINING), part("decode", total=81, kinds=engine)
  )
  changes = found.splitlines()
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
  assert "offload=moments" not in advised(offload="moments")
  assert "offload" not in advised(async_level=1)
