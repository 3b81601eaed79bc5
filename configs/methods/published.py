"""The recipes of the compared systems as their authors published them.

docs/fidelity.md names the line of the original for each number. What a recipe
does not set is that of the backbone's configuration.
"""

from __future__ import annotations

import dataclasses

from anysearch_jax import config as config_lib

# verl's, on which all of these systems are built.
_KL = 0.001
_CRITIC_CLIP = 0.5


@dataclasses.dataclass(frozen=True)
class Length:
  """Sizes of a training.

  rollouts: how often the policy samples.
  questions: questions of a rollout.
  group: trajectories of a question.
  updates: optimizer steps on a rollout.
  searches: searches that a trajectory may make.
  """

  rollouts: int
  questions: int
  group: int
  updates: int
  searches: int

  @property
  def steps(self) -> int:
    return self.rollouts * self.updates


def grpo(
  config: config_lib.ExperimentConfig,
  length: Length,
  *,
  rate: float,
  warmup: float,
) -> config_lib.ExperimentConfig:
  """Returns verl's GRPO: a KL term in the loss, and no critic.

  Args:
    config: of the system on a backbone.
    length: sizes of the training.
    rate: the learning rate.
    warmup: share of the steps over which the rate rises.
  """
  return _verl(
    config,
    length,
    config_lib.ObjectiveConfig(advantage="group", kl_coefficient=_KL),
    rate=rate,
    warmup=warmup,
  )


def ppo(
  config: config_lib.ExperimentConfig,
  length: Length,
  *,
  rate: float,
  warmup: float,
  critic_rate: float,
  critic_warmup: float,
) -> config_lib.ExperimentConfig:
  """Returns verl's PPO: a critic, and the KL penalty in the tokens' rewards.

  Args:
    config: of the system on a backbone.
    length: sizes of the training.
    rate, warmup: learning rate, and share of the steps over which it rises.
    critic_rate, critic_warmup: the same of the critic.
  """
  made = _verl(
    config,
    length,
    config_lib.ObjectiveConfig(advantage="gae", kl_coefficient=0.0),
    rate=rate,
    warmup=warmup,
  )
  return dataclasses.replace(
    made,
    critic=config_lib.CriticConfig(
      learning_rate=critic_rate,
      warmup_steps=int(critic_warmup * length.steps),
      value_clip=_CRITIC_CLIP,
      reward_kl=_KL,
    ),
  )


def _verl(
  config: config_lib.ExperimentConfig,
  length: Length,
  objective: config_lib.ObjectiveConfig,
  *,
  rate: float,
  warmup: float,
) -> config_lib.ExperimentConfig:
  return dataclasses.replace(
    config,
    questions=length.questions,
    group=length.group,
    curriculum=config_lib.CurriculumConfig(
      phase1_steps=0,
      fixed_budget=length.searches,
      total_steps=length.steps,
      steps_per_rollout=length.updates,
    ),
    objective=dataclasses.replace(
      objective,
      clip_low=0.2,
      clip_high=0.2,
      reduction="token-mean",
      entropy_coefficient=0.001,
      # Sampling waits for training, so the weights that sampled are the ones
      # that the trainer recomputes with.
      old_logp="trainer",
    ),
    optimizer=config_lib.OptimizerConfig(
      learning_rate=rate,
      b2=0.999,
      warmup_steps=int(warmup * length.steps),
    ),
    pipeline=config_lib.PipelineConfig(async_level=0),
  )
