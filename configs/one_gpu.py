"""Policies of 0.5 to 30 billion parameters on one GPU of 24, 80 or 141 GB.

    hf download Qwen/Qwen3-1.7B --local-dir models/Qwen3-1.7B
    python -m launch.train --config=configs/one_gpu.py:qwen3_1_7b-24 \\
        --output=runs/x

Presets, `--config=configs/one_gpu.py:<policy>-<GB>`:
    qwen2_5_0_5b, qwen2_5_1_5b, qwen3_0_6b, gemma3_1b, qwen3_1_7b, smollm3_3b
    or qwen3_4b
    24 (as an RTX 4090), 80 (H100, A100) or 141 (H200)
and six that nearly fill their GPU:
    qwen3_4b-full141             every weight is trained, not adapters
    qwen2_5_7b-80, llama3_1_8b-80, olmo3_7b-141
    qwen3_30b_a3b-141            adapters of attention alone
    gpt_oss_20b-141              likewise; MXFP4 becomes bfloat16

The GPU trains adapters of rank 32 and samples in turns. Differences from the
paper's run (`configs/paper.py`), besides the adapters: a rollout has 128
questions instead of 512, and an optimizer step 128 trajectories instead of 512.
An episode generates 2048 tokens at most instead of 4096, and the lengths in the
reward are halved with that.
Memory: docs/one_gpu.md has the plan of each preset.
Expected: unknown; nothing has been trained with it yet.
"""

from __future__ import annotations

import dataclasses

from anysearch_jax import config as config_lib
from anysearch_jax.config import settings
from anysearch_jax.configs import paper

# 2048 tokens of the policy, its prompt and 15 passages are about 5,000.
_CONTEXT = 6144
_QUESTIONS = 128


# By memory: episodes whose KV cache is kept, rows of decode calls, tokens of a
# micro-batch, which is one row. Steps of 128 episodes of 1,000 to 3,300 tokens
# waste 3.2 % of rows of 6,144 (10 % at worst) and of 12,288 (6 %), on which
# XLA's attention, of GPUs before Hopper, takes twice as long.
MEMORIES: dict[str, tuple[int, tuple[int, ...], int]] = {
  "24": (32, (8, 16, 32), _CONTEXT),
  "80": (128, (32, 64, 128), _CONTEXT),
  "141": (320, (64, 128, 256), 2 * _CONTEXT),
}
# By policy: its folder, and the tokens of KV cache by memory. 0 is all that the
# slots can need; a token of Qwen3 takes 4 to 12 times that of Qwen2.5.
POLICIES = {
  "qwen2_5_0_5b": ("Qwen2.5-0.5B-Instruct", (0, 0, 3 << 18)),
  "qwen2_5_1_5b": ("Qwen2.5-1.5B-Instruct", (0, 0, 3 << 18)),
  "qwen3_0_6b": ("Qwen3-0.6B", (1 << 16, 1 << 18, 1 << 19)),
  "gemma3_1b": ("gemma-3-1b-it", (0, 0, 3 << 18)),
  "qwen3_1_7b": ("Qwen3-1.7B", (1 << 16, 1 << 18, 1 << 19)),
  "smollm3_3b": ("SmolLM3-3B", (1 << 16, 3 << 17, 3 << 18)),
  "qwen3_4b": ("Qwen3-4B", (1 << 14, 3 << 16, 3 << 17)),
}
# Its attention alone is adapted: PEFT's layout has no name for one expert.
_EXPERTS = ("qwen3_30b_a3b-141", "gpt_oss_20b-141")
_WINDOWS = "olmo3_7b-141"  # Each query head has its own keys and values.
# Policies that nearly fill their GPU: folder, tokens of KV cache and of a
# micro-batch. So few leave room for what remat "dots" keeps.
LARGE = {
  "qwen3_4b-full141": ("Qwen3-4B", 3 << 17, 2 * _CONTEXT),
  "qwen2_5_7b-80": ("Qwen2.5-7B-Instruct", 7 << 16, _CONTEXT),
  "llama3_1_8b-80": ("Llama-3.1-8B-Instruct", 1 << 18, _CONTEXT),
  _WINDOWS: ("Olmo-3-7B-Instruct", 1 << 17, _CONTEXT),
  _EXPERTS[0]: ("Qwen3-30B-A3B", 1 << 16, _CONTEXT),
  _EXPERTS[1]: ("gpt-oss-20b", 1 << 17, _CONTEXT),
}
PRESETS = (
  *(f"{policy}-{memory}" for policy in POLICIES for memory in MEMORIES),
  *LARGE,
)


def get_config(preset: str) -> config_lib.ExperimentConfig:
  settings.require("preset", preset, PRESETS)
  policy, size = preset.rsplit("-", 1)
  if preset not in LARGE:
    folder, kv_tokens = POLICIES[policy]
    slots, lanes, row = MEMORIES[size]
    kv = kv_tokens[list(MEMORIES).index(size)]
  else:
    folder, kv, row = LARGE[preset]
    slots = 320
    lanes = (32, 64, 128, 256)
    if preset in (*_EXPERTS, _WINDOWS):
      slots = 80
      lanes = (16, 32, 64)
  # The paper's run with adapters on one GPU, in smaller.
  base = paper.experiment(
    policy, f"models/{folder}", "lora80", kv_tokens=paper.KvTokens(kv, kv, kv)
  )
  if size.startswith("full"):
    base = dataclasses.replace(
      base, lora=config_lib.LoraConfig(), optimizer=config_lib.OptimizerConfig()
    )
  if preset in _EXPERTS:
    base = config_lib.changed(base, lora={"targets": ("q", "k", "v", "o")})
  dots = preset in LARGE and preset not in _EXPERTS
  trajectories = _QUESTIONS * base.group // base.curriculum.batches_per_rollout
  return config_lib.changed(
    base,
    name=f"one_gpu-{preset}",
    questions=_QUESTIONS,
    reward=config_lib.RewardConfig(length_limit=1024, length_tolerance=512),
    episode=config_lib.EpisodeConfig(max_generated=2048, max_context=_CONTEXT),
    engine={"slots": slots, "max_context": _CONTEXT, "lanes": lanes},
    batch={
      "row_lengths": (row,),
      "micro_batch_tokens": row,
      "max_segments": row // 384,
      "remat": "dots" if dots else base.batch.remat,
      # Also where every trajectory has the longest context.
      "max_micro_batches": trajectories * _CONTEXT // row,
    },
  )
