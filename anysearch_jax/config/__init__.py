"""The configuration: one frozen dataclass per concern.

A file `configs/<name>.py` returns an `ExperimentConfig` from `get_config()`;
flags override single values (`--config.reward.gamma_mode=fixed`). Defaults are
the paper's (its table of hyperparameters). `settings` says what a line means.
"""

# ruff: noqa: F401  The groups of the other modules are read from here.

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from anysearch_jax import budgets as budgets_lib
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
  SftConfig,
)
from anysearch_jax.config.methods import MethodConfig
from anysearch_jax.config.rollout import (
  AgentsConfig,
  EngineConfig,
  EpisodeConfig,
  McpConfig,
  PagesConfig,
  RetrievalConfig,
  SamplingConfig,
  SearchConfig,
  ServersConfig,
  TextModelConfig,
)
from anysearch_jax.config.settings import (
  SEED,
  SHARE,
  at_least,
  identity,
  learning,
  one_of,
  or_empty,
  placement,
)


@dataclasses.dataclass(frozen=True)
class DataConfig:
  """Where questions and passages come from."""

  source: str = identity("world")
  """`world`, generated; `prepared`, a folder of anysearch prepare_data; or
  `file.py:NAME`, a function of yours that returns a split's questions."""
  path: str = placement("")
  """Folder of `prepared` questions; for an evaluation, also a file of them."""
  world_seed: int = identity(0, at_least(0))
  """Seed of the generated world."""
  world_reliability: float = identity(0.0, SHARE)
  """Probability that a memory of a fact is right there; 0: each relation has
  its own."""
  split: str = identity("train")
  """Name of the split that is trained on."""


@dataclasses.dataclass(frozen=True)
class EvaluationConfig:
  """Which cells (dataset, budget and seed) are evaluated, and how."""

  budgets: tuple[int, ...] = placement(
    (0, 1, 2, 3, 4, 5, 6, 7, 8), or_empty(at_least(0))
  )
  """Search budgets of the cells."""
  pairs: tuple[str, ...] = placement(())
  """Budgets in other units, such as `searches=3,tokens=256`; each is a cell
  beside those of `budgets`, see docs/budgets.md."""
  questions: int = placement(1000, at_least(0))
  """Number of questions of each dataset; 0: all."""
  datasets: tuple[str, ...] = placement(())
  """Names of datasets; empty: all that the questions are from."""
  seeds: tuple[int, ...] = placement((42,), SEED)
  """Seeds of sampling."""
  scaffold: bool = placement(False)
  """Whether the environment states the budget before every turn."""
  scorer: str = placement("paper", one_of("paper", "official"))
  """`paper` records exact match; `official` also records the scores of each
  dataset's published evaluation script."""
  search_price: float = placement(0.0, at_least(0))
  """US dollars per thousand searches. With the other prices it is what budgets
  of dollars are charged by, in training too."""
  input_price: float = placement(0.0, at_least(0))
  """US dollars per million tokens read."""
  output_price: float = placement(0.0, at_least(0))
  """US dollars per million tokens written."""
  tool_prices: tuple[str, ...] = placement(())
  """Tools with prices of their own, in US dollars per thousand calls, such as
  `cheap=10`."""

  @property
  def prices(self) -> budgets_lib.Prices:
    """The prices as a value; raises ValueError for an invalid tool price."""
    return budgets_lib.Prices(
      search=self.search_price,
      input=self.input_price,
      output=self.output_price,
      tools=budgets_lib.parse_tools(self.tool_prices),
    )


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
  """Which checkpoints are kept, and how the policy is exported at the end."""

  keep_last: int = placement(2, at_least(1))
  """Number of newest checkpoints to keep."""
  keep_best: int = placement(0, at_least(0))
  """Number of checkpoints with the largest `best_metric` (in the rollout that
  they end) to keep as well."""
  best_metric: str = placement("reward/em")
  """A name in metrics.jsonl that begins with `reward/`."""
  export_dtype: str = placement(
    "bfloat16", one_of("float32", "bfloat16", "float16")
  )
  """`float32`, `bfloat16` or `float16`, for the files in `policy/`."""


