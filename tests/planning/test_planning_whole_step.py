"""Tests the prediction of a step with its sampling, against counts by hand."""

from __future__ import annotations

import dataclasses

import planned
import pytest

from anysearch_jax import config as config_lib
from anysearch_jax.planning import plan, whole_step

A = planned.A
ENGINE = config_lib.EngineConfig(
  max_context=4096,
  lanes=(4, 16),
  prefill_lanes=2,
  prefill_chunk=512,
  decode_steps=8,
)
CONFIG = dataclasses.replace(planned.CONFIG, engine=ENGINE)
EPISODES = whole_step.Episodes(tokens=2000, generated=400, trajectories=32)
GIB = 2**30


def _sampled(config=CONFIG):
  decode = planned.part(
    "decode", total=2, kinds={"engine weights": 1.0, "KV cache": 0.5}
  )
  prefill = planned.part("prefill", total=2)
  parts = {"decode": decode, "prefill": prefill}
  return {
    work.name: work for work in whole_step.sampling(config, A, EPISODES, parts)
  }


# q, o, k, v, gate, up, down and norms of two layers, and the last norm.
LAYERS = 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128 + 2 * 64 + 2 * 16) + 64
HEAD = 512 * 64
# Scores and values of two layers at a mean context of 1,000 tokens.
SCORES = 2 * 2 * (4 * 16) * 1000 * 2
# Keys and values of two layers, in two bytes or four.
CACHED = 2 * 2 * (2 * 16) * 1000


def test_decode_reads_the_weights_for_every_token_of_a_row():
  size = 4 if CONFIG.compute_dtype == "float32" else 2
  found = _sampled()["decode"]
  steps = 32 * 400 / (16 * 0.8)
  assert steps == 1000
  rows = 16 * 0.8
  assert found.bytes == pytest.approx(steps * (GIB + rows * CACHED * size / 4))
  flops = steps * 16 * (2 * (LAYERS + HEAD) + SCORES)
  assert found.flops == pytest.approx(flops / 4)
  # Three collectives of 2 GB a call of 8 tokens.
  assert found.traffic["all-gather"].operations == 3 * 125
  assert found.traffic["all-gather"].bytes == pytest.approx(2e9 * 125)


def test_prefill_pads_passages_to_chunks_and_has_no_head():
  found = _sampled()["prefill"]
  # Five rows share a prompt of 230 tokens.
  tokens = 32 * (2000 - 400 - 230 * 4 / 5) * 1024 / 590
  assert found.flops == pytest.approx(tokens * (2 * LAYERS + SCORES) / 4)
  calls = tokens / (2 * 512)
  assert found.traffic["all-gather"].bytes == pytest.approx(2e9 * calls)
  fitting = dataclasses.replace(
    CONFIG, engine=dataclasses.replace(ENGINE, prefill_chunk=590)
  )
  assert _sampled(fitting)["prefill"].flops == pytest.approx(
    found.flops * 590 / 1024
  )


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


def test_sixty_percent_and_the_floor_are_shares_of_the_peaks():
  parts = [
    planned.part(total=40, kinds={"masters": 7.0}),
    planned.part("prefill", total=2),
    planned.part("decode", total=2, kinds={"engine weights": 1.0}),
    planned.part("hand-over", total=2, tokens=0),
  ]
  parts = [
    dataclasses.replace(
      part, compiled=dataclasses.replace(part.compiled, traffic={})
    )
    for part in parts
  ]
  shares = dataclasses.replace(whole_step.SIXTY, compute=0.3, memory=0.3)
  step = whole_step.predict(
    parts,
    config=CONFIG,
    a=A,
    expected=EPISODES,
    target=planned.target(4),
    assumptions=shares,
  )
  assert step is not None
  assert [phase.name for phase in step.phases] == [
    "prefill",
    "decode",
    "hand-over",
    "train step",
    "whole step",
  ]
  # A PFLOP on four devices of a TFLOP/s.
  train = step.training[0]
  assert train.floor == pytest.approx(250)
  for phase in step.phases:
    assert phase.sixty == pytest.approx(phase.floor / 0.6)
    assert phase.predicted == pytest.approx(phase.floor / 0.3)
  # Five steps share a hand-over, which reads a GB at 0.1 TB/s.
  assert step.sampling[-1].floor == pytest.approx(0.01 / 5)


def test_epochs_share_what_they_sample():
  parts = [
    planned.part(total=40, kinds={"masters": 7.0}),
    planned.part("old log-probabilities", total=2),
    planned.part("prefill", total=2),
    planned.part("decode", total=2, kinds={"engine weights": 1.0}),
    planned.part("hand-over", total=2, tokens=0),
  ]

  def floors(epochs):
    curriculum = dataclasses.replace(CONFIG.curriculum, epochs=epochs)
    step = whole_step.predict(
      parts,
      config=dataclasses.replace(CONFIG, curriculum=curriculum),
      a=A,
      expected=EPISODES,
      target=planned.target(4),
      assumptions=whole_step.SIXTY,
    )
    assert step is not None
    return {phase.name: phase.floor for phase in step.phases}

  one, five = floors(1), floors(5)
  for name in ("prefill", "decode"):
    assert five[name] == pytest.approx(one[name] / 5)
  # With one epoch the first step knows its own; with five, all are needed.
  name = "old log-probabilities"
  assert five[name] == pytest.approx(one[name] / 4)
  # A hand-over is shared by all steps of a rollout, of which there are five.
  for name in ("hand-over", "train step"):
    assert five[name] == one[name]


def test_moving_the_state_is_a_phase_with_the_bytes_of_both_ways():
  target = planned.target(4)
  shares = dataclasses.replace(whole_step.SIXTY, links=0.5)
  assert whole_step._moved(0, target, shares, 1.0) == ()
  # 3 GB each way at a GB/s, for five steps.
  (found,) = whole_step._moved(3 * 10**9, target, shares, 0.2)
  assert found[1:] == pytest.approx((2.4, 2.0, 1.2))


def test_what_leaves_the_device_is_stated():
  def said(async_level=0, offload="none", **engine):
    config = dataclasses.replace(
      CONFIG,
      engine=dataclasses.replace(ENGINE, **engine),
      pipeline=config_lib.PipelineConfig(async_level, offload=offload),
    )
    return " ".join(whole_step.sentences(config, EPISODES))

  assert "engine.free_kv_while_training" in said()
  assert "free_kv" not in said(free_kv_while_training=False)
  assert "free_kv" not in said(async_level=1)
  assert "pipeline.offload" not in said()
  assert "pipeline.offload=moments" in said(offload="moments")


def test_a_step_with_a_refused_program_is_not_predicted():
  parts = [planned.part(predicted=None), planned.part("decode")]
  assert (
    whole_step.predict(
      parts,
      config=CONFIG,
      a=A,
      expected=EPISODES,
      target=planned.target(4),
      assumptions=whole_step.SIXTY,
    )
    is None
  )
