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

import re

import jax.numpy as jnp

from anysearch_jax import types
from anysearch_jax.config import methods as constants
from anysearch_jax.environment import protocol, scoring, tools
from anysearch_jax.methods import method, search_r1

SEARCH = tools.search(begins="<documents>", ends="</documents>")
WORDINGS = search_r1.wordings(
  "autorefine", tools=(SEARCH,), format=None, markers=protocol.tags(("refine",))
)
_REFINED = re.compile(r"<refine>(.*?)</refine>", re.DOTALL)


def measure(trajectory: types.Trajectory) -> dict[str, float]:
  """Returns `refined`: 1 if a refinement holds an accepted answer, else 0.

  A refinement is a `<refine>` block of the model, within one turn.
  """
  found = any(
    scoring.contains(block, trajectory.question.golden_answers)
    for turn in scoring.turns(trajectory.spans)
    for block in _REFINED.findall(turn)
  )
  return {"refined": float(found)}


@method.jitted
def reward(o: method.Outcomes, c: constants.AutoRefineConfig) -> method.Terms:
  """Returns the reward of the table above."""
  refined = o.measures["refined"]
  consoled = c.refined * refined * o.answered
  return {
    "f1": o.f1,
    "refined": refined,
    "total": jnp.where(o.f1 > 0, o.f1, consoled),
  }


METHOD = method.compared(
  "autorefine", "AutoRefine", WORDINGS, reward, ("refined",), measure
)
