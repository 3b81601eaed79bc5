"""The configuration: one frozen dataclass per concern.

`ExperimentConfig` contains all of them. `ranges` checks every number, `values`
reads and writes plain dicts, and `changes` says which values may differ when a
run resumes.
"""

from __future__ import annotations

from anysearch_jax.config.experiment import (
  CheckpointConfig,
  DataConfig,
  EvaluationConfig,
  ExperimentConfig,
  WarmStartConfig,
  WatchConfig,
)
from anysearch_jax.config.learning import (
  BatchConfig,
  CriticConfig,
  CurriculumConfig,
  LoraConfig,
  MeshConfig,
  ObjectiveConfig,
  OptimizerConfig,
  PipelineConfig,
  RewardConfig,
)
from anysearch_jax.config.methods import (
  IkeaConfig,
  MethodConfig,
  OtcConfig,
  SearchR1Config,
  StepSearchConfig,
  ZeroSearchConfig,
)
from anysearch_jax.config.rollout import (
  EngineConfig,
  EpisodeConfig,
  McpConfig,
  PagesConfig,
  RetrievalConfig,
  SamplingConfig,
  SearchConfig,
  SglangConfig,
  TextModelConfig,
)

__all__ = [
  "BatchConfig",
  "CheckpointConfig",
  "CriticConfig",
  "CurriculumConfig",
  "DataConfig",
  "EngineConfig",
  "EpisodeConfig",
  "EvaluationConfig",
  "ExperimentConfig",
  "IkeaConfig",
  "LoraConfig",
  "MeshConfig",
  "MethodConfig",
  "ObjectiveConfig",
  "OptimizerConfig",
  "OtcConfig",
  "PipelineConfig",
  "RetrievalConfig",
  "RewardConfig",
  "SamplingConfig",
  "SearchConfig",
  "SearchR1Config",
  "SglangConfig",
  "StepSearchConfig",
  "McpConfig",
  "PagesConfig",
  "TextModelConfig",
  "WarmStartConfig",
  "WatchConfig",
  "ZeroSearchConfig",
]
