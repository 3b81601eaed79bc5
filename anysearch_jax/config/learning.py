"""How a policy learns; `config` re-exports these classes."""

from __future__ import annotations

import dataclasses

from anysearch_jax.config.settings import (
  DECAY,
  POSITIVE,
  SHARE,
  at_least,
  identity,
  learning,
  one_of,
  or_empty,
  placement,
)


@dataclasses.dataclass(frozen=True)
class RewardConfig:
  """Composite reward (the paper's section "Reward Design")."""

  alpha: float = learning(0.5, at_least(0))
  """Weight of accuracy."""
  beta: float = learning(0.15, at_least(0))
  """Weight of format."""
  delta: float = learning(0.05, at_least(0))
  """Weight of length."""
  gamma_max: float = learning(0.3, at_least(0))
  """Weight of the tool reward in a group that is right throughout."""
  gamma_mode: str = learning("adaptive", one_of("adaptive", "fixed", "off"))
  """Weight of the tool reward: `adaptive` (gamma_max * group accuracy), `fixed`
  (gamma_fixed) or `off`."""
  gamma_fixed: float = learning(0.3, at_least(0))
  """Weight of the tool reward, if it is fixed."""
  use_abs: bool = learning(True)
  """Whether the tool reward has the absolute factor. A factor that is off is
  replaced by exact match, so that wrong answers still earn nothing."""
  use_rel: bool = learning(True)
  """Whether the tool reward has the relative factor."""
  abs_searches: float = learning(1.0, at_least(0))
  """Weight of searches in the absolute factor, the mean of the shares of each
  cap that are saved. A unit that a budget does not cap does not count."""
  abs_tokens: float = learning(0.0, at_least(0))
  """Weight of tokens in the absolute factor."""
  abs_dollars: float = learning(0.0, at_least(0))
  """Weight of dollars in the absolute factor."""
  abs_seconds: float = learning(0.0, at_least(0))
  """Weight of seconds in the absolute factor."""
  rel_cost: str = learning("searches", one_of("searches", "dollars"))
  """What the relative factor compares: `searches` or `dollars`, by the prices
  of config.evaluation."""
  charge: float = learning(0.0, at_least(0))
  """Subtracted for each search, whether the answer is right or wrong; the
  paper's reward has none (0)."""
  xi: float = learning(1e-6, POSITIVE)
  """Stability constant of the relative factor."""
  length_limit: int = learning(2048, at_least(0))
  """L_lim, in generated tokens."""
  length_tolerance: int = learning(1024, at_least(0))
  """L_tol, in generated tokens."""
  function: str = learning("")
  """Your own reward, as module:function or path/to/file.py:function, see
  docs/own.md; empty: the reward of `method.name`."""


