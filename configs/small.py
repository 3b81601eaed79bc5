"""Small real models, from untrained to a searching policy.

    anysearch demonstrate --config=configs/small.py:smollm2-cpu \\
        --output=runs/small/demonstrations
    anysearch sft --config=configs/small.py:smollm2-cpu \\
        --demonstrations=runs/small/demonstrations --output=runs/small/sft
    anysearch train --config=configs/small.py:smollm2-cpu \\
        --config.policy=runs/small/sft/policy --output=runs/small/anysearch

Presets, `--config=configs/small.py:<preset>`:
    smollm2-cpu          SmolLM2-135M-Instruct on two CPU cores
    smollm2-80           the same on one GPU of 80 GB
    qwen2_5_0_5b-cpu     Qwen2.5-0.5B-Instruct on two CPU cores
    qwen2_5_0_5b-24      the same on one GPU of 24 GB
    qwen2_5_0_5b-80      the same on one GPU of 80 GB
Questions from data/mine (launch.prepare_data), passages from indexes/mine
(launch.build_index).
Hardware: 4 GB of memory for smollm2-cpu, 8 GB for qwen2_5_0_5b-cpu.
Measured on two cores with AMX. smollm2-cpu: a step of `sft` (16 demonstrations,
4,700 tokens) takes 16 s, 300 tokens a second; a rollout of `train` (40 episodes
of 386 tokens) 75 s and its step 154 s, the first of each with their compilation
and beside other work. qwen2_5_0_5b-cpu: a step of `sft` (4,600 tokens) takes
41 s, 112 tokens a second, and 64 steps 47 minutes. The other presets have not
been run.
"""

from __future__ import annotations

from typing import NamedTuple

from anysearch_jax import config as config_lib
from anysearch_jax.config import settings
from anysearch_jax.configs import own_data

PRESETS = (
  "smollm2-cpu",
  "smollm2-80",
  "qwen2_5_0_5b-cpu",
  "qwen2_5_0_5b-24",
  "qwen2_5_0_5b-80",
)
# A prompt, three searches of two passages of 400 characters, and the turns.
_CONTEXT = 1152


class Sizes(NamedTuple):
  """What a machine has room and time for.

  Attributes:
    questions: of a rollout.
    group: trajectories of each question.
    slots: episodes whose KV cache is kept.
    lanes: rows of decode calls.
    dtype: of computation.
    batch: shapes of training.
  """

  questions: int
  group: int
  slots: int
  lanes: tuple[int, ...]
  dtype: str
  batch: config_lib.BatchConfig


_CPU = Sizes(
  questions=8,
  group=5,
  slots=40,
  lanes=(8, 40),
  dtype="bfloat16",
  batch=config_lib.BatchConfig(
    row_lengths=(512, 1152),
    micro_batch_tokens=1152,
    max_micro_batches=48,
    remat="attention",
    attention_chunk=128,
  ),
)


def _gpu_batch(rows: int) -> config_lib.BatchConfig:
  """Returns micro-batches of so many rows."""
  return config_lib.BatchConfig(
    row_lengths=(_CONTEXT,),
    micro_batch_tokens=rows * _CONTEXT,
    max_micro_batches=64,
    remat="dots",
  )


SIZES = {
  "cpu": _CPU,
  "24": Sizes(64, 8, 256, (64, 128, 256), "bfloat16", _gpu_batch(8)),
  "80": Sizes(128, 8, 512, (128, 256, 512), "bfloat16", _gpu_batch(16)),
}
POLICIES = {
  "smollm2": "models/SmolLM2-135M-Instruct",
  "qwen2_5_0_5b": "models/Qwen2.5-0.5B-Instruct",
}
# Of adapters, which take more than all weights would.
SFT_RATES = {"smollm2": 1e-3, "qwen2_5_0_5b": 5e-4}


def get_config(preset: str) -> config_lib.ExperimentConfig:
  settings.require("preset", preset, PRESETS)
  name, machine = preset.rsplit("-", 1)
  sizes = SIZES[machine]
  return config_lib.ExperimentConfig(
    name=f"small-{preset}",
    policy=POLICIES[name],
    compute_dtype=sizes.dtype,
    questions=sizes.questions,
    group=sizes.group,
    data=config_lib.DataConfig(source="prepared", path=own_data.QUESTIONS),
    retrieval=config_lib.RetrievalConfig(kind="index", index=own_data.INDEX),
    # Of 2,930 questions, two passages of 400 characters tell 51 % of the
    # answers at the first search, three whole ones 61 % in twice the tokens.
    search=config_lib.SearchConfig(passage_characters=400),
    episode=config_lib.EpisodeConfig(
      prompts="compact",
      top_k=2,
      max_generated=256,
      max_context=_CONTEXT,
      max_turn=96,
    ),
    reward=config_lib.RewardConfig(length_limit=160, length_tolerance=96),
    curriculum=config_lib.CurriculumConfig(
      max_budget=3,
      phase1_steps=0,
      total_steps=200,
      steps_per_rollout=1,
    ),
    optimizer=config_lib.OptimizerConfig(learning_rate=2e-5),
    lora=config_lib.LoraConfig(rank=32, base_dtype=sizes.dtype),
    sft=config_lib.SftConfig(
      steps=150, demonstrations=16, learning_rate=SFT_RATES[name]
    ),
    engine=config_lib.EngineConfig(
      slots=sizes.slots,
      max_context=_CONTEXT,
      page=32,
      lanes=sizes.lanes,
      prefill_lanes=4,
      prefill_chunk=128,
    ),
    batch=sizes.batch,
    evaluation=config_lib.EvaluationConfig(budgets=(0, 1, 2, 3), questions=300),
  )
