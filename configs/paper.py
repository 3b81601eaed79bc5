"""The common part of the paper's three policies, such as `qwen2_5_7b.py`.

The hyperparameters are the paper's table; most are the defaults of `config`.
The hardware is one node of eight GPUs of 80 GB (the paper: H800): 0-3 train
(fsdp 2, tensor parallelism 2) while 4-7 sample the next rollout. Questions come
from data/qa (launch.prepare_data), passages from indexes/e5
(launch.build_index); docs/one_gpu.md has the commands.

Presets, `--config=configs/<policy>.py:<preset>`:
    (none)       512 trajectories per optimizer step, five steps per rollout
    questions    512 questions (2560 trajectories) per optimizer step, one step
                 per rollout: the other reading of "global batch size 512"
    lora80       LoRA on one GPU of 80 GB, which also samples
    lora141      LoRA on one GPU of 141 GB, which also samples
    priced       a search costs .1 / B of a right answer, which docs/evidence.md
                 found better in the generated world; it costs no more than the
                 paper's run. At this size nobody has tried it

Importance ratios are to the engine's log-probabilities, as in the run of the
paper's authors, with a cap on the ratio of tokens of negative advantage;
docs/rollouts.md says when to set `objective.old_logp=trainer`. This costs a
fifth of the training time.

An episode of B <= 5 searches needs at most about 7,000 tokens: the prompt, 4096
generated tokens and 15 passages. Contexts end at 8192, although retrievers with
longer passages may need up to 32768, for which training rows (12,288 tokens)
would have to be as long.
"""

from __future__ import annotations

from typing import NamedTuple

from anysearch_jax import config as config_lib
from anysearch_jax.config import settings
from anysearch_jax.configs import objectives

PRESETS = ("", "questions", "lora80", "lora141", "priced")


# Tokens of a row of decode: half of an episode's, and room for longer ones.
_ROW_TOKENS = 2400


class KvTokens(NamedTuple):
  """Tokens of KV cache that fit.

  Attributes:
    four: on four GPUs of 80 GB that only sample.
    one80: on one GPU of 80 GB, which also trains.
    one141: on one GPU of 141 GB, which also trains.
  """

  four: int
  one80: int
  one141: int


def experiment(
  name: str,
  policy: str,
  preset: str,
  *,
  kv_tokens: KvTokens,
  dots80: bool = False,
) -> config_lib.ExperimentConfig:
  """Returns the configuration of the paper's run of one policy.

  Args:
    name: name of the run.
    policy: Hugging Face folder of the policy.
    preset: one of `PRESETS`.
    kv_tokens: size of the engine's KV cache on each kind of hardware.
    dots80: whether `lora80` has room for the outputs of matrix products.

  Raises:
    ValueError: the preset is unknown.
  """
  settings.require("preset", preset, PRESETS)
  config = config_lib.ExperimentConfig(
    name="-".join(filter(None, (name, preset))),
    policy=policy,
    data=config_lib.DataConfig(source="prepared", path="data/qa"),
    retrieval=config_lib.RetrievalConfig(kind="index", index="indexes/e5"),
    episode=config_lib.EpisodeConfig(max_context=8192),
    engine=_engine(kv_tokens.four, prefill_lanes=128),
    # Rows of 12,288 tokens pack 512 episodes of 1,000 to 4,200 tokens on
    # average with 2.6 % of padding (5.4 % at worst).
    batch=config_lib.BatchConfig(
      row_lengths=(12288,),
      micro_batch_tokens=24576,
      max_micro_batches=256,
      max_segments=24,
      # launch.plan: 53 to 55 of 73 GiB of an H100 for 7B and 8B, and 13 %
      # faster than recomputing everything ("full").
      remat="dots",
    ),
    mesh=config_lib.MeshConfig(
      fsdp=2,
      tensor=2,
      sequence_parallel=True,
      trainer=(0, 1, 2, 3),
      rollout=(4, 5, 6, 7),
    ),
    pipeline=config_lib.PipelineConfig(async_level=1),
    # In bfloat16 engine and trainer give a token different log-probabilities
    # (each about .016 from float32 at 153 M parameters), well inside the clip
    # range. Where the advantage is negative, the clip alone does not bound a
    # ratio above 1; 3 is verl's bound (its `clip_ratio_c`).
    objective=config_lib.ObjectiveConfig(importance_cap=3.0),
    # Single tokens were measured whose probabilities differ by almost 1, at
    # 32 B parameters, https://fengyao.notion.site/off-policy-rl, so one such
    # token does not mean that the engine has other weights.
    watch=config_lib.WatchConfig(max_largest_gap=20.0),
  )
  if preset == "priced":
    return objectives.priced(config)
  if preset == "questions":
    # A step has five times as many trajectories.
    return config_lib.changed(
      config,
      curriculum=config_lib.CurriculumConfig(steps_per_rollout=1),
      batch={"max_micro_batches": 1280},
    )
  if preset:
    large = preset == "lora141"
    tokens = kv_tokens.one141 if large else kv_tokens.one80
    return _on_one_gpu(config, kv_tokens=tokens, dots=large or dots80)
  return config


def _engine(kv_tokens: int, *, prefill_lanes: int) -> config_lib.EngineConfig:
  """Returns an engine with as many lanes as the KV cache has room for.

  A quarter more episodes are kept: those that search need no lane. Passages of
  some 590 tokens fill chunks of 32 to 97 %.
  """
  rows = max(8, kv_tokens // _ROW_TOKENS)
  lanes = 1 << rows.bit_length() - 1
  return config_lib.EngineConfig(
    slots=lanes * 5 // 4,
    max_context=8192,
    kv_tokens=kv_tokens,
    page=64,
    lanes=(lanes // 8, lanes // 4, lanes // 2, lanes),
    prefill_lanes=prefill_lanes,
    prefill_chunk=32,
    decode_steps=32,
  )


def _on_one_gpu(
  config: config_lib.ExperimentConfig, *, kv_tokens: int, dots: bool
) -> config_lib.ExperimentConfig:
  """Returns the configuration with LoRA on every matrix of a bfloat16 base.

  The learning rate is ten times that of full training, as is usual for LoRA.
  """
  return config_lib.changed(
    config,
    mesh=config_lib.MeshConfig(),
    # One GPU samples and trains in turns, so there is nothing to overlap.
    pipeline=config_lib.PipelineConfig(),
    optimizer=config_lib.OptimizerConfig(learning_rate=1e-5),
    lora=config_lib.LoraConfig(rank=32, alpha=64.0, base_dtype="bfloat16"),
    batch={
      # One GPU holds every row's activations. One row at a time leaves room for
      # the outputs of matrix products, except for 7B and 8B on 80 GB.
      "micro_batch_tokens": 12288,
      "max_micro_batches": 512,
      "remat": "dots" if dots else "full",
    },
    engine=_engine(kv_tokens, prefill_lanes=64),
  )
