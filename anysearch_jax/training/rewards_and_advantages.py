"""Computes rewards, advantages and train batches of a rollout's groups."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from anysearch_jax import config as config_lib
from anysearch_jax import types
from anysearch_jax.algorithms import grpo
from anysearch_jax.environment import records as records_lib
from anysearch_jax.environment import scoring
from anysearch_jax.methods import outcomes as outcomes_lib
from anysearch_jax.methods import own_reward, systems
from anysearch_jax.training import batching


class Experience(NamedTuple):
  """A scored rollout; arrays are `[Q, G]`, a dropped group's row is invalid.

  groups: one for each question; None where a group was dropped.
  verdicts: of the valid trajectories, by place (q, g).
  budgets: int32 `[Q]`.
  rewards: by name, `total` among them, see `methods.method.Method`.
  steps: extra rewards of a trajectory's searches, by its place; empty unless
    the method rewards single searches.
  advantages: relative to the group; None if a critic estimates them.
  reduction: how a step weighs tokens, see `grpo.token_weights`.
  """

  groups: list[types.Group | None]
  verdicts: Mapping[tuple[int, int], scoring.Verdict]
  budgets: np.ndarray
  valid: np.ndarray
  em: np.ndarray
  rewards: Mapping[str, np.ndarray]
  steps: Mapping[tuple[int, int], np.ndarray]
  advantages: np.ndarray | None
  reduction: str


def score(
  groups: Sequence[types.Group | None],
  budgets: np.ndarray,
  *,
  config: config_lib.ExperimentConfig,
) -> Experience:
  """Computes verdicts, rewards and advantages of a whole rollout.

  Args:
    groups: one for each question; None where it was dropped.
    budgets: int `[Q]`, the assigned budgets.
    config: names the system (`method`) that defines the rewards and the
      environment that was played, and sets how advantages are normalised.
  """
  method = systems.trained(config)
  env = systems.environment(config.episode.prompts)
  shape = (len(groups), config.group)
  valid, answered, violation = (np.zeros(shape, bool) for _ in "vav")
  em, format_, generated, searches = (np.zeros(shape, np.int32) for _ in "efgs")
  f1 = np.zeros(shape, np.float32)
  measures = {name: np.zeros(shape, np.float32) for name in method.measures}
  answers, trajectories = (np.full(shape, None, object) for _ in range(2))
  verdicts, steps = {}, {}
  for q, sampled in enumerate(groups):
    for g, trajectory in enumerate(sampled.trajectories if sampled else ()):
      if trajectory.failed:
        continue
      here = q, g
      verdict = verdicts[here] = env.judge(trajectory)
      valid[here] = True
      answers[here], trajectories[here] = verdict.answer, trajectory
      em[here], format_[here] = verdict.em, verdict.format or 0
      f1[here] = scoring.f1(verdict.answer, trajectory.question.golden_answers)
      answered[here] = verdict.answer is not None
      violation[here] = trajectory.violation
      generated[here] = trajectory.generated_tokens
      searches[here] = trajectory.searches
      for name, value in method.measure(trajectory).items():
        measures[name][here] = value
      if method.steps is not None:
        steps[here] = method.steps(trajectory, config)
  outcomes = outcomes_lib.Outcomes(
    em=em,
    f1=f1,
    format=format_,
    answered=answered,
    generated_tokens=generated,
    searches=searches,
    violation=violation,
    budget=budgets,
    valid=valid,
    measures=measures,
    answers=answers,
    trajectories=trajectories,
  )
  parts = method.reward(outcomes, config)
  advantages = None
  if not config.objective.has_critic:
    advantages = grpo.advantages(
      parts["total"],
      valid,
      epsilon=config.objective.advantage_epsilon,
      normalize_std=config.objective.normalize_std,
    )
  parts, advantages = jax.device_get((parts, advantages))
  return Experience(
    list(groups),
    verdicts,
    budgets,
    valid,
    em,
    parts,
    steps,
    advantages,
    config.objective.reduction,
  )


def batches(
  experience: Experience,
  *,
  steps: int,
  config: config_lib.BatchConfig,
  multiple: int = 1,
  rewards: bool = False,
) -> list[batching.TrainBatch]:
  """Splits a rollout into equal consecutive optimizer steps.

  Trajectories are in (question, sample) order; a group may straddle two steps.
  Token weights form a mean over the trajectories of one step.

  Args:
    experience: the rollout.
    steps: number of optimizer steps.
    config: shapes of the batches.
    multiple: a micro-batch has a multiple of this number of rows.
    rewards: whether to pack the tokens' rewards too, for a critic.

  Raises:
    ValueError: the trajectories do not divide into `steps` steps.
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
      rewards=rewards,
    )
    for start in range(0, experience.valid.size, per_step)
  ]


