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
from collections.abc import Mapping
from typing import NamedTuple

from anysearch_jax import config as config_lib
from anysearch_jax.config import settings
from anysearch_jax.configs import paper

# 2048 tokens of the policy, its prompt and 15 passages are about 5,000.
_CONTEXT = 6144
_QUESTIONS = 128


class Sizes(NamedTuple):
  """What a GPU has room for.

  Attributes:
    slots: episodes whose KV cache is kept.
    lanes: rows of decode calls.
    row: tokens of a micro-batch, which is one row.
  """

  slots: int
  lanes: tuple[int, ...]
  row: int = _CONTEXT


class Policy(NamedTuple):
  """A policy that trains on a GPU of any of the `MEMORIES`.

  Attributes:
    folder: in `models/`.
    kv_tokens: tokens of KV cache by memory; 0: all that the slots can need.
  """

  folder: str
  kv_tokens: Mapping[str, int]


class LargePolicy(NamedTuple):
  """A policy that nearly fills its GPU.

  Attributes:
    folder: in `models/`.
    kv_tokens: tokens of KV cache.
    sizes: what the GPU has room for.
    attention_only: whether the attention alone is adapted. PEFT's layout has no
      name for one expert.
    full: whether every weight is trained, and no adapter.
  """

  folder: str
  kv_tokens: int
  sizes: Sizes
  attention_only: bool = False
  full: bool = False


# By memory in GB. Steps of 128 episodes of 1,000 to 3,300 tokens waste 3.2 % of
# rows of 6,144 (10 % at worst) and of 12,288 (6 %), on which XLA's attention,
# of GPUs before Hopper, takes twice as long.
MEMORIES = {
  "24": Sizes(slots=32, lanes=(8, 16, 32)),
  "80": Sizes(slots=128, lanes=(32, 64, 128)),
  "141": Sizes(slots=320, lanes=(64, 128, 256), row=2 * _CONTEXT),
}
# A token of Qwen3 takes 4 to 12 times the cache of a token of Qwen2.5.
_UNLIMITED = {"24": 0, "80": 0, "141": 3 << 18}
_QWEN3_SMALL = {"24": 1 << 16, "80": 1 << 18, "141": 1 << 19}
POLICIES = {
  "qwen2_5_0_5b": Policy("Qwen2.5-0.5B-Instruct", _UNLIMITED),
  "qwen2_5_1_5b": Policy("Qwen2.5-1.5B-Instruct", _UNLIMITED),
  "qwen3_0_6b": Policy("Qwen3-0.6B", _QWEN3_SMALL),
  "gemma3_1b": Policy("gemma-3-1b-it", _UNLIMITED),
  "qwen3_1_7b": Policy("Qwen3-1.7B", _QWEN3_SMALL),
  "smollm3_3b": Policy(
    "SmolLM3-3B", {"24": 1 << 16, "80": 3 << 17, "141": 3 << 18}
  ),
  "qwen3_4b": Policy(
    "Qwen3-4B", {"24": 1 << 14, "80": 3 << 16, "141": 3 << 17}
  ),
}
_MANY_LANES = Sizes(slots=320, lanes=(32, 64, 128, 256))
_FEW_LANES = Sizes(slots=80, lanes=(16, 32, 64))
LARGE = {
  "qwen3_4b-full141": LargePolicy(
    "Qwen3-4B", 3 << 17, _MANY_LANES._replace(row=2 * _CONTEXT), full=True
  ),
  "qwen2_5_7b-80": LargePolicy("Qwen2.5-7B-Instruct", 7 << 16, _MANY_LANES),
  "llama3_1_8b-80": LargePolicy("Llama-3.1-8B-Instruct", 1 << 18, _MANY_LANES),
  # Each of its query heads has its own keys and values.
  "olmo3_7b-141": LargePolicy("Olmo-3-7B-Instruct", 1 << 17, _FEW_LANES),
  "qwen3_30b_a3b-141": LargePolicy(
    "Qwen3-30B-A3B", 1 << 16, _FEW_LANES, attention_only=True
  ),
  "gpt_oss_20b-141": LargePolicy(
    "gpt-oss-20b", 1 << 17, _FEW_LANES, attention_only=True
  ),
}
PRESETS = (
  *(f"{policy}-{memory}" for policy in POLICIES for memory in MEMORIES),
  *LARGE,
)


def get_config(preset: str) -> config_lib.ExperimentConfig:
  settings.require("preset", preset, PRESETS)
  name, memory = preset.rsplit("-", 1)
  large = LARGE.get(preset)
  if large is None:
    sizes = MEMORIES[memory]
    folder = POLICIES[name].folder
    kv_tokens = POLICIES[name].kv_tokens[memory]
  else:
    sizes = large.sizes
    folder = large.folder
    kv_tokens = large.kv_tokens
  # The paper's run with adapters on one GPU, in smaller.
  base = paper.experiment(
    name,
    f"models/{folder}",
    "lora80",
    kv_tokens=paper.KvTokens(four=0, one80=kv_tokens, one141=0),
  )
  remat = base.batch.remat
  if large is not None:
    if large.full:
      base = dataclasses.replace(
        base,
        lora=config_lib.LoraConfig(),
        optimizer=config_lib.OptimizerConfig(),
      )
    if large.attention_only:
      base = config_lib.changed(base, lora={"targets": ("q", "k", "v", "o")})
    else:
      # So few lanes leave room for what "dots" keeps.
      remat = "dots"
  trajectories = _QUESTIONS * base.group // base.curriculum.batches_per_rollout
  return config_lib.changed(
    base,
    name=f"one_gpu-{preset}",
    questions=_QUESTIONS,
    reward=config_lib.RewardConfig(length_limit=1024, length_tolerance=512),
    episode=config_lib.EpisodeConfig(max_generated=2048, max_context=_CONTEXT),
    engine={
      "slots": sizes.slots,
      "max_context": _CONTEXT,
      "lanes": sizes.lanes,
    },
    batch={
      "row_lengths": (sizes.row,),
      "micro_batch_tokens": sizes.row,
      "max_segments": sizes.row // 384,
      "remat": remat,
      # Also where every trajectory has the longest context.
      "max_micro_batches": trajectories * _CONTEXT // sizes.row,
    },
  )
