"""Search-R1: an outcome reward, a fixed budget, GRPO or PPO.

Its tags are those of the AnySearch paper. Its texts are our own words
(`texts/search_r1.toml`); the prompt states the number of searches, because the
comparison tells every system its budget.

Deviations from the released code, which has its own episode loop:
- A turn ends at its closing tag; there, it is cut at the tag afterwards.
- Observations are not cut at 500 tokens.
- A search beyond the budget gets a line and another turn; there, nothing is
  shown and the episode ends.
- A turn without an action does not use up the budget; an empty query is not an
  action.

Deviations of its reward, which is exact match or a variant with a format
reward:
- The answer is the last one that the model wrote; there, prompt and response
  together must hold two.
- `scoring.check_format` decides what is well formed; there, only a Qwen chat
  template can be, and an empty query counts as a search.
- An answer is found in passages as whole words ("art" is not found in
  "party"), and never in the model's own text.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

import chex
import jax
import jax.numpy as jnp

from anysearch_jax import types
from anysearch_jax.config import methods as config_methods
from anysearch_jax.environment import prompts, scoring, spec, wording
from anysearch_jax.methods import method
from anysearch_jax.methods import outcomes as outcomes_lib

SLOTS = {
  "prompt": wording.PROMPT,
  "over_budget": wording.LINE,
  "no_action": wording.LINE,
}


def environment(texts: Mapping[str, str]) -> spec.Environment:
  """Returns the environment of a prompt, an `over_budget` and a `no_action`."""
  prompt = wording.template(texts["prompt"])
  return spec.Environment(
    scaffold=prompt,
    plain=prompt,
    over_budget=wording.template(texts["over_budget"]),
    no_action=wording.template(texts["no_action"]),
  )


WORDINGS = {
  "search_r1": wording.Wording("search_r1.toml", SLOTS, environment),
  "search_r1_world": prompts.WORLD,
}
ENVIRONMENTS = wording.environments(WORDINGS)


def measure(trajectory: types.Trajectory) -> dict[str, float]:
  """Returns `gold_found`: 1 if a shown passage holds a gold answer, else 0."""
  answers = trajectory.question.golden_answers
  found = any(
    scoring.contains(passage.contents, answers)
    for shown in trajectory.observations
    for passage in shown.passages
  )
  return {"gold_found": float(found)}


@functools.partial(jax.jit, static_argnames="config")
def reward(
  outcomes: outcomes_lib.Outcomes, *, config: config_methods.SearchR1Config
) -> dict[str, chex.Array]:
  """Returns exact match or, with `config.format_variant`, this table:

                      right           wrong                     no answer
      well formed     1               structure (+ retrieval)   the same
      malformed       1 - structure   final                     0

  `retrieval` is added if `gold_found` is 1.

  Args:
    outcomes: outcomes of groups; for the variant, `measures` holds those of
      `measure`.
    config: the variant and its constants.

  Returns:
    `em` and `total`; for the variant also `format` and `gold_found`.
  """
  em = outcomes.em
  if not config.format_variant:
    return outcomes_lib.parts(outcomes.valid, em=em, total=em)
  format_, found = outcomes.format, outcomes.measures["gold_found"]
  right = 1 - config.structure * (1 - format_)
  formed = config.structure + config.retrieval * found
  malformed = config.final * outcomes.answered
  wrong = jnp.where(format_ != 0, formed, malformed)
  return outcomes_lib.parts(
    outcomes.valid,
    em=em,
    format=format_,
    gold_found=found,
    total=jnp.where(em != 0, right, wrong),
  )


METHOD = method.Method(
  "search_r1",
  "Search-R1",
  environments=ENVIRONMENTS,
  wordings=WORDINGS,
  constants=lambda config: config.method.search_r1,
  reward=method.of_arrays(reward),
  train=method.fixed_budget,
  measures=("gold_found",),
  measure=measure,
)
