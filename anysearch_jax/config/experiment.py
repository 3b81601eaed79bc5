"""The whole configuration: one frozen dataclass per concern.

A file `configs/<name>.py` returns an `ExperimentConfig` from `get_config()`;
flags override single values (`--config.reward.gamma_mode=fixed`). Defaults are
the paper's (its table of hyperparameters).
"""

from __future__ import annotations

import dataclasses

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
class RewardConfig:
  """Composite reward (the paper's section "Reward Design").

  gamma_mode: `adaptive` (gamma_max * group accuracy), `fixed` (gamma_fixed) or
    `off`. A switched-off use_abs / use_rel is replaced by EM, so that the tool
    reward stays gated by correctness.
  length_limit, length_tolerance: the paper's L_lim and L_tol, in generated
    tokens.
  """

  alpha: float = 0.5
  beta: float = 0.15
  delta: float = 0.05
  gamma_max: float = 0.3
  gamma_mode: str = "adaptive"
  gamma_fixed: float = 0.3
  use_abs: bool = True
  use_rel: bool = True
  xi: float = 1e-6
  length_limit: int = 2048
  length_tolerance: int = 1024


@dataclasses.dataclass(frozen=True)
class CurriculumConfig:
  """Budget curriculum (section "Curriculum Learning"), in optimizer steps.

  phase1_steps: 0 is Phase II only; equal to total_steps is Phase I only.
  fixed_budget: >= 0 gives every group that budget, whatever the phase.
  uniform_mix: the paper's lambda, in [0, 1].
  """

  max_budget: int = 5
  phase1_steps: int = 100
  total_steps: int = 500
  steps_per_rollout: int = 5
  window: int = 20
  uniform_mix: float = 0.6
  epsilon: float = 1e-6
  phase1_scaffold: bool = True
  phase2_scaffold: bool = False
  fixed_budget: int = -1


@dataclasses.dataclass(frozen=True)
class ObjectiveConfig:
  """GRPO objective (appendix "GRPO Optimization Objective").

  kl_estimator: `k1`, `k2` or `k3`; kl_coefficient 0 needs no reference.
  normalize_std: divide the advantage by the group's population std.
  reduction: `sequence-mean` (the paper's: the mean over trajectories of each
    one's token mean) or `token-mean` (over all model tokens of the step).
  old_logp: what the importance ratio is taken to. `engine`: the log-probs that
    sampled. `trainer`: the trainer's own before the rollout's first step.
  importance_cap: with `trainer`, a token's policy loss is weighted by
    min(pi_trainer / pi_engine, importance_cap); 0 is off.
  advantage: `group` (GRPO's: rewards standardised in their group) or `gae`
    (PPO's: estimated by a critic, see `CriticConfig`).
  """

  clip_low: float = 0.2
  clip_high: float = 0.28
  kl_coefficient: float = 0.001
  kl_estimator: str = "k3"
  advantage_epsilon: float = 1e-6
  normalize_std: bool = True
  reduction: str = "sequence-mean"
  old_logp: str = "engine"
  importance_cap: float = 0.0
  advantage: str = "group"

  @property
  def has_critic(self) -> bool:
    return self.advantage == "gae"


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
  """AdamW; weight decay on matrices only; max_grad_norm 0 is off.

  warmup_steps: over which the learning rate rises linearly; 0: constant.
  """

  learning_rate: float = 1e-6
  b1: float = 0.9
  b2: float = 0.98
  eps: float = 1e-8
  weight_decay: float = 0.01
  max_grad_norm: float = 1.0
  warmup_steps: int = 0


@dataclasses.dataclass(frozen=True)
class CriticConfig:
  """The critic of `objective.advantage` `gae`, a network like the policy.

  gamma, lam: discount, and lambda of the estimate, in [0, 1].
  learning_rate, warmup_steps: its own; all else is the policy's optimizer's,
    and the norm of its gradient is clipped by itself.
  alone_steps: optimizer steps at the start in which only the critic learns.
  value_clip: how far a value may move from that before the rollout's first
    step; 0 is off.
  whiten: advantages to mean 0 and variance 1 over a rollout's model tokens.
  reward_kl: each model token's reward is less by this times log pi_behaviour -
    log pi_reference; `objective.kl_coefficient` is the KL term of the loss.
  """

  gamma: float = 1.0
  lam: float = 1.0
  learning_rate: float = 1e-5
  warmup_steps: int = 0
  alone_steps: int = 0
  value_clip: float = 0.5
  whiten: bool = True
  reward_kl: float = 0.0


@dataclasses.dataclass(frozen=True)
class PipelineConfig:
  """How generating and training share the time.

  async_level: rollouts that sampling may be ahead of training, so the most
    policy versions between a token and the step that learns from it; 0 is
    strictly on-policy, 1 is the paper's.
  extra_groups: groups sampled beyond `questions`; the first that are whole
    count, the stragglers are given up (0: none, and no text depends on time).
  """

  async_level: int = 0
  extra_groups: int = 0


