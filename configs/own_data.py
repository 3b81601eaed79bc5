"""A first training on questions and passages of your own, without a GPU.

Hardware: a laptop, with 8 GB of memory for the policy below. docs/data.md
has the commands before and after it, and what was measured.
Expected: next to nothing is learnt. Eight optimizer steps of 8 trajectories
show that your files, an index, a training and an evaluation fit together.

    python -m launch.train --config=configs/own_data.py --output=runs/mine

Questions from data/mine (launch.prepare_data), passages from indexes/mine
(launch.build_index).
"""

from __future__ import annotations

from anysearch_jax import config as config_lib

# What to search, what to ask, and what learns to answer.
INDEX = "indexes/mine"  # Folder of launch.build_index.
QUESTIONS = "data/mine"  # Folder of launch.prepare_data.
POLICY = "models/Qwen2.5-0.5B-Instruct"  # A Hugging Face folder.


def get_config() -> config_lib.ExperimentConfig:
  return config_lib.ExperimentConfig(
    name="own_data",
    policy=POLICY,
    # "bfloat16" on an accelerator; CPUs compute in float32.
    compute_dtype="float32",
    # A rollout plays 2 questions 4 times each; on a GPU take 64 or more.
    questions=2,
    group=4,
    save_every=4,
    data=config_lib.DataConfig(source="prepared", path=QUESTIONS),
    retrieval=config_lib.RetrievalConfig(kind="index", index=INDEX),
    # Answers of more tokens are worth less.
    reward=config_lib.RewardConfig(length_limit=256, length_tolerance=128),
    # Budgets up to 2 searches. Half of the steps are in each phase, so that
    # both are seen; a training that teaches something takes hundreds.
    curriculum=config_lib.CurriculumConfig(
      max_budget=2, phase1_steps=4, total_steps=8, steps_per_rollout=1
    ),
    optimizer=config_lib.OptimizerConfig(learning_rate=1e-5),
    # Trains adapters, which take little memory; rank 0 trains every weight.
    lora=config_lib.LoraConfig(rank=16, base_dtype="bfloat16"),
    # Tokens of an episode; `engine` and `batch` must hold them.
    episode=config_lib.EpisodeConfig(max_generated=256, max_context=2048),
    engine=config_lib.EngineConfig(
      slots=8,
      max_context=2048,
      page=64,
      lanes=(8,),
      prefill_lanes=2,
      prefill_chunk=256,
    ),
    batch=config_lib.BatchConfig(
      row_lengths=(2048,),
      micro_batch_tokens=2048,
      max_micro_batches=8,
      max_segments=16,
      remat="full",
    ),
    evaluation=config_lib.EvaluationConfig(budgets=(0, 1, 2), questions=20),
  )
