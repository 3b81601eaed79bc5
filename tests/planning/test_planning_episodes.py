"""Tests what a plan assumes about episodes."""

from __future__ import annotations

import dataclasses

import planned
import pytest

from anysearch_jax import config as config_lib
from anysearch_jax.planning import whole_step

CONFIG = dataclasses.replace(
  planned.CONFIG,
  questions=512,
  group=5,
  curriculum=config_lib.CurriculumConfig(steps_per_rollout=5),
  batch=config_lib.BatchConfig(
    row_lengths=(8192,), micro_batch_tokens=32768, max_micro_batches=128
  ),
)


def test_a_step_fills_as_many_micro_batches_as_its_tokens():
  found = whole_step.episodes_of(CONFIG)
  assert (found.trajectories, found.tokens) == (512, 2560)
  assert found.micro_batches(CONFIG.batch) == 512 * 2560 // 32768
  longer = whole_step.episodes_of(CONFIG, tokens=3600)
  assert longer.micro_batches(CONFIG.batch) == 57  # 56.25, the last not full.


def test_a_step_fills_no_more_micro_batches_than_there_are():
  few = dataclasses.replace(CONFIG.batch, max_micro_batches=8)
  assert whole_step.episodes_of(CONFIG).micro_batches(few) == 8


def test_an_episode_is_at_most_a_row():
  short = dataclasses.replace(CONFIG, batch=planned.CONFIG.batch)
  assert whole_step.episodes_of(short).tokens == 128
  assert whole_step.episodes_of(short).generated == 64
  with pytest.raises(ValueError, match="generated_tokens: found 129.*1 to 128"):
    whole_step.episodes_of(short, generated=129)
  with pytest.raises(ValueError, match="episode_tokens: found 129.*1 to 128"):
    whole_step.episodes_of(short, tokens=129)
