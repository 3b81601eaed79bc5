"""Search-R1's reward: exact match, and its variant with a format reward.

Deviations from the released code:
- The answer is the last one that the model wrote; there, prompt and response
  together must hold two.
- `scoring.check_format` decides what is well formed; there, only a Qwen chat
  template can be, and an empty query counts as a search.
- An answer is found in passages as whole words ("art" is not found in
  "party"), and never in the model's own text.
"""

from __future__ import annotations

import functools

import chex
import jax
import jax.numpy as jnp

from anysearch_jax import types
from anysearch_jax.config import methods as config_methods
from anysearch_jax.environment import scoring
from anysearch_jax.methods import observations
from anysearch_jax.methods import outcomes as outcomes_lib


def measure(trajectory: types.Trajectory) -> dict[str, float]:
  """Returns `gold_found`: 1 if a shown passage holds a gold answer, else 0."""
  answers = map(scoring.normalize_answer, trajectory.question.golden_answers)
  wanted = [f" {answer} " for answer in answers if answer]
  texts = (
    f" {scoring.normalize_answer(text)} "
    for passages in observations.shown(trajectory)
    for text in passages
  )
  found = any(answer in text for text in texts for answer in wanted)
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
