"""The configuration: one frozen dataclass a concern, one file a room.

`ExperimentConfig` is the whole; `ranges` says what a number may be, `values`
reads and writes plain dicts.
"""

from __future__ import annotations

from anysearch_jax.config.experiment import (
  BatchConfig,
  CheckpointConfig,
  CriticConfig,
  CurriculumConfig,
  DataConfig,
  EvaluationConfig,
  ExperimentConfig,
  LoraConfig,
  MeshConfig,
  ObjectiveConfig,
  OptimizerConfig,
  PipelineConfig,
  RewardConfig,
  WarmStartConfig,
  WatchConfig,
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
  "TextModelConfig",
  "WarmStartConfig",
  "WatchConfig",
  "ZeroSearchConfig",
]
