"""Which configurations can run."""

from __future__ import annotations

from anysearch_jax import config as config_lib
from anysearch_jax import curriculum
from anysearch_jax.policy import lora
from anysearch_jax.rollout import engine as engine_lib
from anysearch_jax.rollout import sampling
from anysearch_jax.training import checkpoint


def validate(config: config_lib.ExperimentConfig) -> None:
  """Refuses what cannot run before anything is allocated.

  Raises:
    ValueError: what was found, what was expected.
  """
  curriculum.validate(config.curriculum)
  sampling.validate_training(config.sampling)
  checkpoint.validate(config.checkpoint)
  lora.validate(config.lora)
  if config.compute_dtype not in ("float32", "bfloat16"):
    raise ValueError(
      f"compute_dtype: found {config.compute_dtype!r}, expected float32 or "
      "bfloat16."
    )
  trajectories = config.questions * config.group
  if trajectories % config.curriculum.steps_per_rollout:
    raise ValueError(
      f"{config.questions} questions x {config.group} samples = {trajectories} "
      f"trajectories do not divide into "
      f"{config.curriculum.steps_per_rollout} optimizer steps a rollout."
    )
  if list(config.batch.row_lengths) != sorted(set(config.batch.row_lengths)):
    raise ValueError(
      f"batch.row_lengths: found {config.batch.row_lengths}, expected "
      "ascending lengths."
    )
  if config.episode.max_context > config.batch.row_lengths[-1] + 1:
    raise ValueError(
      f"episode.max_context {config.episode.max_context} exceeds the longest "
      f"training row, batch.row_lengths[-1] {config.batch.row_lengths[-1]}."
    )
  longest = engine_lib.max_context(config.engine)
  if config.episode.max_context > longest:
    raise ValueError(
      f"episode.max_context {config.episode.max_context} exceeds the engine's "
      f"{longest}; raise the last of engine.kv_buckets."
    )
