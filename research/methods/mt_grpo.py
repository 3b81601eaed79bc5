"""MT-GRPO: rewards of single searches, with advantages of their own in groups.

    search     executed + found * (its passages hold an accepted answer)
    outcome    exact if the answer is right, plus contained if it holds an
               accepted answer, plus well_formed if the response is well formed

Tokens of a search's turn get the outcome's advantage in the group and, times
`objective.turn_weight`, that of the search (`training/turn_advantages`). It is
played in Search-R1's environment. https://arxiv.org/abs/2505.11821
"""

from __future__ import annotations

import dataclasses

import numpy as np

import anysearch_jax as aj


@dataclasses.dataclass(frozen=True)
class Options:
  """MT-GRPO's rewards of searches and of the outcome."""

  executed: float = aj.settings.learning(0.2, aj.settings.at_least(0))
  """Reward of a search."""
  found: float = aj.settings.learning(0.5, aj.settings.at_least(0))
  """Added if its passages hold an accepted answer."""
  exact: float = aj.settings.learning(1.0, aj.settings.at_least(0))
  """Reward of a right answer."""
  contained: float = aj.settings.learning(0.5, aj.settings.at_least(0))
  """Reward of an answer that holds an accepted answer."""
  well_formed: float = aj.settings.learning(0.2, aj.settings.at_least(0))
  """Reward of a well-formed response."""


def steps(trajectory: aj.Trajectory, config: Options) -> np.ndarray:
  """Returns the reward of each charged search, float32 `[searches]`."""
  answers = trajectory.question.golden_answers
  return np.array(
    [
      config.executed
      + config.found
      * any(aj.scoring.contains(p.contents, answers) for p in shown.passages)
      for shown in trajectory.observations
    ],
    np.float32,
  )


@aj.method.jitted
def reward(o: aj.Outcomes, c: Options) -> aj.method.Terms:
  """Returns the reward of the outcome, without those of `steps`."""
  contained = o.measures["contained"]
  return {
    "contained": contained,
    "total": c.exact * o.em
    + c.contained * contained
    + c.well_formed * o.format,
  }


METHOD = aj.method.compared(
  "mt_grpo",
  "MT-GRPO",
  aj.search_r1.WORDINGS,
  reward,
  measures=("contained",),
  measure=aj.method.contained,
  steps=steps,
  options=Options(),
)
