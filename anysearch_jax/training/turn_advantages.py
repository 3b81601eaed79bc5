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

# A trajectory's question and its sample.
Place = tuple[int, int]


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
  trajectory: types.Trajectory, outcome: float, searches: np.ndarray
) -> np.ndarray:
  """Returns the advantage of each token of a trajectory.

  A token belongs to the next search that ends at or after it, so a turn without
  a call counts to the search that follows it.

  Args:
    trajectory: T tokens.
    outcome: advantage of the trajectory.
    searches: float32 `[searches]`, weighted, in the order of `search_ends`.

  Returns:
    float32 `[T]`.
  """
  advantages = np.full(len(trajectory.token_ids), outcome, np.float32)
  start = 0
  for end, advantage in zip(trajectory.search_ends, searches, strict=True):
    advantages[start : end + 1] += advantage
    start = end + 1
  return advantages
