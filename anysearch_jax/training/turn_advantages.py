"""Advantages of single turns within groups, as in MT-GRPO.

    A_t = A + weight * A_s    for a token t of search s
    A_t = A                   for a token after the last search

A is the advantage of the trajectory in its group. A_s is that of the reward of
search s among the trajectories of the group that made an s-th search. Without a
critic, this is how rewards of searches (`Method.steps`) enter the loss.
https://arxiv.org/abs/2505.11821
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from anysearch_jax import config as config_lib
from anysearch_jax import types
from anysearch_jax.algorithms import grpo
from anysearch_jax.training import turn_baselines

Place = turn_baselines.Place


def of_turns(
  trajectories: Mapping[Place, types.Trajectory],
  totals: np.ndarray,
  advantages: np.ndarray,
  steps: Mapping[Place, np.ndarray],
  *,
  config: config_lib.ObjectiveConfig,
) -> dict[Place, np.ndarray]:
  """Returns what is added to a trajectory's advantage in each of its turns.

  Args:
    trajectories: the valid ones.
    totals, advantages: `[Q, G]` rewards and advantages of whole trajectories.
    steps: rewards of the searches of each trajectory; empty without any.
    config: baselines, weights and how advantages are normalised.

  Returns:
    float32 `[searches]` by trajectory, or `[searches + 1]` with baselines of
    turns; nothing if all turns have the trajectory's advantage.
  """
  added = of_searches(steps, totals.shape, config=config) if steps else {}
  if config.baseline != "turn":
    return added
  own = turn_baselines.of_turns(trajectories, totals, config=config)
  for place, turns in own.items():
    turns -= advantages[place]
    if place in added:
      turns[:-1] += added[place]
  return own


def of_searches(
  steps: Mapping[Place, np.ndarray],
  shape: tuple[int, int],
  *,
  config: config_lib.ObjectiveConfig,
) -> dict[Place, np.ndarray]:
  """Returns the advantages of the searches of each trajectory.

  Args:
    steps: rewards of the searches of each valid trajectory, float `[searches]`.
    shape: questions and samples of the rollout.
    config: how advantages are normalised, and their weight.

  Returns:
    float32 `[searches]` for each of `steps`, times `config.turn_weight`. They
    are 0 if no other trajectory of the group made such a search.
  """
  most = max((len(rewards) for rewards in steps.values()), default=0)
  if not most:
    return {place: np.zeros(0, np.float32) for place in steps}
  table = np.zeros((shape[0], most, shape[1]), np.float32)
  made = np.zeros(table.shape, bool)
  for (q, g), rewards in steps.items():
    table[q, : len(rewards), g] = rewards
    made[q, : len(rewards), g] = True
  found = np.asarray(
    grpo.advantages(
      table, made, epsilon=config.advantage_epsilon, normalize=config.normalize
    )
  )
  return {
    (q, g): np.float32(config.turn_weight) * found[q, : len(rewards), g]
    for (q, g), rewards in steps.items()
  }


def of_tokens(
  trajectory: types.Trajectory, outcome: float, turns: np.ndarray
) -> np.ndarray:
  """Returns the advantage of each token of a trajectory.

  A token belongs to the next search that ends at or after it, so a turn without
  a call counts to the search that follows it.

  Args:
    trajectory: T tokens.
    outcome: advantage of the trajectory.
    turns: float32 `[searches]`, weighted, in the order of `search_ends`, or
      `[searches + 1]` with that of what follows the last search.

  Returns:
    float32 `[T]`.
  """
  advantages = np.full(len(trajectory.token_ids), outcome, np.float32)
  ends = (*trajectory.search_ends, len(trajectory.token_ids) - 1)
  start = 0
  for end, advantage in zip(ends, turns, strict=False):
    advantages[start : end + 1] += advantage
    start = end + 1
  return advantages