@dataclasses.dataclass(frozen=True)
class WatchConfig:
  """Limits at which a run stops or warns."""

  bad_steps: int = placement(3, at_least(1))
  """The run stops after this many consecutive optimizer steps whose loss,
  gradient or sampled log-probabilities are not finite; such steps are never
  applied."""
  equal_rollouts: int = placement(5, at_least(0))
  """The run stops after this many rollouts in a row in which the rewards of
  every group are equal, so that nothing is learned; 0 is off."""
  max_failed: float = placement(0.5, SHARE)
  """The run stops if a larger share of a rollout's episodes failed because the
  engine or the retriever was unavailable."""
  min_entropy: float = placement(0.005, at_least(0))
  """The run warns below this entropy (nats per token)."""
  max_kl: float = placement(1.0, at_least(0))
  """The run warns above this KL divergence to the reference (nats per token).
  """
  max_gap: float = placement(0.1, at_least(0))
  """The run warns if the engine's log-probabilities and the trainer's differ by
  more than this in the mean (nats)."""
  max_far: float = placement(0.002, SHARE)
  """The run warns if they differ by more than 1 nat in a larger share of the
  tokens."""
  max_largest_gap: float = placement(8.0, at_least(0))
  """The run warns if a token's differ by more than this (nats)."""
  gap_rollouts: int = placement(3, at_least(1))
  """The run stops after this many rollouts in a row beyond one of these limits.
  """
  max_fingerprint_gap: float = placement(0.1, at_least(0))
  """Limit on the mean difference (nats per token) between the engine's scores
  of a fixed prompt and the trainer's. A larger one means that the engine has
  the wrong weights, and the run stops at once."""
  max_stale: int = placement(20, at_least(1))
  """The run warns after this many rollouts without an outcome in some budget's
  window."""
  quiet_seconds: float = placement(60.0, at_least(0))
  """The run or evaluation warns when no turn and no search has ended for this
  long, and lists what it waits for; 0 is off."""


@dataclasses.dataclass(frozen=True)
class ExperimentConfig:
  """The configuration of a run, saved as `config.json` in its folder."""

  name: str = placement("anysearch")
  """Name of the run."""
  seed: int = identity(42, SEED)
  """Seed of the run."""
  policy: str = placement("")
  """A Hugging Face folder."""
  compute_dtype: str = learning("bfloat16", one_of("float32", "bfloat16"))
  """Dtype of sampling and training, bfloat16 or float32; trained weights and
  optimizer moments are always float32."""
  questions: int = identity(512, at_least(1))
  """Questions of a rollout."""
  group: int = identity(5, at_least(1))
  """Trajectories of each question."""
  searchless: int = identity(0, at_least(0))
  """Number of these, the last ones, that are played with a budget of 0. They
  are a group of their own when advantages are computed."""
  save_every: int = placement(20, at_least(1))
  """Rollouts between checkpoints (and recorded trajectories)."""
  save_minutes: float = placement(30.0, at_least(0))
  """Age of the last checkpoint after which a rollout ends with a new one; 0 is
  off."""
  method: MethodConfig = MethodConfig()
  reward: RewardConfig = RewardConfig()
  curriculum: CurriculumConfig = CurriculumConfig()
  objective: ObjectiveConfig = ObjectiveConfig()
  optimizer: OptimizerConfig = OptimizerConfig()
  critic: CriticConfig = CriticConfig()
  episode: EpisodeConfig = EpisodeConfig()
  sampling: SamplingConfig = SamplingConfig()
  engine: EngineConfig = EngineConfig()
  servers: ServersConfig = ServersConfig()
  agents: AgentsConfig = AgentsConfig()
  retrieval: RetrievalConfig = RetrievalConfig()
  search: SearchConfig = SearchConfig()
  pipeline: PipelineConfig = PipelineConfig()
  batch: BatchConfig = BatchConfig()
  mesh: MeshConfig = MeshConfig()
  lora: LoraConfig = LoraConfig()
  sft: SftConfig = SftConfig()
  data: DataConfig = DataConfig()
  watch: WatchConfig = WatchConfig()
  checkpoint: CheckpointConfig = CheckpointConfig()
  evaluation: EvaluationConfig = EvaluationConfig()

  @property
  def servers_share(self) -> bool:
    """Whether servers sample on the GPUs that train."""
    return self.engine.has_servers and self.servers.colocated


def changed(config: ExperimentConfig, **values: Any) -> ExperimentConfig:
  """Returns a configuration with other values; a mapping changes a group's."""

  def with_values(group: Any, values: Mapping[str, Any]) -> Any:
    changes = dict(values)
    for name, value in values.items():
      if isinstance(value, Mapping):
        changes[name] = with_values(getattr(group, name), value)
    return dataclasses.replace(group, **changes)

  return with_values(config, values)
