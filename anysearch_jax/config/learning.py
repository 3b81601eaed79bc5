"""How a policy learns; `config` re-exports these classes."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class RewardConfig:
  """Composite reward (the paper's section "Reward Design").

  alpha, beta, delta: weights of accuracy, format and length.
  gamma_mode: weight of the tool reward: `adaptive` (gamma_max * group
    accuracy), `fixed` (gamma_fixed) or `off`.
  use_abs, use_rel: which factors the tool reward has. A factor that is off is
    replaced by exact match, so that wrong answers still earn nothing.
  abs_searches, abs_tokens, abs_dollars, abs_seconds: weights of the units in
    the absolute factor, the mean of the shares of each cap that are saved. A
    unit that a budget does not cap does not count.
  rel_cost: what the relative factor compares: `searches` or `dollars`, by the
    prices of config.evaluation.
  charge: subtracted for each search, whether the answer is right or wrong; the
    paper's reward has none (0).
  xi: stability constant of the relative factor.
  length_limit, length_tolerance: L_lim and L_tol, in generated tokens.
  function: your own reward, as module:function or path/to/file.py:function, see
    docs/your_reward.md; empty: the reward of `method.name`.
  """

  alpha: float = 0.5
  beta: float = 0.15
  delta: float = 0.05
  gamma_max: float = 0.3
  gamma_mode: str = "adaptive"
  gamma_fixed: float = 0.3
  use_abs: bool = True
  use_rel: bool = True
  abs_searches: float = 1.0
  abs_tokens: float = 0.0
  abs_dollars: float = 0.0
  abs_seconds: float = 0.0
  rel_cost: str = "searches"
  charge: float = 0.0
  xi: float = 1e-6
  length_limit: int = 2048
  length_tolerance: int = 1024
  function: str = ""


@dataclasses.dataclass(frozen=True)
class CurriculumConfig:
  """Budget curriculum (section "Curriculum Learning"), in optimizer steps.

  max_budget: the paper's B_max.
  token_levels: caps on generated tokens, ascending. If there are any, a group's
    budget is a pair of searches and tokens, see docs/budgets.md.
  cent_levels: caps in US cents, ascending, one for each of max_budget levels.
    If there are any, a group's budget is one of them alone, without a cap on
    searches; level b is the b-th.
  phase1_steps: length of Phase I, from 0 to total_steps.
  steps_per_rollout: optimizer steps on a rollout, those of all epochs.
  epochs: passes over a rollout's trajectories; a divisor of steps_per_rollout.
    In later passes the ratio to the policy that sampled is clipped, as in PPO.
  window: number of recent outcomes per budget that its accuracy is the mean of.
  uniform_mix: the paper's lambda, in [0, 1].
  epsilon: the paper's epsilon, added to each budget's lag in accuracy.
  phase1_scaffold, phase2_scaffold: whether the budget is stated before a turn.
  fixed_budget: if >= 0, every group gets this budget in both phases.
  """

  max_budget: int = 5
  token_levels: tuple[int, ...] = ()
  cent_levels: tuple[int, ...] = ()
  phase1_steps: int = 100
  total_steps: int = 500
  steps_per_rollout: int = 5
  epochs: int = 1
  window: int = 20
  uniform_mix: float = 0.6
  epsilon: float = 1e-6
  phase1_scaffold: bool = True
  phase2_scaffold: bool = False
  fixed_budget: int = -1

  @property
  def levels(self) -> int:
    """The number of budgets that Phase II draws from."""
    return self.max_budget * max(1, len(self.token_levels))

  @property
  def rollouts(self) -> int:
    """The number of rollouts of the whole training."""
    return self.total_steps // self.steps_per_rollout

  @property
  def batches_per_rollout(self) -> int:
    """The number of parts that a rollout's trajectories are divided into."""
    return self.steps_per_rollout // self.epochs


@dataclasses.dataclass(frozen=True)
class ObjectiveConfig:
  """GRPO objective (appendix "GRPO Optimization Objective").

  clip_low, clip_high: the ratio is clipped to [1 - clip_low, 1 + clip_high].
  kl_coefficient: weight of the KL penalty; 0 needs no reference policy.
  kl_estimator: `k1`, `k2` or `k3`.
  normalize: what a reward minus its group's mean is divided by: `group` (the
    standard deviation of the group's rewards, the paper's), `batch` (that of
    these differences over the rollout) or `none`. It sets the price of a
    search, see docs/objective.md.
  advantage_epsilon: added to that (population) standard deviation.
  reduction: `sequence-mean` (the paper's: the mean over trajectories of each
    one's token mean) or `token-mean` (over all model tokens of the step).
  old_logp: source of the old log-probabilities in the importance ratio.
    `engine`: those recorded when the tokens were sampled. `trainer`: computed
    by the trainer before the rollout's first step.
  importance_cap: with `trainer`, a token's policy loss is multiplied by
    min(pi_trainer / pi_engine, importance_cap); 0 is off.
  advantage: `group` (GRPO: rewards standardised in their group) or `gae`
    (PPO: estimated by a critic, see `CriticConfig`).
  baseline: what a trajectory's reward is compared with, if `advantage` is
    `group`: its whole `group` (GRPO), or, at each `turn`, those of the group
    that had been shown the same passages (training/turn_baselines).
  turn_weight: weight of the advantages of single searches, which are added to
    those of trajectories if the method rewards searches and `advantage` is
    `group`; >= 0.
  entropy_coefficient: this times the policy's entropy (nats, the mean over
    tokens by `reduction`) is subtracted from the loss; 0 is off.
  """

  clip_low: float = 0.2
  clip_high: float = 0.28
  kl_coefficient: float = 0.001
  kl_estimator: str = "k3"
  normalize: str = "group"
  advantage_epsilon: float = 1e-6
  reduction: str = "sequence-mean"
  old_logp: str = "engine"
  importance_cap: float = 0.0
  advantage: str = "group"
  baseline: str = "group"
  turn_weight: float = 1.0
  entropy_coefficient: float = 0.0

  @property
  def has_critic(self) -> bool:
    return self.advantage == "gae"


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
  """AdamW.

  weight_decay: applied to matrices only.
  max_grad_norm: the gradient is clipped to this norm; 0 is off.
  warmup_steps: steps over which the learning rate rises linearly; 0: constant.
  decay: share of the training's steps, at its end, in which the learning rate
    falls linearly towards 0; in [0, 1].
  """

  learning_rate: float = 1e-6
  b1: float = 0.9
  b2: float = 0.98
  eps: float = 1e-8
  weight_decay: float = 0.01
  max_grad_norm: float = 1.0
  warmup_steps: int = 0
  decay: float = 0.0


@dataclasses.dataclass(frozen=True)
class CriticConfig:
  """The critic of `objective.advantage` `gae`, a network like the policy.

  gamma, lam: discount and lambda of the advantage estimate, in [0, 1].
  learning_rate, warmup_steps: those of the critic. Its optimizer shares all
    other values with the policy's; its gradient norm is clipped separately.
  alone_steps: optimizer steps at the start in which only the critic learns.
  value_clip: in the loss, a value is clipped to within this distance of its
    value before the rollout's first step; 0 is off.
  whiten: whether advantages are normalised to mean 0 and variance 1 over a
    rollout's model tokens.
  reward_kl: this times (log pi_behaviour - log pi_reference) is subtracted from
    each model token's reward; the loss has its own `objective.kl_coefficient`.
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
  """How sampling and training overlap.

  async_level: number of rollouts by which sampling is ahead of training; 0:
    each rollout is sampled with the newest weights; 1 is the paper's.
  extra_groups: groups sampled beyond `questions`. The groups that finish last
    are abandoned, so results depend on timing; 0: off.
  offload: what of the training state is in host memory while the in-process
    engine samples: `none`, `moments` (the optimizer's) or `state` (also the
    float32 masters). It costs a copy each way a rollout and needs async_level
    0. launch.plan says where sampling does not fit without it.
  """

  async_level: int = 0
  extra_groups: int = 0
  offload: str = "none"


@dataclasses.dataclass(frozen=True)
class BatchConfig:
  """Packed training batches.

  row_lengths: tokens of a packed row, ascending. A trajectory is placed in the
    shortest row that holds it, or in free space of a longer one.
  micro_batch_tokens: tokens of a micro-batch over all devices; all of its rows
    have one length.
  max_micro_batches: limit for each row length in an optimizer step. Only
    micro-batches that contain tokens cost time.
  max_segments: limit on the trajectories in one row.
  remat: what the backward pass recomputes in each layer: `none`, all but the
    outputs of its matrix products and of attention (`dots`), all but
    attention's output (`attention`), or everything (`full`).
  attention: `xla`, `cudnn` (NVIDIA), `splash` (TPU) or `auto`, the best of them
    that the device and the shapes allow.
  attention_chunk, logprob_chunk: positions per chunk of scores or logits.
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
  """Which devices train and sample, and how the policy is sharded over them.

  data, fsdp, tensor: sizes of the training mesh's axes, over all processes.
  sequence_parallel: whether positions between blocks are sharded over `tensor`.
  trainer, rollout: indices into each process's devices. Empty: training uses
    the first devices, and sampling uses those of training.
  rollout_tensor: number of the sampling devices that share a copy of the
    policy, which must divide their number and the kv heads; each copy samples
    other rows. 0: see `sharding.rollout_mesh`.
  """

  data: int = 1
  fsdp: int = 1
  tensor: int = 1
  sequence_parallel: bool = False
  trainer: tuple[int, ...] = ()
  rollout: tuple[int, ...] = ()
  rollout_tensor: int = 0


@dataclasses.dataclass(frozen=True)
class LoraConfig:
  """Low-rank adapters, trained instead of the policy's own weights.

  rank: inner dimension of the adapters; 0 is off.
  alpha: the adapters' output is multiplied by alpha / rank.
  targets: which of `q k v o gate up down` have an adapter.
  base_dtype: dtype of the frozen weights, float32 or bfloat16; bfloat16 loses
    nothing if their files are bfloat16.
  """

  rank: int = 0
  alpha: float = 32.0
  targets: tuple[str, ...] = ("q", "k", "v", "o", "gate", "up", "down")
  base_dtype: str = "float32"
