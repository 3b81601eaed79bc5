"""The whole method on a laptop: a tiny policy in the generated world.

Hardware: one CPU core, about 1 GB of memory. Time: about three minutes a run.
Expected: accuracy rises with the budget, tool productivity is above both
controls, and the policy rarely searches for facts that it knows by heart.

    python -m launch.train --config=configs/quickstart.py \
        --output=runs/quickstart/anysearch

Controls, from the same warm start with the same number of steps:
    no tool reward     --config.reward.gamma_mode=off
    Search-R1-like     configs/quickstart_search_r1.py
To make the warm start in configs/quickstart_policy/ again:
    python -m launch.warm_start --config=configs/quickstart.py
"""

from __future__ import annotations

from anysearch_jax import config as config_lib


def get_config() -> config_lib.ExperimentConfig:
  return config_lib.ExperimentConfig(
    name="quickstart",
    policy="configs/quickstart_policy",
    compute_dtype="float32",
    questions=16,
    group=5,
    save_every=40,
    # The lengths suit the world: an episode generates 20 to 120 tokens.
    reward=config_lib.RewardConfig(length_limit=200, length_tolerance=100),
    curriculum=config_lib.CurriculumConfig(
      phase1_steps=40, total_steps=240, steps_per_rollout=2
    ),
    # Higher than the paper's 1e-6, because the policy has 0.3 M parameters, not
    # 7 B. At twice this rate, the seed matters more than the reward.
    optimizer=config_lib.OptimizerConfig(learning_rate=2e-4),
    episode=config_lib.EpisodeConfig(
      prompts="world", max_generated=300, max_context=544
    ),
    engine=config_lib.EngineConfig(
      slots=80, max_context=544, page=8, prefill_chunk=16
    ),
    batch=config_lib.BatchConfig(
      row_lengths=(128, 192, 320, 576),
      micro_batch_tokens=640,
      max_micro_batches=48,
    ),
    # The policy is small enough to export in float32.
    checkpoint=config_lib.CheckpointConfig(export_dtype="float32"),
    evaluation=config_lib.EvaluationConfig(budgets=(0, 1, 2, 3, 5, 8)),
  )
