"""Tests the prediction of a step with its sampling, against counts by hand."""

from __future__ import annotations

import dataclasses

import numpy as np
import planned
import pytest

from anysearch_jax import config as config_lib
from anysearch_jax.planning import plan, targets, whole_step

A = planned.A
PREFILL = {"prefill_lanes": 2, "prefill_chunk": 512}
ENGINE = config_lib.EngineConfig(
  max_context=4096, lanes=(4, 16), decode_steps=8, **PREFILL
)
CONFIG = dataclasses.replace(planned.CONFIG, engine=ENGINE)
EPISODES = whole_step.Episodes(tokens=2000, generated=400, trajectories=32)
GIB = 2**30
PARTS = [
  planned.part(total=40, kinds={"masters": 7.0}),
  planned.part("old log-probabilities", total=2),
  planned.part("prefill", total=2),
  planned.part(
    "decode", total=2, kinds={"engine weights": 1.0, "KV cache": 0.5}
  ),
  planned.part("hand-over", total=2, tokens=0, flops=0, traffic={}),
]


def _sampled(config=CONFIG, a=A):
  parts = {part.name: part for part in PARTS}
  return whole_step.sampling(config, a, EPISODES, parts)


# q, o, k, v, gate, up, down and norms of two layers, and the last norm.
LAYERS = 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128 + 2 * 64 + 2 * 16) + 64
HEAD = 512 * 64
# Scores and values of two layers at a mean context of 1,000 tokens.
SCORES = 2 * 2 * (4 * 16) * 1000 * 2
# Keys and values of two layers, in two bytes or four.
CACHED = 2 * 2 * (2 * 16) * 1000


@pytest.mark.parametrize("kv_dtype", ["auto", "float8"])
def test_decode_reads_the_weights_for_every_token_of_a_row(kv_dtype):
  size = 4 if CONFIG.compute_dtype == "float32" else 2
  if kv_dtype == "float8":
    size = 1 + 2 / 16  # A scale of two bytes for the 16 numbers of a head.
  _, found = _sampled(config_lib.changed(CONFIG, engine={"kv_dtype": kv_dtype}))
  steps, rows = 32 * 400 / (16 * 0.8), 16 * 0.8
  assert found.times == pytest.approx(steps / 8)
  assert found.read == pytest.approx(8 * (GIB + rows * CACHED * size / 4))
  flops = 8 * 16 * (2 * (LAYERS + HEAD) + SCORES)
  assert found.flops == pytest.approx(flops / 4)
  # Three collectives of 2 GB a call of 8 tokens.
  assert found.traffic == {"all-gather": (3, 2e9)}


def test_a_layer_with_a_window_sees_no_more_than_that():
  a = dataclasses.replace(A, window=300, windowed=(0,))
  prefill, found = _sampled(a=a)
  _, all_seen = _sampled(a=dataclasses.replace(a, window=1000))
  assert all_seen == _sampled()[1]
  # A layer sees 300 tokens, the other 1,000: .65 of two layers' 1,000.
  size = 4 if CONFIG.compute_dtype == "float32" else 2
  cached = 12.8 * 0.65 * CACHED * size / 4
  assert found.read == pytest.approx(8 * (GIB + cached))
  flops = 8 * 16 * (2 * (LAYERS + HEAD) + 0.65 * SCORES)
  assert found.flops == pytest.approx(flops / 4)
  flops = 2 * 512 * (2 * LAYERS + 0.65 * SCORES)
  assert prefill.flops == pytest.approx(flops / 4)


def test_guesses_cost_products_and_save_reads():
  (_, plain), (_, found) = (
    _sampled(config_lib.changed(CONFIG, engine={"lookahead": k}))
    for k in (0, 2)
  )
  each = 1 + whole_step.ACCEPTED + whole_step.ACCEPTED**2
  assert found.times == pytest.approx(plain.times / each)
  assert found.flops == pytest.approx(plain.flops * 3)
  assert found.read == plain.read


def test_prefill_pads_passages_to_chunks_and_has_no_head():
  found, _ = _sampled()
  # Five rows share a prompt of 230 tokens.
  tokens = 32 * (2000 - 400 - 230 * 4 / 5) * 1024 / 590
  assert found.times == pytest.approx(tokens / (2 * 512))
  flops = tokens * (2 * LAYERS + SCORES) / 4
  assert found.times * found.flops == pytest.approx(flops)
  engine = dataclasses.replace(ENGINE, prefill_chunk=590)
  fitting, _ = _sampled(dataclasses.replace(CONFIG, engine=engine))
  assert fitting.times * fitting.flops == pytest.approx(flops * 590 / 1024)


def test_a_small_cache_limits_the_rows():
  assert whole_step.concurrent_rows(ENGINE, 1000) == 16
  small = dataclasses.replace(ENGINE, kv_tokens=5500)
  assert whole_step.concurrent_rows(small, 1000) == 5
  assert whole_step.concurrent_rows(small, 10**6) == 1