@dataclasses.dataclass(frozen=True)
class CurriculumConfig:
  """Budget curriculum (section "Curriculum Learning"), in optimizer steps."""

  max_budget: int = identity(5, at_least(1))
  """The paper's B_max."""
  token_levels: tuple[int, ...] = identity((), or_empty(at_least(1)))
  """Caps on generated tokens, ascending. If there are any, a group's budget is
  a pair of searches and tokens, see docs/budgets.md."""
  phase1_steps: int = learning(100, at_least(0))
  """Length of Phase I, from 0 to total_steps."""
  total_steps: int = identity(500, at_least(1))
  """Length of the training."""
  steps_per_rollout: int = identity(5, at_least(1))
  """Optimizer steps on a rollout, those of all epochs."""
  epochs: int = identity(1, at_least(1))
  """Passes over a rollout's trajectories; a divisor of steps_per_rollout. In
  later passes the ratio to the policy that sampled is clipped, as in PPO."""
  window: int = identity(20, at_least(1))
  """Number of recent outcomes per budget that its accuracy is the mean of."""
  uniform_mix: float = learning(0.6, SHARE)
  """The paper's lambda."""
  epsilon: float = learning(1e-6, POSITIVE)
  """The paper's epsilon, added to each budget's lag in accuracy."""
  phase1_scaffold: bool = learning(True)
  """Whether the budget is stated before each turn of Phase I."""
  phase2_scaffold: bool = learning(False)
  """Whether the budget is stated before each turn of Phase II."""
  fixed_budget: int = learning(-1, at_least(-1))
  """If >= 0, every group gets this budget in both phases."""

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
  """GRPO objective (appendix "GRPO Optimization Objective")."""

  clip_low: float = learning(0.2, at_least(0))
  """The ratio is clipped from below at 1 - clip_low."""
  clip_high: float = learning(0.28, at_least(0))
  """The ratio is clipped from above at 1 + clip_high."""
  kl_coefficient: float = learning(0.001, at_least(0))
  """Weight of the KL penalty; 0 needs no reference policy."""
  kl_estimator: str = learning("k3", one_of("k1", "k2", "k3", "low_var_kl"))
  """`k1` (the paper's formula), `k2`, `k3` or `low_var_kl` (k3 up to 10, as the
  paper's run)."""
  normalize: str = learning("group", one_of("group", "batch", "none"))
  """What a reward minus its group's mean is divided by: `group` (the standard
  deviation of the group's rewards, the paper's), `batch` (that of these
  differences over the rollout) or `none`. It sets the price of a search, see
  docs/objective.md."""
  advantage_epsilon: float = learning(1e-6, POSITIVE)
  """Added to that standard deviation."""
  deviation: str = learning("population", one_of("population", "sample"))
  """Whether that deviation divides the squares of n rewards by n (`population`)
  or by n - 1 (`sample`, as in released code; advantages in a group of five are
  then .894 times as large)."""
  reduction: str = learning(
    "sequence-mean", one_of("sequence-mean", "token-mean")
  )
  """`sequence-mean` (the paper's: the mean over trajectories of each one's
  token mean) or `token-mean` (over all model tokens of the step)."""
  old_logp: str = learning("engine", one_of("engine", "trainer"))
  """Source of the old log-probabilities in the importance ratio. `engine`:
  those recorded when the tokens were sampled. `trainer`: computed by the
  trainer before the rollout's first step."""
  importance_cap: float = learning(0.0, at_least(0))
  """With `trainer`, a token's policy loss is multiplied by min(pi_trainer /
  pi_engine, importance_cap). With `engine`, the ratio of a token of negative
  advantage counts as importance_cap beyond it. 0 is off."""
  advantage: str = identity("group", one_of("group", "gae"))
  """`group` (GRPO: rewards standardised in their group) or `gae` (PPO:
  estimated by a critic, see `CriticConfig`)."""
  baseline: str = learning("group", one_of("group", "turn"))
  """What a trajectory's reward is compared with, if `advantage` is `group`: its
  whole `group` (GRPO), or, at each `turn`, those of the group that had been
  shown the same passages."""
  turn_weight: float = learning(1.0, at_least(0))
  """Weight of the advantages of single searches, which are added to those of
  trajectories if the method rewards searches and `advantage` is `group`."""
  entropy_coefficient: float = learning(0.0, at_least(0))
  """This times the policy's entropy (nats, the mean over tokens by `reduction`)
  is subtracted from the loss; 0 is off."""
  router_balance: float = learning(0.0, at_least(0))
  """This times the experts' imbalance (1 where all are used alike) is added to
  the loss; 0 is off. For policies with experts."""
  router: str = learning("own", one_of("own", "compare", "replay"))
  """Source of each token's experts in training: `own`, the trained policy's
  router, or `replay`, the choices that the sampler recorded
  (https://arxiv.org/abs/2510.11370). `compare` uses the router and measures how
  many of the recorded choices differ."""

  @property
  def has_critic(self) -> bool:
    return self.advantage == "gae"


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
  """AdamW."""

  learning_rate: float = learning(1e-6, at_least(0))
  """The policy's learning rate."""
  b1: float = learning(0.9, DECAY)
  """Decay of the mean of gradients."""
  b2: float = learning(0.98, DECAY)
  """Decay of the mean of squared gradients."""
  eps: float = learning(1e-8, POSITIVE)
  """Added to the root of the mean of squared gradients."""
  weight_decay: float = learning(0.01, at_least(0))
  """Share of a weight that a step at a learning rate of 1 would subtract."""
  decayed: str = learning("matrices", one_of("matrices", "all"))
  """Which weights decay: `matrices`, or `all`, norms and biases too (verl)."""
  max_grad_norm: float = learning(1.0, at_least(0), switch=True)
  """The gradient is clipped to this norm; 0 is off."""
  warmup_steps: int = learning(0, at_least(0), switch=True)
  """Steps over which the learning rate rises linearly; 0: constant."""
  decay: float = learning(0.0, SHARE, switch=True)
  """Share of the training's steps, at its end, in which the learning rate falls
  linearly towards 0."""


