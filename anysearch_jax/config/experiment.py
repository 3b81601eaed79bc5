"""The configuration of an experiment: one frozen dataclass per concern.

A file `configs/<name>.py` returns an `ExperimentConfig` from `get_config()`;
flags override single values (`--config.reward.gamma_mode=fixed`). Defaults are
the paper's (its table of hyperparameters).
"""

from __future__ import annotations

import dataclasses

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
)
from anysearch_jax.config.methods import MethodConfig
from anysearch_jax.config.rollout import (
  EngineConfig,
  EpisodeConfig,
  RetrievalConfig,
  SamplingConfig,
  SearchConfig,
  SglangConfig,
)


@dataclasses.dataclass(frozen=True)
class DataConfig:
  """Where questions and passages come from.

  source: `world`, generated, or `prepared`, a folder of launch.prepare_data.
  path: that folder.
  world: version of the generated world, `graded` or `fixed`, see
    docs/quickstart.md.
  world_seed: seed of the generated world.
  split: name of the split that is trained on.
  """

  source: str = "world"
  path: str = ""
  world: str = "graded"
  world_seed: int = 0
  split: str = "train"


@dataclasses.dataclass(frozen=True)
class WarmStartConfig:
  """Supervised demonstrations before reinforcement learning (world only).

  expert: who demonstrates, one of `world.experts.EXPERTS`, or `priced`, which
    uses two searches under budgets in cents.
  steps: optimizer steps.
  batch_tokens: tokens of a batch.
  demonstrations: number of generated demonstrations; training repeats them.
  layers, hidden, heads, kv_heads, mlp: sizes of the policy.
  """

  expert: str = "soft"
  steps: int = 2000
  learning_rate: float = 4e-3
  batch_tokens: int = 4096
  demonstrations: int = 24000
  decision_weight: float = 3.0
  layers: int = 3
  hidden: int = 96
  heads: int = 4
  kv_heads: int = 2
  mlp: int = 192


@dataclasses.dataclass(frozen=True)
class EvaluationConfig:
  """Which cells (dataset, budget and seed) are evaluated, and how.

  budgets: search budgets of the cells.
  pairs: budgets in other units, such as `searches=3,tokens=256`; each is a cell
    beside those of `budgets`, see docs/budgets.md.
  questions: number of questions of each dataset; 0: all.
  datasets: names of datasets; empty: all that the questions are from.
  seeds: seeds of sampling.
  scaffold: whether the environment states the budget before every turn.
  scorer: `paper` records exact match; `official` also records the scores of
    each dataset's published evaluation script.
  search_price: US dollars per thousand searches. With the other prices it is
    what budgets of dollars are charged by, in training too.
  input_price, output_price: US dollars per million tokens read or written.
  tool_prices: tools with prices of their own, in US dollars per thousand calls,
    such as `cheap=10`.
  """

  budgets: tuple[int, ...] = (0, 1, 2, 3, 4, 5, 6, 7, 8)
  pairs: tuple[str, ...] = ()
  questions: int = 1000
  datasets: tuple[str, ...] = ()
  seeds: tuple[int, ...] = (42,)
  scaffold: bool = False
  scorer: str = "paper"
  search_price: float = 0.0
  input_price: float = 0.0
  output_price: float = 0.0
  tool_prices: tuple[str, ...] = ()

  @property
  def prices(self) -> budgets_lib.Prices:
    """The prices as a value; raises ValueError for an invalid tool price."""
    return budgets_lib.Prices(
      self.search_price,
      self.input_price,
      self.output_price,
      budgets_lib.parse_tools(self.tool_prices),
    )


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
  """Which checkpoints are kept, and how the policy is exported at the end.

  keep_last: number of newest checkpoints to keep.
  keep_best: number of checkpoints with the largest `best_metric` (in the
    rollout that they end) to keep as well.
  best_metric: a name in metrics.jsonl that begins with `reward/`.
  export_dtype: `float32`, `bfloat16` or `float16`, for the files in `policy/`.
  """

  keep_last: int = 2
  keep_best: int = 0
  best_metric: str = "reward/em"
  export_dtype: str = "bfloat16"


