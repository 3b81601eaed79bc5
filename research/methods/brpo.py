"""BRPO: Search-R1 whose turns are rewarded by the answers at all budgets.

With f_b, the F1 of the answer at b of B searches (`early_answers`; the final
one from the last search on), the turn of search s + 1 has

    R_s = sum_{b > s} f_b / B
    A_s = R_s - s / B (1 - s / B) V_s - (1 - s / B) (mean of R_s in the group)

V_s is the mean of f_1 to f_s with weights 1, 2, 4, ... Rewards do not count.
https://arxiv.org/abs/2505.13438

It has no recipe of its own (`configs`).
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

import anysearch_jax as aj
from research.methods import early_answers


def turns(
  trajectories: Mapping[aj.Place, aj.Trajectory], constants: None
) -> dict[aj.Place, np.ndarray]:
  """Returns budget-relative advantages of the turns of each trajectory.

  They are float32 `[searches + 1]`; the last turn has that of the last search.
  """
  groups: dict[int, list[int]] = {}
  for question, sample in trajectories:
    groups.setdefault(question, []).append(sample)
  advantages = {}
  for question, samples in groups.items():
    curves = np.array([_curve(trajectories[question, g]) for g in samples])
    count = curves.shape[1]
    returns = np.cumsum(curves[:, ::-1], 1)[:, ::-1] / count
    weights = 2.0 ** np.arange(count)
    means = np.cumsum(weights * curves, 1) / np.cumsum(weights)
    earlier = np.concatenate([0 * means[:, :1], means[:, :-1]], 1)
    share = np.arange(count) / count
    relative = returns - share * (1 - share) * earlier
    relative -= (1 - share) * returns.mean(0)
    for row, sample in enumerate(samples):
      searches = trajectories[question, sample].searches
      places = np.minimum(np.arange(searches + 1), max(searches - 1, 0))
      advantages[question, sample] = relative[row, places].astype(np.float32)
  return advantages


def _curve(trajectory: aj.Trajectory) -> list[float]:
  """Returns the F1 of the answer at each budget from 1 to the assigned one."""
  golds = trajectory.question.golden_answers
  early = [f1 for f1, _ in early_answers.curve(trajectory)[:-1]]
  final = aj.scoring.f1(aj.protocol.extract_answer(trajectory.spans), golds)
  return early + [final] * (max(trajectory.budget, 1) - len(early))


@aj.method.jitted
def reward(outcomes: aj.Outcomes, constants: None) -> aj.method.Terms:
  """Returns exact match, which is recorded and trains nothing."""
  return {"total": outcomes.em}


METHOD = aj.method.compared(
  "brpo",
  "BRPO",
  aj.search_r1.WORDINGS,
  reward,
  step=early_answers.step,
  turns=turns,
)