@dataclasses.dataclass(frozen=True)
class CriticConfig:
  """The critic of `objective.advantage` `gae`, a network like the policy."""

  gamma: float = learning(1.0, SHARE)
  """Discount of the advantage estimate."""
  lam: float = learning(1.0, SHARE)
  """Lambda of the advantage estimate."""
  learning_rate: float = learning(1e-5, at_least(0))
  """The critic's learning rate. Its optimizer shares all other values with the
  policy's; its gradient norm is clipped separately."""
  warmup_steps: int = learning(0, at_least(0), switch=True)
  """Steps over which the critic's learning rate rises linearly."""
  alone_steps: int = learning(0, at_least(0))
  """Optimizer steps at the start in which only the critic learns."""
  value_clip: float = learning(0.5, at_least(0))
  """In the loss, a value is clipped to within this distance of its value before
  the rollout's first step; 0 is off."""
  whiten: bool = learning(True)
  """Whether advantages are normalised to mean 0 and variance 1 over a rollout's
  model tokens."""
  reward_kl: float = learning(0.0, at_least(0))
  """This times (log pi_behaviour - log pi_reference) is subtracted from each
  model token's reward; the loss has its own `objective.kl_coefficient`."""


@dataclasses.dataclass(frozen=True)
class PipelineConfig:
  """How sampling and training overlap."""

  async_level: int = placement(0, at_least(0))
  """Number of rollouts by which sampling is ahead of training; 0: each rollout
  is sampled with the newest weights; 1 is the paper's."""
  extra_groups: int = identity(0, at_least(0))
  """Groups sampled beyond `questions`. The groups that finish last are
  abandoned, so results depend on timing; 0: off."""
  partial: bool = identity(False)
  """Whether running episodes continue with new weights as soon as these are
  published. A rollout then has tokens of several versions, none older than
  `async_level` allows, and results depend on timing. Needs servers: engine.kind
  `sglang` or `vllm`."""
  offload: str = placement("none", one_of("none", "moments", "state"))
  """Part of the training state that is in host memory while the same devices
  sample, in process or by `servers.colocated`: `none`, `moments` (the
  optimizer's) or `state` (also the float32 masters). It costs two copies a
  rollout and needs async_level 0.
  anysearch plan says where sampling does not fit without it."""


@dataclasses.dataclass(frozen=True)
class SftConfig:
  """Supervised training on demonstrations, before reinforcement learning.

  The learning rate rises linearly over the first tenth of the steps and then
  falls linearly to 0; `optimizer` has the other rates.
  """

  steps: int = learning(200, at_least(1))
  """Optimizer steps."""
  demonstrations: int = identity(32, at_least(1))
  """Demonstrations of a step."""
  learning_rate: float = learning(1e-5, at_least(0))
  """The peak learning rate; adapters take about ten times as much."""
  play_every: int = placement(50, at_least(0))
  """Steps between two plays of held-out questions, which measure format,
  accuracy and searches at the budgets of the evaluation; 0: none."""
  play_questions: int = placement(24, at_least(1))
  """Held-out questions that such a play asks at each budget."""


