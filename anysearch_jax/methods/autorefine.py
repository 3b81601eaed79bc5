"""AutoRefine: the policy condenses documents, and is paid if they helped.

    F1 above 0                                      F1
    F1 of 0, an accepted answer is in a refinement  refined
    otherwise, also without an answer               0

The policy thinks, searches, reads `<documents>` and writes what matters in
`<refine>`. In the generated world, whose vocabulary has no such tag, it is
played in Search-R1's environment, and the reward is F1.
https://arxiv.org/abs/2505.11277

Deviations from the released code:
- The prompt states the budget.
- An accepted answer is found in refinements as whole words; there, "art" is
  found in "party".
- F1 follows SQuAD; there, it is 0 unless yes and no are answered exactly.
- A reward of the form is left out: its weight is 0 in the released script.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Mapping

import chex
import jax
import jax.numpy as jnp

from anysearch_jax import types
from anysearch_jax.config import methods as config_methods
from anysearch_jax.environment import scoring, spec, tools, wording
from anysearch_jax.methods import method, search_r1
from anysearch_jax.methods import outcomes as outcomes_lib

SEARCH = tools.search(begins="<documents>", ends="</documents>")
_REFINED = re.compile(r"<refine>(.*?)</refine>", re.DOTALL)


def _environment(texts: Mapping[str, str]) -> spec.Environment:
  return dataclasses.replace(
    search_r1.environment(texts),
    tools=(SEARCH,),
    format=None,
    markers=("<refine>", "</refine>"),
  )


WORDINGS = {
  "autorefine": wording.Wording(
    "autorefine.toml", search_r1.SLOTS, _environment
  ),
  "search_r1_world": search_r1.WORDINGS["search_r1_world"],
}


def measure(trajectory: types.Trajectory) -> dict[str, float]:
  """Returns `refined`: 1 if a refinement holds an accepted answer, else 0.

  A refinement is a `<refine>` block of the model, within one turn.
  """
  found = any(
    scoring.contains(block, trajectory.question.golden_answers)
    for span in trajectory.spans
    if span.author == types.Author.MODEL
    for block in _REFINED.findall(span.text)
  )
  return {"refined": float(found)}


@functools.partial(jax.jit, static_argnames="config")
def reward(
  outcomes: outcomes_lib.Outcomes, *, config: config_methods.AutoRefineConfig
) -> dict[str, chex.Array]:
  """Returns the reward of the table above.

  Args:
    outcomes: outcomes of groups; `measures` holds those of `measure`.
    config: the reward of a refinement that helped.

  Returns:
    `f1`, `refined` and `total`.
  """
  refined = outcomes.measures["refined"]
  consoled = config.refined * refined * outcomes.answered
  return outcomes_lib.parts(
    outcomes.valid,
    f1=outcomes.f1,
    refined=refined,
    total=jnp.where(outcomes.f1 > 0, outcomes.f1, consoled),
  )


METHOD = method.Method(
  "autorefine",
  "AutoRefine",
  environments=wording.environments(WORDINGS),
  wordings=WORDINGS,
  constants=lambda config: config.method.autorefine,
  reward=method.of_arrays(reward),
  train=method.fixed_budget,
  measures=("refined",),
  measure=measure,
)
