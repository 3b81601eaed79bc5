"""Advantages whose baseline is of a turn, not of the whole episode.

In a group, two trajectories stand at the same point before a turn if the same
passages were shown to both so far. The baseline of turn t of trajectory i is
the mean reward of the others that stood where i stood; if nobody else did, of
those at the last point before it that somebody shared:

    A_it = (G - 1) / G  (R_i - mean of R_j over these others) / deviation

G is the number of valid trajectories of the group. Before the first passage
everybody shares the point, and A_i0 is GRPO's advantage. Later, an earlier
mistake or a lucky memory no longer counts for or against a turn that it did not
depend on. The baseline does not depend on what i does in the turn, so that the
gradient's mean is the same, with less noise. GiGPO compares turns by their
state too, and adds that to the advantage of the episode:
https://arxiv.org/abs/2505.10978
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from anysearch_jax import config as config_lib
from anysearch_jax import types

BASELINES = ("group", "turn")
# A trajectory's question and its sample.
Place = tuple[int, int]
# What was shown before a turn: the documents of each call.
_Point = tuple[tuple[types.Document, ...], ...]


def of_turns(
  trajectories: Mapping[Place, types.Trajectory],
  totals: np.ndarray,
  *,
  config: config_lib.ObjectiveConfig,
) -> dict[Place, np.ndarray]:
  """Returns the advantages of the turns of each trajectory.

  Args:
    trajectories: the valid ones, by question and sample.
    totals: `[Q, G]` rewards.
    config: how differences are divided, see `grpo.advantages`.

  Returns:
    float32 `[searches + 1]` for each trajectory: of each search's turn, and of
    what follows the last search.
  """
  groups: dict[int, list[int]] = {}
  for q, g in trajectories:
    groups.setdefault(q, []).append(g)
  centred = {
    q: np.asarray(totals[q, members], float) - np.mean(totals[q, members])
    for q, members in groups.items()
  }
  pooled = np.concatenate([*centred.values(), []])
  found = {}
  for q, members in groups.items():
    match config.normalize:
      case "none":
        divisor = 1.0
      case "batch":
        divisor = np.sqrt(np.mean(pooled**2)) + config.advantage_epsilon
      case _:
        divisor = np.sqrt(np.mean(centred[q] ** 2)) + config.advantage_epsilon
    points = [_points(trajectories[q, g]) for g in members]
    for i, g in enumerate(members):
      differences = _differences(i, points, centred[q])
      found[q, g] = np.asarray(differences / divisor, np.float32)
  return found


def _points(trajectory: types.Trajectory) -> list[_Point]:
  """Returns where a trajectory stood before each turn, `[searches + 1]`."""
  shown = tuple(o.documents for o in trajectory.observations)
  return [shown[:t] for t in range(trajectory.searches + 1)]


def _differences(
  i: int, points: list[list[_Point]], rewards: np.ndarray
) -> np.ndarray:
  """Returns (G - 1) / G (R_i - mean of others) of each turn of one member."""
  scale = (len(points) - 1) / len(points)
  out, others = [], [j for j in range(len(points)) if j != i]
  for t, point in enumerate(points[i]):
    # Whoever stands here stood at all points before.
    here = [j for j in others if t < len(points[j]) and points[j][t] == point]
    others = here or others
    mean = np.mean(rewards[others]) if others else rewards[i]
    out.append(scale * (rewards[i] - mean))
  return np.array(out)
