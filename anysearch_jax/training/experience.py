"""From the groups of a rollout to rewards, advantages and train batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np

from anysearch_jax import config as config_lib
from anysearch_jax import objective, rewards, scoring, types
from anysearch_jax.training import batching


class Experience(NamedTuple):
  """A rollout, scored; arrays are `[Q, G]`, a dropped group's row is invalid.

  groups: None where a group was dropped.
  budgets: int32 `[Q]`.
  reduction: what a token weighs in a step, see `objective.token_weights`.
  """

  groups: list[types.Group | None]
  budgets: np.ndarray
  valid: np.ndarray
  em: np.ndarray
  format: np.ndarray
  rewards: rewards.Rewards
  advantages: np.ndarray
  reduction: str


def score(
  groups: Sequence[types.Group | None],
  budgets: np.ndarray,
  *,
  group: int,
  reward: config_lib.RewardConfig,
  objective_config: config_lib.ObjectiveConfig,
) -> Experience:
  """Verdicts, composite reward and advantages of a whole rollout.

  Args:
    groups: one a question; None where it was dropped.
    budgets: int `[Q]`, as assigned.
    group: trajectories a group.
    reward: weights and switches of the composite reward.
    objective_config: how advantages are normalised and tokens averaged.
  """
  shape = (len(groups), group)
  valid = np.zeros(shape, bool)
  em, format_, generated, searches = (np.zeros(shape, np.int32) for _ in "efgs")
  for q, sampled in enumerate(groups):
    for g, trajectory in enumerate(sampled.trajectories if sampled else ()):
      if trajectory.failed:
        continue
      verdict = scoring.judge(
        trajectory.spans,
        golden_answers=trajectory.question.golden_answers,
        budget=trajectory.budget,
        searches=trajectory.searches,
        scaffold=trajectory.scaffold,
      )
      valid[q, g] = True
      em[q, g], format_[q, g] = verdict.em, verdict.format
      generated[q, g] = trajectory.generated_tokens
      searches[q, g] = trajectory.searches
  parts = rewards.composite(
    em, format_, generated, searches, budgets, valid, config=reward
  )
  advantages = objective.advantages(
    parts.total,
    valid,
    epsilon=objective_config.advantage_epsilon,
    normalize_std=objective_config.normalize_std,
  )
  parts, advantages = jax.device_get((parts, advantages))
  return Experience(
    list(groups),
    budgets,
    valid,
    em,
    format_,
    parts,
    advantages,
    objective_config.reduction,
  )


def batches(
  experience: Experience,
  *,
  steps: int,
  config: config_lib.BatchConfig,
  multiple: int = 1,
) -> list[batching.TrainBatch]:
  """Cuts a rollout into equal consecutive optimizer steps.

  Trajectories stand in (question, sample) order; a group may straddle two
  steps. The mean that the weights make is over one step's trajectories.

  Args:
    experience: the rollout.
    steps: how many.
    config: shapes of the batches.
    multiple: what the rows of a micro-batch divide by.

  Raises:
    ValueError: trajectories do not divide by steps.
  """
  shape = experience.valid.shape
  if experience.valid.size % steps:
    raise ValueError(
      f"{shape[0]} questions x {shape[1]} samples do not divide into {steps} "
      "optimizer steps; change questions, group or "
      "curriculum.steps_per_rollout."
    )
  per_step = experience.valid.size // steps
  return [
    batching.pack(
      examples(experience, start, start + per_step),
      config=config,
      multiple=multiple,
    )
    for start in range(0, experience.valid.size, per_step)
  ]


def examples(
  experience: Experience, start: int = 0, stop: int | None = None
) -> list[batching.Example]:
  """The valid trajectories with flat (question, sample) indices in a range.

  Their weights make a mean over all of them. One whose prompt left no room for
  the model counts among them and is left out: it has nothing to train on.
  """
  group = experience.valid.shape[1]
  indices = range(start, experience.valid.size if stop is None else stop)
  members = [divmod(i, group) for i in indices]
  members = [place for place in members if experience.valid[place]]
  trajectories = [experience.groups[q].trajectories[g] for q, g in members]
  masks = [t.authors == types.Author.MODEL for t in trajectories]
  weights = objective.token_weights(masks, reduction=experience.reduction)
  return [
    batching.Example(
      trajectory.token_ids,
      weight,
      trajectory.logps,
      float(experience.advantages[place]),
    )
    for place, trajectory, weight in zip(members, trajectories, weights)
    if weight.any()
  ]


def metrics(experience: Experience) -> dict[str, float]:
  """Means over the valid trajectories, one flat record."""
  valid = experience.valid
  trajectories = [
    t for g in experience.groups if g for t in g.trajectories if not t.failed
  ]

  def mean(values) -> float:
    return float(np.mean(values)) if len(values) else 0.0

  per_trajectory = {
    name: getattr(experience.rewards, name)[valid]
    for name in ("total", "em", "format", "length", "tool")
  }
  out = {f"reward/{name}": mean(v) for name, v in per_trajectory.items()}
  out["reward/gamma"] = mean(experience.rewards.gamma[valid.any(-1)])
  out["policy/advantage_share"] = mean(experience.advantages[valid] != 0)
  out["rollout/searches"] = mean([t.searches for t in trajectories])
  out["rollout/generated_tokens"] = mean(
    [t.generated_tokens for t in trajectories]
  )
  out["rollout/total_tokens"] = mean([len(t.token_ids) for t in trajectories])
  out["rollout/violations"] = mean([t.violation for t in trajectories])
  for outcome in types.Outcome:
    if outcome is not types.Outcome.FAILED:
      share = mean([t.outcome is outcome for t in trajectories])
      out[f"rollout/{outcome.value}"] = share
  return out
