"""What the paper's three policies have in common; `qwen2_5_7b.py` and others.

Hyperparameters are the paper's table; most are the defaults of `config`. One
node of eight GPUs: 0-3 train (tensor parallelism 2) while 4-7 sample the next
rollout.

Presets, `--config=configs/<policy>.py:<preset>`:
    (none)       512 trajectories an optimizer step, five steps a rollout
    questions    512 questions (2560 trajectories) an optimizer step, one step a
                 rollout: the other reading of "global batch size 512"
    lora80       adapters on one GPU of 80 GB, which samples too
    lora141      adapters on one GPU of 141 GB, which samples too

The objective is not quite the paper's: ratios are to the trainer's own
log-probabilities, corrected for what sampled (`objective.importance_cap`). That
costs one more forward pass of a rollout, a quarter of the training time; a run
can stop between rollouts only. `--config.objective.old_logp=engine
--config.objective.importance_cap=0` is without.

An episode of B <= 5 searches needs about 7,000 tokens at most: the prompt, 4096
generated ones and 15 passages. Contexts end at 8192, below the 32768 that other
retrievers may want: a row of training is as long.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from anysearch_jax import config as config_lib

PRESETS = ("", "questions", "lora80", "lora141")


class KvTokens(NamedTuple):
  """Tokens of KV cache that fit: in four GPUs of 80 GB, in one, in 141 GB."""

  four: int
  one80: int
  one141: int


def experiment(
  name: str, policy: str, preset: str, *, kv_tokens: KvTokens
) -> config_lib.ExperimentConfig:
  """The paper's run of one policy.

  Args:
    name: of the run.
    policy: its Hugging Face folder.
    preset: one of `PRESETS`.
    kv_tokens: of the engine.

  Raises:
    ValueError: an unknown preset.
  """
  if preset not in PRESETS:
    raise ValueError(
      f"{name}: found preset {preset!r}, expected one of "
      f"{', '.join(filter(None, PRESETS))}, or none."
    )
  config = config_lib.ExperimentConfig(
    name="-".join(filter(None, (name, preset))),
    policy=policy,
    data=config_lib.DataConfig(source="prepared", path="data/qa"),
    retrieval=config_lib.RetrievalConfig(kind="index", index="indexes/e5"),
    episode=config_lib.EpisodeConfig(max_context=8192),
    engine=config_lib.EngineConfig(
      slots=512,
      max_context=8192,
      kv_tokens=kv_tokens.four,
      page=64,
      lanes=(32, 64, 128),
      prefill_lanes=8,
      prefill_chunk=512,
      decode_steps=32,
    ),
    # Longer trajectories stand alone in a row, shorter ones share it.
    batch=config_lib.BatchConfig(
      row_lengths=(8192,),
      micro_batch_tokens=32768,
      max_micro_batches=128,
      max_segments=16,
      remat="full",
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
    # (each about .016 from float32 at 153 M parameters), and rollouts are of
    # older weights. The ratio that is clipped is to the trainer's own, and a
    # token's loss is weighted by the trainer's probability over the engine's,
    # at most 2: truncated importance sampling,
    # https://fengyao.notion.site/off-policy-rl
    objective=config_lib.ObjectiveConfig(
      old_logp="trainer", importance_cap=2.0
    ),
    # The same measured single tokens whose probabilities differ by almost 1, at
    # 32 B parameters: one of them alone is no sign of other weights.
    watch=config_lib.WatchConfig(max_largest_gap=20.0),
  )
  if preset == "questions":
    # Five times the trajectories in a step.
    return dataclasses.replace(
      config,
      curriculum=config_lib.CurriculumConfig(steps_per_rollout=1),
      batch=dataclasses.replace(config.batch, max_micro_batches=640),
    )
  if preset:
    large = preset == "lora141"
    tokens = kv_tokens.one141 if large else kv_tokens.one80
    return _on_one_gpu(config, kv_tokens=tokens, large=large)
  return config


def _on_one_gpu(
  config: config_lib.ExperimentConfig, *, kv_tokens: int, large: bool
) -> config_lib.ExperimentConfig:
  """Adapters on every matrix beside a frozen bfloat16 base.

  The learning rate is ten times that of training every weight, as is usual.
  """
  return dataclasses.replace(
    config,
    mesh=config_lib.MeshConfig(),
    # One GPU does one thing at a time.
    pipeline=config_lib.PipelineConfig(),
    optimizer=config_lib.OptimizerConfig(learning_rate=1e-5),
    lora=config_lib.LoraConfig(rank=32, alpha=64.0, base_dtype="bfloat16"),
    batch=dataclasses.replace(
      config.batch,
      micro_batch_tokens=32768 if large else 16384,
      max_micro_batches=128 if large else 256,
    ),
    engine=dataclasses.replace(
      config.engine,
      slots=128,
      kv_tokens=kv_tokens,
      lanes=(8, 16, 32),
      prefill_lanes=4,
    ),
  )
