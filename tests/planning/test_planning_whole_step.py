"""Tests the prediction of a step with its sampling, against counts by hand."""

from __future__ import annotations

import dataclasses

import numpy as np
import planned
import pytest

from anysearch_jax import config as config_lib
from anysearch_jax.planning import targets, whole_step

A = planned.A
PREFILL = {"prefill_lanes": 2, "prefill_chunk": 512}
ENGINE = config_lib.EngineConfig(
  max_context=4096, lanes=(4, 16), decode_steps=8, **PREFILL
)
CONFIG = dataclasses.replace(planned.CONFIG, engine=ENGINE)
EPISODES = whole_step.Episodes(tokens=2000, generated=400, trajectories=32)
GIB = 2**30
DECODE = planned.part(
  "decode", total=2, kinds={"engine weights": 1.0, "KV cache": 0.5}
)


def _sampled(config=CONFIG, a=A):
  return whole_step.sampling(config, a, EPISODES, DECODE)


# q, o, k, v, gate, up, down and norms of two layers, and the last norm.
LAYERS = 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128 + 2 * 64 + 2 * 16) + 64
HEAD = 512 * 64
# What q, o, k, v, gate, up and down of two layers read and write for a token.
WIDTHS = 2 * (2 * (64 + 64) + 2 * (64 + 32) + 3 * (64 + 128))
# Scores and values of two layers at a mean context of 1,000 tokens.
SCORES = 2 * 2 * (4 * 16) * 1000 * 2
# Keys and values of two layers, in two bytes or four.
CACHED = 2 * 2 * (2 * 16) * 1000


@pytest.mark.parametrize("kv_dtype", ["auto", "float8"])
def test_decode_reads_the_weights_for_every_token_of_a_row(kv_dtype):
  size = 4 if CONFIG.compute_dtype == "float32" else 2
  if kv_dtype == "float8":
    size = 1 + 2 / 16  # A scale of two bytes for the 16 numbers of a head.
  config = config_lib.changed(CONFIG, engine={"kv_dtype": kv_dtype})
  operations, read = _sampled(config)["decode"]
  steps, rows = 32 * 400 / (16 * 0.8), 16 * 0.8
  assert read == pytest.approx(steps * (GIB + rows * CACHED * size / 4))
  decoded = steps * 16 / 4
  assert operations.products == pytest.approx(decoded * 2 * (LAYERS + HEAD))
  assert operations.attention == pytest.approx(decoded * SCORES)
  assert operations.activations == pytest.approx(decoded * (WIDTHS + 512 + 64))


def test_a_layer_with_a_window_sees_no_more_than_that():
  a = dataclasses.replace(A, window=300, windowed=(0,))
  windowed = _sampled(a=a)
  assert _sampled(a=dataclasses.replace(a, window=1000)) == _sampled()
  # A layer sees 300 tokens, the other 1,000: .65 of two layers' 1,000.
  size = 4 if CONFIG.compute_dtype == "float32" else 2
  steps = 32 * 400 / (16 * 0.8)
  operations, read = windowed["decode"]
  assert read == pytest.approx(steps * (GIB + 12.8 * 0.65 * CACHED * size / 4))
  scores = 0.65 * SCORES
  assert operations.attention == pytest.approx(steps * 16 * scores / 4)
  tokens = 32 * (2000 - 400 - 230 * 4 / 5) * 1024 / 590
  operations, _ = windowed["prefill"]
  assert operations.flops == pytest.approx(tokens * (2 * LAYERS + scores) / 4)


def test_prefill_pads_passages_to_chunks_and_has_no_head():
  # Five rows share a prompt of 230 tokens.
  tokens = 32 * (2000 - 400 - 230 * 4 / 5) * 1024 / 590
  operations, _ = _sampled()["prefill"]
  assert operations.products == pytest.approx(tokens * 2 * LAYERS / 4)
  assert operations.attention == pytest.approx(tokens * SCORES / 4)
  assert operations.activations == pytest.approx(tokens * WIDTHS / 4)
  engine = dataclasses.replace(ENGINE, prefill_chunk=590)
  fitting, _ = _sampled(dataclasses.replace(CONFIG, engine=engine))["prefill"]
  assert fitting == pytest.approx([x * 590 / 1024 for x in operations])


def test_a_small_cache_limits_the_rows():
  assert whole_step.concurrent_rows(ENGINE, 1000) == 16
  small = dataclasses.replace(ENGINE, kv_tokens=5500)
  assert whole_step.concurrent_rows(small, 1000) == 5
  assert whole_step.concurrent_rows(small, 10**6) == 1


def test_phases_add_up_unless_sampling_is_beside_training():
  turns = whole_step.Step({"decode": 5.0}, training=3.0, overlapped=False)
  assert turns.phases == {"decode": 5.0, "training": 3.0, "whole step": 8.0}
  assert turns._replace(overlapped=True).seconds == 5.0


def _predicted(decode=DECODE, **changes):
  return whole_step.predict(
    config_lib.changed(CONFIG, **changes),
    A,
    EPISODES,
    decode=decode,
    target=planned.target(4),
  )


def test_training_takes_three_forward_passes_and_those_without_gradients():
  step = _predicted(objective={"kl_coefficient": 0.0}, batch={"remat": "none"})
  sizes = EPISODES.sizes(CONFIG.batch.row_lengths[-1])
  tokens, scored = sum(sizes), 32 * 400
  pairs = sum(size * (size // 2) for size in sizes)
  # Matrices without norms.
  matrices = 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128)
  products = 2 * matrices * tokens + 2 * HEAD * scored
  attention = 4 * 2 * 4 * 16 * pairs
  activations = WIDTHS * tokens + (512 + 64) * scored
  size = 4 if CONFIG.compute_dtype == "float32" else 2
  assumed = targets.ASSUMED
  forward = (
    products / (assumed.products * planned.CPU.flops)
    + attention / (assumed.attention * planned.CPU.flops)
    + assumed.passes
    * size
    * activations
    / (assumed.memory * planned.CPU.memory_bandwidth)
  )
  assert step.training == pytest.approx(3 * forward / 4)
  # A reference, or recomputation of everything, is a forward pass more.
  for changes in (
    {"objective": {"kl_coefficient": 0.1}, "batch": {"remat": "none"}},
    {"objective": {"kl_coefficient": 0.0}, "batch": {"remat": "full"}},
  ):
    assert _predicted(**changes).training == pytest.approx(4 * forward / 4)


def test_epochs_share_what_they_sample():
  one, five = (
    _predicted(curriculum={"epochs": epochs}).sampling for epochs in (1, 5)
  )
  for phase in ("prefill", "decode"):
    assert five[phase] == pytest.approx(one[phase] / 5)


def test_moving_the_state_is_a_phase_with_the_bytes_of_both_ways():
  phase = "state to the host and back"
  assert phase not in _predicted().sampling
  moved = dataclasses.replace(DECODE, offloaded=3 * 10**9)
  # 3 GB each way at a GB/s, for five steps.
  assert _predicted(moved).sampling[phase] == pytest.approx(1.2 / 0.8)


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
