"""Advantages of single turns within groups, as in MT-GRPO.

    A_t = A + weight * A_s    for a token t of search s
    A_t = A                   for a token after the last search

A is the advantage of the trajectory in its group. A_s is that of the reward of
search s among the trajectories of the group that made an s-th search. Without a
critic, this is how rewards of searches (`Method.steps`) enter the loss.
https://arxiv.org/abs/2505.11821

With `objective.baseline=turn` the baseline belongs to a turn, not to the whole
episode. Two trajectories of a group are at the same point before a turn if the
same passages were shown to both so far. The baseline of turn t of trajectory i
is the mean reward of the others at its point; if there are none, of those at
the last point before it that another trajectory shared:

    A_it = (G - 1) / G  (R_i - mean of R_j over these others) / deviation

G is the number of valid trajectories of the group. All share the point before
the first passage, and A_i0 is GRPO's advantage. Later, an earlier mistake or a
lucky memory no longer counts for or against a turn that did not depend on it.
The baseline does not depend on what i does in the turn, so the gradient has the
same mean and less noise. GiGPO compares turns by their state too, and adds that
to the advantage of the episode: https://arxiv.org/abs/2505.10978

A system may have its own advantages of turns (`Method.turns`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import numpy as np

from anysearch_jax import config as config_lib
from anysearch_jax import types
from anysearch_jax.algorithms import grpo

Place = types.Place
# The passages that were shown before a turn: id and title of each, by call.
_Point = tuple[tuple[tuple[str, str], ...], ...]


def added_advantages(
  trajectories: Mapping[Place, types.Trajectory],
  totals: np.ndarray,
  advantages: np.ndarray,
  steps: Mapping[Place, np.ndarray],
  *,
  config: config_lib.ObjectiveConfig,
  system_turns: Callable[
    [Mapping[Place, types.Trajectory]], Mapping[Place, np.ndarray]
  ]
  | None = None,
) -> dict[Place, np.ndarray]:
  """Returns the advantages to add to a trajectory's own in each of its turns.

  Args:
    trajectories: the valid ones.
    totals, advantages: `[Q, G]` rewards and advantages of whole trajectories.
    steps: rewards of the searches of each trajectory; empty without any.
    config: baselines, weights and how advantages are normalised.
    system_turns: the system's own advantages of turns, in place of baselines.

  Returns:
    float32 `[searches]` by trajectory, or `[searches + 1]` with baselines of
    turns; nothing if all turns have the trajectory's advantage.
  """
  added = search_advantages(steps, totals.shape, config=config) if steps else {}
  if system_turns is not None:
    relative = system_turns(trajectories)
  elif config.baseline == "group":
    return added
  else:
    relative = peer_advantages(trajectories, totals, config=config)
  result = {}
  for place, turns in relative.items():
    result[place] = (turns - advantages[place]).astype(np.float32)
    if place in added:
      result[place][:-1] += added[place]
  return result


def search_advantages(
  steps: Mapping[Place, np.ndarray],
  shape: tuple[int, int],
  *,
  config: config_lib.ObjectiveConfig,
) -> dict[Place, np.ndarray]:
  """Returns the advantages of the searches of each trajectory.

  Args:
    steps: rewards of the searches of each valid trajectory, float `[searches]`.
    shape: number of questions and of samples in the rollout, (Q, G).
    config: weight of the searches, and how advantages are normalised.

  Returns:
    float32 `[searches]` for each of `steps`, times `config.turn_weight`. They
    are 0 if no other trajectory of the group made such a search.
  """
  max_searches = max((len(rewards) for rewards in steps.values()), default=0)
  if not max_searches:
    return {place: np.zeros(0, np.float32) for place in steps}
  rewards_table = np.zeros((shape[0], max_searches, shape[1]), np.float32)
  valid = np.zeros(rewards_table.shape, bool)
  for (q, g), rewards in steps.items():
    rewards_table[q, : len(rewards), g] = rewards
    valid[q, : len(rewards), g] = True
  advantages = np.asarray(
    grpo.advantages(
      rewards_table,
      valid,
      epsilon=config.advantage_epsilon,
      normalize=config.normalize,
      deviation=config.deviation,
    )
  )
  return {
    (q, g): np.float32(config.turn_weight) * advantages[q, : len(rewards), g]
    for (q, g), rewards in steps.items()
  }


def token_advantages(
  trajectory: types.Trajectory, outcome: float, turns: np.ndarray
) -> np.ndarray:
  """Returns the advantage of each token of a trajectory, float32 `[T]`.

  A token belongs to the next search that ends at or after it, so a turn without
  a call counts to the search that follows it.

  Args:
    trajectory: the trajectory.
    outcome: its advantage.
    turns: float32 `[searches]`, weighted, in the order of `search_ends`, or
      `[searches + 1]` with the advantage of what follows the last search.
  """
  advantages = np.full(len(trajectory.token_ids), outcome, np.float32)
  ends = (*trajectory.search_ends, len(trajectory.token_ids) - 1)
  start = 0
  for end, advantage in zip(ends, turns, strict=False):
    advantages[start : end + 1] += advantage
    start = end + 1
  return advantages


def peer_advantages(
  trajectories: Mapping[Place, types.Trajectory],
  totals: np.ndarray,
  *,
  config: config_lib.ObjectiveConfig,
) -> dict[Place, np.ndarray]:
  """Returns the advantages of the turns of each trajectory.

  Args:
    trajectories: the valid ones.
    totals: `[Q, G]` rewards of whole trajectories.
    config: how advantages are normalised.

  Returns:
    float32 `[searches + 1]` by trajectory; the last turn is what follows the
    last search.
  """
  groups = _by_question(trajectories)
  centred = {
    q: np.asarray(totals[q, members], float) - np.mean(totals[q, members])
    for q, members in groups.items()
  }
  pooled = np.concatenate([*centred.values(), []])
  advantages = {}
  for q, members in groups.items():
    divisor = 1.0
    if config.normalize != "none":
      spread = pooled if config.normalize == "batch" else centred[q]
      sample = config.deviation == "sample" and len(spread) > 1
      divisor = np.std(spread, ddof=sample) + config.advantage_epsilon
    points = [_points(trajectories[q, g]) for g in members]
    for i, g in enumerate(members):
      differences = _differences(i, points, centred[q])
      advantages[q, g] = np.asarray(differences / divisor, np.float32)
  return advantages


def _by_question(places: Iterable[Place]) -> dict[int, list[int]]:
  """Returns the samples of each question."""
  groups: dict[int, list[int]] = {}
  for q, g in places:
    groups.setdefault(q, []).append(g)
  return groups


def _points(trajectory: types.Trajectory) -> list[_Point]:
  """Returns the point of a trajectory before each turn, `[searches + 1]`."""
  passages = tuple(
    tuple((p.id, p.title) for p in observation.passages)
    for observation in trajectory.observations
  )
  return [passages[:t] for t in range(trajectory.searches + 1)]


def _differences(
  i: int, points: list[list[_Point]], rewards: np.ndarray
) -> np.ndarray:
  """Returns (G - 1) / G (R_i - mean of others) of each turn of one member."""
  scale = (len(points) - 1) / len(points)
  differences = []
  peers = [j for j in range(len(points)) if j != i]
  for t, point in enumerate(points[i]):
    # A trajectory at this point was at all points before it too.
    peers_here = [
      j for j in peers if t < len(points[j]) and points[j][t] == point
    ]
    if peers_here:
      peers = peers_here
    mean = np.mean(rewards[peers]) if peers else rewards[i]
    differences.append(scale * (rewards[i] - mean))
  return np.array(differences)
