"""The engine of the presets for GPUs: its chunks and its lanes."""

from __future__ import annotations

import math

import numpy as np
import pytest

from anysearch_jax.rollout.jax_engine import kv_memory
from configs import llama3_1_8b, one_gpu, paper, qwen2_5_7b, qwen3_4b

ENGINES = {
  f"{module.__name__}:{preset}": module.get_config(preset).engine
  for module in (qwen2_5_7b, llama3_1_8b, qwen3_4b)
  for preset in paper.PRESETS
} | {preset: one_gpu.get_config(preset).engine for preset in one_gpu.PRESETS}


@pytest.mark.parametrize("name", ENGINES)
def test_passages_are_padded_by_less_than_15_percent(name):
  """Searches add about 590 tokens; a chunk has no part of another text."""
  chunk = ENGINES[name].prefill_chunk
  lengths = np.random.default_rng(0).normal(590, 150, 1000).clip(200)
  computed = sum(math.ceil(n / chunk) * chunk for n in lengths)
  assert computed / lengths.sum() < 1.15


@pytest.mark.parametrize("name", ENGINES)
def test_every_division_of_the_devices_is_possible(name):
  for shards in (1, 2, 4):
    if not name.startswith("configs") or "lora" in name:
      shards = 1
    kv_memory.validate(ENGINES[name], shards=shards)


@pytest.mark.parametrize(
  ("name", "rows"),
  [
    # Of 2,400 tokens each, in powers of two: by hand.
    ("configs.qwen2_5_7b:", 1024),
    ("configs.llama3_1_8b:", 512),
    ("configs.qwen3_4b:", 512),
    ("configs.qwen2_5_7b:lora141", 512),
    ("configs.qwen3_4b:lora80", 128),
    ("qwen3_4b-141", 256),
  ],
)
def test_lanes_are_as_many_as_the_cache_has_room_for(name, rows):
  engine = ENGINES[name]
  assert engine.lanes[-1] == rows
  assert engine.slots >= rows
