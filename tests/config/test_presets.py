"""Presets of the configurations: what they differ in, and that they fit."""

from __future__ import annotations

import math
import pathlib

import numpy as np
import pytest
from commands import run

from anysearch_jax.config import settings as config_settings
from anysearch_jax.configs import (
  llama3_1_8b,
  one_gpu,
  paper,
  quickstart,
  qwen2_5_7b,
  qwen3_4b,
  small,
)
from anysearch_jax.launch import flags, plan, train
from anysearch_jax.methods import systems
from anysearch_jax.policy import parameters as weights
from anysearch_jax.policy import table
from anysearch_jax.rollout.jax_engine import kv_memory

ROOT = pathlib.Path(__file__).resolve().parents[2]
TARGETS = {"24": "rtx4090:1", "80": "h100:1", "141": "h200:1"}
# As the files of the published weights count them, tied heads once.
PARAMETERS = {
  "qwen2_5_0_5b": 494_032_768,
  "qwen2_5_1_5b": 1_543_714_304,
  "qwen3_0_6b": 596_049_920,
  "gemma3_1b": 999_885_952,
  "qwen3_1_7b": 1_720_574_976,
  "smollm3_3b": 3_075_098_624,
  "qwen3_4b": 4_022_468_096,
  "qwen2_5_7b": 7_615_616_512,
  "llama3_1_8b": 8_030_261_248,
  "qwen3_30b_a3b": 30_532_122_624,
  "olmo3_7b": 7_298_011_136,
  "gpt_oss_20b": 20_914_757_184,
}
ENGINES = {
  f"{module.__name__}:{preset}": module.get_config(preset).engine
  for module in (qwen2_5_7b, llama3_1_8b, qwen3_4b)
  for preset in paper.PRESETS
} | {preset: one_gpu.get_config(preset).engine for preset in one_gpu.PRESETS}


def differences(one, other):
  found = config_settings.changes(config_settings.to_dict(one), other)
  return {change.path: change.new for change in found}


PRICED = {
  "objective.normalize": "batch",
  "reward.gamma_mode": "fixed",
  "reward.gamma_fixed": 0.1,
  "reward.use_rel": False,
}
QUICKSTART = {
  "anysearch": {},
  "no_tool": {"reward.gamma_mode": "off"},
  "priced": PRICED,
  "search_r1": {
    "reward.alpha": 1.0,
    "reward.beta": 0.0,
    "reward.delta": 0.0,
    "reward.gamma_mode": "off",
    "curriculum.max_budget": 5,
    "curriculum.phase1_steps": 0,
    "curriculum.fixed_budget": 5,
  },
}


@pytest.mark.parametrize("preset", quickstart.PRESETS)
def test_presets_differ_only_in_what_they_are_named_for(preset):
  config = quickstart.get_config(preset)
  systems.validate(config)
  assert (ROOT / config.policy / "config.json").is_file()
  found = differences(quickstart.get_config(), config)
  name = found.pop("name", "quickstart-anysearch")
  assert (name, found) == (f"quickstart-{preset}", QUICKSTART[preset])


def test_the_priced_preset_of_a_backbone_changes_the_objective_alone():
  found = differences(qwen3_4b.get_config(), qwen3_4b.get_config("priced"))
  assert found == {"name": "qwen3_4b-priced"} | PRICED


@pytest.mark.parametrize("preset", small.PRESETS)
def test_the_preset_of_a_small_model_can_be_trained(preset):
  systems.validate(small.get_config(preset))


@pytest.mark.parametrize(
  ("name", "sentence"),
  [
    ("quickstart.py:thrifty", "'thrifty', expected one of anysearch"),
    ("one_gpu.py:qwen3_4b-16", "qwen3_4b-16.*qwen3_4b-24"),
    ("qwen3_4b.py:all", "preset: found 'all', expected one of questions, lora"),
  ],
)
def test_an_unknown_preset_is_refused(name, sentence):
  with pytest.raises(ValueError, match=sentence):
    flags.load_config(f"configs/{name}")


# One GPU.


def test_each_policy_has_a_preset_for_each_memory():
  assert set(TARGETS) == set(one_gpu.MEMORIES)
  small = {f"{p}-{memory}" for p in one_gpu.POLICIES for memory in TARGETS}
  assert set(one_gpu.PRESETS) == small | set(one_gpu.LARGE)


@pytest.mark.parametrize("preset", one_gpu.PRESETS)
def test_preset_has_room_for_its_longest_trajectories(preset):
  name = f"configs/one_gpu.py:{preset}"
  assert run(train, f"--config={name}", "--dry_run") == ""
  config = flags.load_config(name)
  policy, memory = preset.rsplit("-", 1)
  a = plan.read_architecture(config.policy)
  assert weights.count(table.rows(a)) == PARAMETERS[policy]
  trajectories = config.questions * config.group
  step = trajectories // config.curriculum.steps_per_rollout
  room = config.batch.max_micro_batches * config.batch.micro_batch_tokens
  assert room >= step * config.episode.max_context
  if preset in one_gpu.LARGE:
    lanes = 64 if a.experts or a.windowed else 256
    assert config.engine.slots > config.engine.lanes[-1] == lanes
    # Room for the rows at half of an episode's usual 2,060 tokens, nearly.
    assert config.engine.kv_tokens >= lanes * 1024


# Engines: their chunks and their lanes.


@pytest.mark.parametrize("name", ENGINES)
def test_passages_are_padded_by_less_than_5_percent(name):
  """Searches add about 590 tokens; a chunk has no part of another text."""
  chunk = ENGINES[name].prefill_chunk
  lengths = np.random.default_rng(0).normal(590, 150, 1000).clip(200)
  computed = sum(math.ceil(n / chunk) * chunk for n in lengths)
  assert computed / lengths.sum() < 1.05
  for shards in (1, 2, 4):
    if not name.startswith("anysearch_jax.configs") or "lora" in name:
      shards = 1
    kv_memory.validate(ENGINES[name], shards=shards)


@pytest.mark.parametrize(
  ("name", "rows"),
  [
    # Of 2,400 tokens each, in powers of two: by hand.
    ("anysearch_jax.configs.qwen2_5_7b:", 1024),
    ("anysearch_jax.configs.llama3_1_8b:", 512),
    ("anysearch_jax.configs.qwen3_4b:", 512),
    ("anysearch_jax.configs.qwen2_5_7b:lora141", 512),
    ("anysearch_jax.configs.qwen3_4b:lora80", 128),
    ("qwen3_4b-141", 256),
  ],
)
def test_lanes_are_as_many_as_the_cache_has_room_for(name, rows):
  engine = ENGINES[name]
  assert engine.lanes[-1] == rows
  assert engine.slots >= rows
