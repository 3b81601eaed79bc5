"""Search-R1's reward: exact match, and its variant with a format reward.

Deviations from the released code: an answer is the last one that the model
wrote (it asks for two in prompt and response together); well formed is what
`scoring.check_format` says (it wants a Qwen template, so that no response in
another is ever well formed, and takes an empty query for a search); a right
answer is found in the passages as whole words (there, "art" is found in
"party") and never in what the model wrote.
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
  """`gold_found`: 1 if a passage that was shown has an accepted answer."""
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
  """Exact match; with `config.format_variant`, the table below.

                      right           wrong                     no answer
      well formed     1               structure (+ retrieval)   the same
      malformed       1 - structure   final                     0

  Args:
    outcomes: of groups; with the variant, `measures` of `measure`.
    config: the variant and its constants.

  Returns:
    `em` and `total`; of the variant also `format` and `gold_found`.
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
