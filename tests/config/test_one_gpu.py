"""The presets of configs/one_gpu.py."""

from __future__ import annotations

import pytest
from commands import run

from anysearch_jax.planning import targets
from anysearch_jax.policy import parameters as weights
from anysearch_jax.policy import table
from configs import one_gpu
from launch import flags, plan, run_checks, train

TARGETS = {"24": "rtx4090:1", "80": "h100:1", "141": "h200:1"}
# As the files of the published weights count them, tied heads once.
PARAMETERS = {
  "qwen2_5_0_5b": 494_032_768,
  "qwen2_5_1_5b": 1_543_714_304,
  "qwen3_0_6b": 596_049_920,
  "qwen3_1_7b": 1_720_574_976,
  "qwen3_4b": 4_022_468_096,
  "qwen2_5_7b": 7_615_616_512,
  "llama3_1_8b": 8_030_261_248,
}


def test_each_policy_has_a_preset_for_each_memory():
  assert set(TARGETS) == set(one_gpu.MEMORIES)
  small = {f"{p}-{memory}" for p in one_gpu.POLICIES for memory in TARGETS}
  assert set(one_gpu.PRESETS) == small | set(one_gpu.LARGE)


@pytest.mark.parametrize("preset", one_gpu.PRESETS)
def test_preset_passes_a_dry_run(preset):
  name = f"--config=configs/one_gpu.py:{preset}"
  assert run(train, name, "--dry_run") == ""


@pytest.mark.parametrize("preset", one_gpu.PRESETS)
def test_state_and_cache_of_a_preset_fit_its_gpu(preset):
  """A lower bound: docs/training.md has the compiler's peaks."""
  config = flags.load_config(f"configs/one_gpu.py:{preset}")
  policy, memory = preset.rsplit("-", 1)
  memory = memory.removeprefix("full")
  a = plan.read_architecture(config.policy)
  assert weights.count(table.rows(a)) == PARAMETERS[policy]
  needed = run_checks.footprint(a, config)
  capacity = targets.parse(TARGETS[memory]).capacity
  assert needed.shared < capacity


@pytest.mark.parametrize("preset", one_gpu.PRESETS)
def test_step_of_a_preset_holds_its_longest_trajectories(preset):
  config = flags.load_config(f"configs/one_gpu.py:{preset}")
  trajectories = config.questions * config.group
  step = trajectories // config.curriculum.steps_per_rollout
  batch = config.batch
  room = batch.max_micro_batches * batch.micro_batch_tokens
  assert room >= step * config.episode.max_context


@pytest.mark.parametrize("preset", one_gpu.LARGE)
def test_large_preset_decodes_256_rows(preset):
  engine = flags.load_config(f"configs/one_gpu.py:{preset}").engine
  assert engine.lanes[-1] == 256
  assert engine.slots > engine.lanes[-1]
  # Room for the rows at half of an episode's usual 2,060 tokens, nearly.
  assert engine.kv_tokens >= 256 * 1024


def test_full_preset_trains_every_weight_at_the_papers_rate():
  full = flags.load_config("configs/one_gpu.py:qwen3_4b-full141")
  adapters = flags.load_config("configs/one_gpu.py:qwen3_4b-141")
  assert (full.lora.rank, adapters.lora.rank) == (0, 32)
  assert full.optimizer.learning_rate == 1e-6
  assert adapters.optimizer.learning_rate == 1e-5


def test_preset_that_does_not_exist_is_refused_with_the_others():
  with pytest.raises(ValueError, match="qwen3_4b-16.*qwen3_4b-24"):
    flags.load_config("configs/one_gpu.py:qwen3_4b-16")