@dataclasses.dataclass(frozen=True)
class BatchConfig:
  """Packed training batches.

  A trajectory goes to the shortest row length (ascending) that holds it, or to
  room left in a longer row; each length has its own micro-batches of
  `micro_batch_tokens` tokens over all devices, at most `max_micro_batches` of
  them in an optimizer step. Only those that hold tokens cost time.
  max_segments: trajectories that one row holds at most.
  remat: what the backward pass computes again in each layer: `none`, all but
    the outputs of its matrix products (`dots`), all but attention's
    (`attention`), or all (`full`).
  attention: `xla`, `cudnn` (NVIDIA), `splash` (TPU) or `auto`, the best of them
    that the device and the shapes allow.
  attention_chunk, logprob_chunk: positions whose scores or logits are held at
    a time.
  """

  row_lengths: tuple[int, ...] = (128, 256, 576)
  micro_batch_tokens: int = 2304
  max_micro_batches: int = 24
  max_segments: int = 64
  remat: str = "none"
  attention: str = "auto"
  attention_chunk: int = 512
  logprob_chunk: int = 512


@dataclasses.dataclass(frozen=True)
class MeshConfig:
  """Which devices train and sample, and how the policy is cut over them.

  data, fsdp, tensor: sizes of the training mesh's axes, over all processes.
  sequence_parallel: between blocks, positions are cut over `tensor`.
  trainer, rollout: indices into each process's devices. Empty: training takes
    the first ones, and sampling those of training. An engine cuts the policy
    over all of its devices.
  """

  data: int = 1
  fsdp: int = 1
  tensor: int = 1
  sequence_parallel: bool = False
  trainer: tuple[int, ...] = ()
  rollout: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class LoraConfig:
  """Low-rank adapters instead of training every weight; rank 0 is off.

  alpha: the adapters' output counts alpha / rank. targets: which of `q k v o
  gate up down` have one. base_dtype: float32 or bfloat16, of the frozen weights
  beside them; bfloat16 loses nothing where their files hold that.
  """

  rank: int = 0
  alpha: float = 32.0
  targets: tuple[str, ...] = ("q", "k", "v", "o", "gate", "up", "down")
  base_dtype: str = "float32"


@dataclasses.dataclass(frozen=True)
class DataConfig:
  """Where questions and passages come from.

  source: `world`, the generated one, or `prepared`, a folder of
    launch.prepare_data. path: that folder. split: what is trained on.
  """

  source: str = "world"
  path: str = ""
  world_seed: int = 0
  split: str = "train"


@dataclasses.dataclass(frozen=True)
class WarmStartConfig:
  """Supervised demonstrations before reinforcement learning (world only).

  demonstrations: how many are made; training goes round them. hidden, layers,
  heads, kv_heads, mlp: sizes of the policy that is made.
  """

  steps: int = 2000
  learning_rate: float = 4e-3
  batch_tokens: int = 4096
  demonstrations: int = 40000
  decision_weight: float = 3.0
  layers: int = 3
  hidden: int = 96
  heads: int = 4
  kv_heads: int = 2
  mlp: int = 192


@dataclasses.dataclass(frozen=True)
class EvaluationConfig:
  """Which cells are measured, and on how many questions each.

  questions: of each dataset; 0: all of them. datasets: by name; empty: all that
    the questions are of. search_price: US dollars a thousand searches;
    input_price, output_price: a million tokens that the policy reads, writes.
  scorer: `paper` records exact match; `official` records besides what the
    published script of each data set gives.
  """

  budgets: tuple[int, ...] = (0, 1, 2, 3, 4, 5, 6, 7, 8)
  questions: int = 1000
  datasets: tuple[str, ...] = ()
  seeds: tuple[int, ...] = (42,)
  scaffold: bool = False
  scorer: str = "paper"
  search_price: float = 0.0
  input_price: float = 0.0
  output_price: float = 0.0


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
  """Which checkpoints stay, and what is exported at the end.

  keep_last: the newest ones. keep_best: besides, those with the largest
    `best_metric` in the rollout that they end.
  best_metric: a name in metrics.jsonl that begins with `reward/`.
  export_dtype: of the weights in `policy/`: `float32`, `bfloat16`, `float16`.
  """

  keep_last: int = 2
  keep_best: int = 0
  best_metric: str = "reward/em"
  export_dtype: str = "bfloat16"


@dataclasses.dataclass(frozen=True)
class WatchConfig:
  """What stops a run, and what it warns of.

  bad_steps: optimizer steps in a row whose loss or gradient is not finite; none
    of them is applied. max_failed: share of a rollout's episodes that may fail
    for want of the engine or the retriever. Beyond either the run stops.
  min_entropy (nats a token), max_kl, max_stale (rollouts since a budget's
    window had an outcome): beyond these it warns.
  max_gap, max_far, max_largest_gap: of the differences between the engine's
    log-probabilities and the trainer's, the mean (nats), the share of tokens
    beyond 1 nat, and the largest (nats). Beyond any of them it warns, and after
    gap_rollouts rollouts in a row it stops.
  max_fingerprint_gap: mean nats a token by which the engine's scores of a fixed
    prompt may differ from the trainer's; beyond it the engine has other weights
    than it was given, and the run stops at once.
  quiet_seconds: so long no turn and no search of a rollout or an evaluation
    ends, and it warns with what is waited for; 0 is off.
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
  """Everything a run needs; saved whole as `config.json` in its folder.

  method: the system that is trained, with its constants; `reward` are those of
    AnySearch.
  policy: a Hugging Face folder. compute_dtype: bfloat16 or float32, of sampling
  and training; trained weights and moments are float32. questions x group
  trajectories a rollout.
  save_every: rollouts between checkpoints (and recorded trajectories).
  save_minutes: at the end of a rollout, a checkpoint too where the last one is
    this old; 0 is off.
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
