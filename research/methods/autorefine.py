"""AutoRefine: the policy condenses documents, and is paid if they helped.

    F1 above 0                                      F1
    F1 of 0, an accepted answer is in a refinement  refined
    otherwise, also without an answer               0

The policy thinks, searches, reads `<documents>` and writes what matters in
`<refine>`. In the generated world, whose vocabulary has no such tag, it is
played in Search-R1's environment, and the reward is F1.
https://arxiv.org/abs/2505.11277
"""

from __future__ import annotations

import dataclasses
import pathlib
import re

import jax.numpy as jnp

import anysearch_jax as aj

SEARCH = aj.tools.search(begins="<documents>", ends="</documents>")
WORDINGS = aj.search_r1.wordings(
  "autorefine",
  folder=pathlib.Path(__file__).with_name("texts"),
  tools=(SEARCH,),
  format=None,
  markers=aj.protocol.tags(("refine",)),
)
_REFINED = re.compile(r"<refine>(.*?)</refine>", re.DOTALL)


@dataclasses.dataclass(frozen=True)
class Options:
  """AutoRefine's reward."""

  refined: float = aj.settings.learning(0.1, aj.settings.REWARD)
  """Reward of an answer with an F1 of 0 if a refinement holds an accepted
  answer."""


def measure(trajectory: aj.Trajectory) -> dict[str, float]:
  """Returns `refined`: 1 if a refinement holds an accepted answer, else 0.

  A refinement is a `<refine>` block of the model, within one turn.
  """
  found = any(
    aj.scoring.contains(block, trajectory.question.golden_answers)
    for turn in aj.scoring.turns(trajectory.spans)
    for block in _REFINED.findall(turn)
  )
  return {"refined": float(found)}


@aj.method.jitted
def reward(o: aj.Outcomes, c: Options) -> aj.method.Terms:
  """Returns the reward of the table above."""
  refined = o.measures["refined"]
  consoled = c.refined * refined * o.answered
  return {
    "f1": o.f1,
    "refined": refined,
    "total": jnp.where(o.f1 > 0, o.f1, consoled),
  }


METHOD = aj.method.compared(
  "autorefine",
  "AutoRefine",
  WORDINGS,
  reward,
  measures=("refined",),
  measure=measure,
  options=Options(),
)