@dataclasses.dataclass(frozen=True)
class BatchConfig:
  """Packed training batches."""

  row_lengths: tuple[int, ...] = placement((128, 256, 576), at_least(1))
  """Tokens of a packed row, ascending. A trajectory is placed in the shortest
  row that holds it, or in free space of a longer one."""
  micro_batch_tokens: int = placement(2304, at_least(1))
  """Tokens of a micro-batch over all devices; all of its rows have one length.
  """
  max_micro_batches: int = placement(24, at_least(1))
  """Limit for each row length in an optimizer step. Only micro-batches that
  contain tokens cost time."""
  max_segments: int = placement(64, at_least(1))
  """Limit on the trajectories in one row."""
  remat: str = placement("none", one_of("none", "dots", "attention", "full"))
  """What the backward pass recomputes in each layer: `none`, all but the
  outputs of its matrix products and of attention (`dots`), all but attention's
  output (`attention`), or everything (`full`)."""
  attention: str = placement("auto", one_of("auto", "xla", "cudnn", "splash"))
  """`xla`, `cudnn` (NVIDIA), `splash` (TPU) or `auto`, the best of them that
  the device and the shapes allow."""
  attention_chunk: int = placement(512, at_least(1))
  """Positions per chunk of attention scores."""
  logprob_chunk: int = placement(512, at_least(1))
  """Positions per chunk of logits."""

  def rows(self, length: int, multiple: int = 1) -> int:
    """Returns the number of rows of `length` tokens in a micro-batch.

    It is a multiple of `multiple`, and at least that.
    """
    rows = self.micro_batch_tokens // length
    return max(multiple, rows // multiple * multiple)


@dataclasses.dataclass(frozen=True)
class MeshConfig:
  """Which devices train and sample, and how the policy is sharded over them."""

  data: int = placement(1, at_least(1))
  """Size of the training mesh's `data` axis, over all processes."""
  fsdp: int = placement(1, at_least(1))
  """Size of its `fsdp` axis."""
  expert: int = placement(1, at_least(1))
  """Size of its `expert` axis: each device has a part of the experts, and rows
  and weights are sharded over it as over `fsdp`."""
  context: int = placement(1, at_least(1))
  """Size of its `context` axis, over which the positions of rows are sharded
  (for rows too long for one device's memory)."""
  tensor: int = placement(1, at_least(1))
  """Size of its `tensor` axis."""
  sequence_parallel: bool = placement(False)
  """Whether positions between blocks are sharded over `tensor`."""
  trainer: tuple[int, ...] = placement((), or_empty(at_least(0)))
  """Indices of the devices of each process that train; empty: the first ones.
  """
  rollout: tuple[int, ...] = placement((), or_empty(at_least(0)))
  """Indices of the devices of each process that sample; empty: those that
  train."""
  rollout_tensor: int = placement(0, at_least(0))
  """Number of the sampling devices that share a copy of the policy, which must
  divide their number and the kv heads; each copy samples other rows. 0: see
  `sharding.rollout_mesh`."""

  @property
  def size(self) -> int:
    """Number of devices of the training mesh."""
    return self.data * self.fsdp * self.expert * self.context * self.tensor

  @property
  def rows(self) -> int:
    """Number of parts that the rows of a batch are cut into."""
    return self.data * self.fsdp * self.expert

  def __str__(self) -> str:
    """Returns the axes of the training mesh."""
    # Few meshes have these axes.
    rare = (("expert", self.expert), ("context", self.context))
    more = "".join(f"{axis} {size} x " for axis, size in rare if size > 1)
    return f"data {self.data} x fsdp {self.fsdp} x {more}tensor {self.tensor}"


@dataclasses.dataclass(frozen=True)
class LoraConfig:
  """Low-rank adapters, trained instead of the policy's own weights."""

  rank: int = identity(0, at_least(0))
  """Inner dimension of the adapters; 0 is off."""
  alpha: float = identity(32.0, POSITIVE)
  """The adapters' output is multiplied by alpha / rank."""
  targets: tuple[str, ...] = identity(
    ("q", "k", "v", "o", "gate", "up", "down")
  )
  """Which of `q k v o gate up down` have an adapter."""
  base_dtype: str = learning("float32", one_of("float32", "bfloat16"))
  """Dtype of the frozen weights, float32 or bfloat16; bfloat16 loses nothing if
  their files are bfloat16."""