@dataclasses.dataclass(frozen=True)
class WatchConfig:
  """What stops a run, and what it warns about.

  bad_steps: the run stops after this many consecutive optimizer steps whose
    loss or gradient is not finite; such steps are never applied.
  max_failed: the run stops if a larger share of a rollout's episodes failed
    because the engine or the retriever was unavailable.
  min_entropy (nats per token), max_kl: the run warns below or above these.
  max_stale: the run warns after this many rollouts without an outcome in some
    budget's window.
  max_gap, max_far, max_largest_gap: limits on the difference between the
    engine's log-probabilities and the trainer's: its mean (nats), the share of
    tokens beyond 1 nat, its largest value (nats). The run warns beyond these.
  gap_rollouts: the run stops after this many such rollouts in a row.
  max_fingerprint_gap: limit on the mean difference (nats per token) between the
    engine's scores of a fixed prompt and the trainer's. A larger one means that
    the engine has the wrong weights, and the run stops at once.
  quiet_seconds: the run or evaluation warns when no turn and no search has
    ended for this long, and lists what it waits for; 0 is off.
  """

  bad_steps: int = 3
  max_failed: float = 0.5
  min_entropy: float = 0.005
  max_kl: float = 1.0
  max_gap: float = 0.1
  max_far: float = 0.002
  max_largest_gap: float = 8.0
  gap_rollouts: int = 3
  max_fingerprint_gap: float = 0.1
  max_stale: int = 20
  quiet_seconds: float = 60.0


@dataclasses.dataclass(frozen=True)
class ExperimentConfig:
  """The configuration of a run, saved as `config.json` in its folder.

  name, seed: name and seed of the run.
  policy: a Hugging Face folder.
  compute_dtype: dtype of sampling and training, bfloat16 or float32; trained
    weights and optimizer moments are always float32.
  questions: questions of a rollout.
  group: trajectories of each question.
  save_every: rollouts between checkpoints (and recorded trajectories).
  save_minutes: age of the last checkpoint after which a rollout ends with a new
    one; 0 is off.
  method: the system that is trained, with its constants; those of AnySearch
    are in `reward`.
  """

  name: str = "anysearch"
  seed: int = 42
  policy: str = ""
  compute_dtype: str = "bfloat16"
  questions: int = 512
  group: int = 5
  save_every: int = 20
  save_minutes: float = 30.0
  method: MethodConfig = MethodConfig()
  reward: RewardConfig = RewardConfig()
  curriculum: CurriculumConfig = CurriculumConfig()
  objective: ObjectiveConfig = ObjectiveConfig()
  optimizer: OptimizerConfig = OptimizerConfig()
  critic: CriticConfig = CriticConfig()
  episode: EpisodeConfig = EpisodeConfig()
  sampling: SamplingConfig = SamplingConfig()
  engine: EngineConfig = EngineConfig()
  sglang: SglangConfig = SglangConfig()
  retrieval: RetrievalConfig = RetrievalConfig()
  search: SearchConfig = SearchConfig()
  pipeline: PipelineConfig = PipelineConfig()
  batch: BatchConfig = BatchConfig()
  mesh: MeshConfig = MeshConfig()
  lora: LoraConfig = LoraConfig()
  data: DataConfig = DataConfig()
  warm_start: WarmStartConfig = WarmStartConfig()
  watch: WatchConfig = WatchConfig()
  checkpoint: CheckpointConfig = CheckpointConfig()
  evaluation: EvaluationConfig = EvaluationConfig()

  @property
  def questions_per_rollout(self) -> int:
    """The number of questions that a rollout consumes."""
    return self.questions + self.pipeline.extra_groups