def examples(
  experience: Experience, start: int = 0, stop: int | None = None
) -> list[batching.Example]:
  """Returns the valid trajectories with flat indices in a range, as examples.

  Trajectories are in (question, sample) order. The token weights form a mean
  over those returned. A trajectory whose prompt left no room for the model has
  no token to train on; it is omitted, but the mean counts it.
  """
  group = experience.valid.shape[1]
  indices = range(start, experience.valid.size if stop is None else stop)
  members = [divmod(i, group) for i in indices]
  members = [place for place in members if experience.valid[place]]
  trajectories = [experience.groups[q].trajectories[g] for q, g in members]
  masks = [t.authors == types.Author.MODEL for t in trajectories]
  weights = grpo.token_weights(masks, reduction=experience.reduction)
  return [
    batching.Example(
      trajectory.token_ids,
      weight,
      trajectory.logps,
      0.0
      if experience.advantages is None
      else float(experience.advantages[place]),
      token_rewards(
        trajectory,
        float(experience.rewards["total"][place]),
        experience.steps.get(place, ()),
      ),
    )
    for place, trajectory, weight in zip(members, trajectories, weights)
    if weight.any()
  ]


def token_rewards(
  trajectory: types.Trajectory, total: float, steps: Sequence[float]
) -> np.ndarray:
  """Returns the reward of each token of a trajectory.

  Args:
    trajectory: T tokens.
    total: reward of the last token that the model wrote.
    steps: rewards of the tokens that end the turns of its charged searches.

  Returns:
    float32 `[T]`.
  """
  rewards = np.zeros(len(trajectory.token_ids), np.float32)
  rewards[np.flatnonzero(trajectory.authors == types.Author.MODEL)[-1:]] = total
  rewards[list(trajectory.search_ends[: len(steps)])] += steps
  return rewards


def records(experience: Experience) -> list[dict[str, Any]]:
  """Returns the groups as JSON values, each trajectory with its scores.

  The scores are its verdict, its total `reward` and the `parts` of it by name,
  the extra rewards of its searches (`steps`) if the method has them, and its
  `advantage` in its group (None if a critic estimates it). A failed trajectory
  has no scores.
  """

  def worth(here: tuple[int, int]) -> dict[str, Any]:
    if not experience.valid[here]:
      return {}
    parts = {k: float(v[here]) for k, v in experience.rewards.items()}
    steps = experience.steps.get(here)
    return {
      **dataclasses.asdict(experience.verdicts[here]),
      "reward": parts.pop("total"),
      "parts": parts,
      **({} if steps is None else {"steps": steps.tolist()}),
      "advantage": None
      if experience.advantages is None
      else float(experience.advantages[here]),
    }

  return [
    records_lib.group(
      group, [worth((q, g)) for g in range(len(group.trajectories))]
    )
    for q, group in enumerate(experience.groups)
    if group
  ]


def reward_metrics(config: config_lib.ExperimentConfig) -> set[str]:
  """Returns the names of the reward metrics, those that begin with `reward/`.

  Rewards are only traced for it; no episode is played. JAX may be unable to
  trace a reward function of the user's, so that is called, once.

  Raises:
    own_reward.RewardError: the user's function cannot be used.
  """
  method = systems.trained(config)
  made_up = own_reward.trial(
    group=config.group,
    budget=config.curriculum.max_budget,
    measures=method.measures,
  )
  if config.reward.function:
    parts = set(method.reward(made_up, config))
  else:
    parts = set(jax.eval_shape(lambda: method.reward(made_up, config)))
  if systems.environment(config.episode.prompts).format is not None:
    parts.add("format")
  if method.steps is not None:
    parts.add("steps")
  return {f"reward/{name}" for name in ("em", *parts)}


def metrics(experience: Experience) -> dict[str, float]:
  """Returns means over the valid trajectories, as one flat record."""
  valid = experience.valid
  trajectories = [
    t for g in experience.groups if g for t in g.trajectories if not t.failed
  ]

  def mean(values) -> float:
    return float(np.mean(values)) if len(values) else 0.0

  parts = {"em": experience.em, **experience.rewards}
  out = {f"reward/{name}": mean(part[valid]) for name, part in parts.items()}
  formed = [v.format for v in experience.verdicts.values()]
  if None not in formed:
    out["reward/format"] = mean(formed)
  if experience.steps:
    out["reward/steps"] = mean([x.sum() for x in experience.steps.values()])
  if experience.advantages is not None:
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
