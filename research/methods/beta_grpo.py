"""beta-GRPO: a right answer counts only if the policy searched with confidence.

    EM    without a search, or if the confidence is at least beta
    0     otherwise

The confidence of a response is the smallest probability that the policy gave to
a token of its charged queries; the marks of the calls count, because the
decision to search is in them. It is played in Search-R1's environment.
https://arxiv.org/abs/2505.17281

The paper's code was not at hand. These are our readings of the paper:
- Probabilities are those at the temperature of sampling, as they were recorded.
- The default of beta is our choice.
"""

from __future__ import annotations

import dataclasses
import math

import jax.numpy as jnp

import anysearch_jax as aj


@dataclasses.dataclass(frozen=True)
class Options:
  """beta-GRPO's reward."""

  beta: float = aj.settings.learning(0.4, aj.settings.SHARE)
  """Least probability that each token of every query must have had for a right
  answer to be rewarded."""


def measure(trajectory: aj.Trajectory) -> dict[str, float]:
  """Returns `confidence`, in [0, 1]; 1 without a search."""
  calls = zip(trajectory.observations, trajectory.search_ends, strict=True)
  least = (
    float(trajectory.logps[end + 1 - shown.tokens : end + 1].min())
    for shown, end in calls
    if shown.tokens
  )
  return {"confidence": math.exp(min(least, default=0.0))}


@aj.method.jitted
def reward(o: aj.Outcomes, c: Options) -> aj.method.Terms:
  """Returns exact match, or 0 below the confidence."""
  confidence = o.measures["confidence"]
  return {
    "confidence": confidence,
    "total": jnp.where(confidence >= c.beta, o.em, 0),
  }


METHOD = aj.method.compared(
  "beta_grpo",
  "beta-GRPO",
  aj.search_r1.WORDINGS,
  reward,
  measures=("confidence",),
  measure=measure,
  options=Options(),
)