def test_phases_add_up_unless_sampling_is_beside_training():
  sampling = (plan.Phase("decode", 5.0, 4.0, 2.0),)
  training = (plan.Phase("train step", 3.0, 2.5, 2.25),)
  turns = plan.Step(sampling, training, overlapped=False).phases[-1]
  assert turns == ("whole step", 8.0, 6.5, 4.25)
  beside = plan.Step(sampling, training, overlapped=True).phases[-1]
  assert beside == ("whole step", 5.0, 4.0, 2.25)


def _predicted(parts=PARTS, *, epochs=1):
  curriculum = dataclasses.replace(CONFIG.curriculum, epochs=epochs)
  step = whole_step.predict(
    parts,
    config=dataclasses.replace(CONFIG, curriculum=curriculum),
    a=A,
    expected=EPISODES,
    target=planned.target(4),
  )
  return step and {phase.name: phase for phase in step.phases}


def test_sixty_percent_and_the_floor_are_shares_of_the_peaks():
  silent = [dataclasses.replace(part, traffic={}) for part in PARTS]
  found = _predicted(silent)
  assert list(found) == [
    *("prefill", "decode", "hand-over"),
    *("old log-probabilities", "train step", "whole step"),
  ]
  # A PFLOP on four devices of a TFLOP/s.
  train = found["train step"]
  assert train.floor == pytest.approx(250)
  assert train.predicted == pytest.approx(250 / targets.ASSUMED.compute)
  for phase in found.values():
    assert phase.sixty == pytest.approx(phase.floor / 0.6)
  # Five steps share a hand-over, which reads a GB at 0.1 TB/s.
  assert found["hand-over"].floor == pytest.approx(0.01 / 5)


def test_epochs_share_what_they_sample():
  one, five = _predicted(), _predicted(epochs=5)
  for name in ("prefill", "decode"):
    assert five[name].floor == pytest.approx(one[name].floor / 5)
  # With one epoch the first step knows its own; with five, all are needed.
  name = "old log-probabilities"
  assert five[name].floor == pytest.approx(one[name].floor / 4)
  # A hand-over is shared by all steps of a rollout, of which there are five.
  for name in ("hand-over", "train step"):
    assert five[name].floor == one[name].floor


def test_moving_the_state_is_a_phase_with_the_bytes_of_both_ways():
  name = "state to the host and back"
  assert name not in _predicted()
  moved = [
    dataclasses.replace(part, offloaded=3 * 10**9)
    if part.name == "decode"
    else part
    for part in PARTS
  ]
  # 3 GB each way at a GB/s, for five steps.
  phase = _predicted(moved)[name]
  assert phase[1:] == pytest.approx((1.2 / 0.8, 1.2 / 0.6, 1.2))


def test_a_step_with_a_refused_program_is_not_predicted():
  assert _predicted([*PARTS, planned.part(predicted=None)]) is None


def test_episodes_are_packed_as_a_training_packs_them():
  config = dataclasses.replace(
    CONFIG,
    questions=512,
    group=5,
    curriculum=config_lib.CurriculumConfig(steps_per_rollout=5),
    batch=config_lib.BatchConfig(
      row_lengths=(8192,), micro_batch_tokens=32768, max_micro_batches=128
    ),
  )
  found = whole_step.episodes_of(config)
  assert (found.trajectories, found.tokens) == (512, 2560)
  sizes = found.sizes(8192)
  assert np.mean(sizes) == pytest.approx(2560, abs=1)
  assert np.std(sizes) == pytest.approx(0.3 * 2560, rel=0.01)
  squares = np.mean(np.square(sizes)) / np.mean(sizes)
  assert found.segment(8192) == pytest.approx(squares, abs=1)
  # At best 40 micro-batches of four rows.
  assert found.micro_batches(config.batch, 1) in [40, 41]
  # Four devices share the rows of a micro-batch.
  assert found.micro_batches(config.batch, 4) == found.micro_batches(
    config.batch, 1
  )
  full = whole_step.episodes_of(config, tokens=8192)
  assert set(full.sizes(8192)) == {8192}
  assert full.micro_batches(config.batch, 1) == 128
  few = dataclasses.replace(config.batch, max_micro_batches=8)
  with pytest.raises(ValueError, match="max_micro_batches is 8; raise it"):
    found.micro_batches(few, 1)


def test_an_episode_is_at_most_a_row():
  found = whole_step.episodes_of(CONFIG)
  assert (found.tokens, found.generated) == (128, 64)
  with pytest.raises(ValueError, match="generated_tokens: found 129.*1 to 128"):
    whole_step.episodes_of(CONFIG, generated=129)
  with pytest.raises(ValueError, match="episode_tokens: found 129.*1 to 128"):
    whole_step.episodes_of(CONFIG, tokens=129)
