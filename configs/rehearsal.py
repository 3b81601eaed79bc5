"""A small version of the paper's run, to rehearse its commands on a CPU.

    python -m launch.rehearsal --family=qwen2_5 --tokenizer=DIR \
        --questions=DIR --corpus=FILE

This command runs the same commands as the paper's run, with real questions and
passages, a random policy of two layers and the family's real tokenizer. It
trains two rollouts, the first in Phase I and the second in Phase II, and takes
a few minutes.

Presets, `--config=configs/rehearsal.py:<family>`: qwen2_5, qwen3, llama3_1.
"""

from __future__ import annotations

import dataclasses

from anysearch_jax import config as config_lib
from configs import llama3_1_8b, quickstart, qwen2_5_7b, qwen3_4b

# By family: its configuration, and the config.json whose sizes are reduced.
FAMILIES = {
  "qwen2_5": (qwen2_5_7b, "configs/shapes/Qwen2.5-7B-Instruct.json"),
  "qwen3": (qwen3_4b, "configs/shapes/Qwen3-4B.json"),
  "llama3_1": (llama3_1_8b, "configs/shapes/Llama-3.1-8B-Instruct.json"),
}


def get_config(family: str) -> config_lib.ExperimentConfig:
  if family not in FAMILIES:
    raise ValueError(
      f"configs/rehearsal.py: found preset {family!r}, expected one of "
      f"{', '.join(FAMILIES)}."
    )
  paper = FAMILIES[family][0].get_config()
  return dataclasses.replace(
    paper,
    name=f"rehearsal-{family}",
    policy="runs/rehearsal/policy",
    # Passages come from a server, as in runs on several nodes.
    retrieval=config_lib.RetrievalConfig(
      kind="http", url="http://127.0.0.1:8000"
    ),
    compute_dtype="float32",
    questions=2,
    group=3,
    save_every=1,
    curriculum=config_lib.CurriculumConfig(
      max_budget=1,
      phase1_steps=1,
      total_steps=2,
      steps_per_rollout=1,
      window=4,
    ),
    optimizer=config_lib.OptimizerConfig(learning_rate=1e-4),
    episode=config_lib.EpisodeConfig(max_generated=32, max_context=2048),
    engine=dataclasses.replace(
      quickstart.get_config().engine,
      slots=6,
      max_context=2048,
      page=64,
      lanes=(6,),
      prefill_lanes=2,
      prefill_chunk=256,
    ),
    batch=config_lib.BatchConfig(
      row_lengths=(2048,), micro_batch_tokens=2048, max_micro_batches=8
    ),
    mesh=config_lib.MeshConfig(),
    pipeline=config_lib.PipelineConfig(),
    checkpoint=config_lib.CheckpointConfig(export_dtype="float32"),
    evaluation=config_lib.EvaluationConfig(
      budgets=(0, 2), questions=4, seeds=(42,)
    ),
  )
