"""MT-GRPO: rewards of single searches, with advantages of their own in groups.

    search     executed + found * (its passages hold an accepted answer)
    outcome    exact if the answer is right, plus contained if it holds an
               accepted answer, plus well_formed if the response is well formed

Tokens of a search's turn get the outcome's advantage in the group and, times
`objective.turn_weight`, that of the search (`training/turn_advantages`). It is
played in Search-R1's environment. https://arxiv.org/abs/2505.11821
"""

from __future__ import annotations

import numpy as np

from anysearch_jax import types
from anysearch_jax.config import methods as constants
from anysearch_jax.environment import scoring
from anysearch_jax.methods import method, search_r1


def steps(
  trajectory: types.Trajectory, config: constants.MtGrpoConfig
) -> np.ndarray:
  """Returns the reward of each charged search, float32 `[searches]`."""
  answers = trajectory.question.golden_answers
  return np.array(
    [
      config.executed
      + config.found
      * any(scoring.contains(p.contents, answers) for p in shown.passages)
      for shown in trajectory.observations
    ],
    np.float32,
  )


@method.jitted
def reward(o: method.Outcomes, c: constants.MtGrpoConfig) -> method.Terms:
  """Returns the reward of the outcome, without those of `steps`."""
  contained = o.measures["contained"]
  return {
    "em": o.em,
    "contained": contained,
    "total": c.exact * o.em
    + c.contained * contained
    + c.well_formed * o.format,
  }


METHOD = method.compared(
  *("mt_grpo", "MT-GRPO", search_r1.WORDINGS, reward),
  measures=("contained",),
  measure=method.contained,
  steps=steps,
)
