"""IKEA's reward: to search only where one's own knowledge ends.

Deviations from the released code: searches are the charged ones (there, every
`<search>` in the text, in passages too); form is judged in what the model wrote
(there, a passage with "(research)" makes the response malformed), a whole tag
in other brackets at a time; training and evaluation differ by what reads them
(there, by a column of the data).
"""

from __future__ import annotations

import functools
import re

import chex
import jax
import jax.numpy as jnp

from anysearch_jax import types
from anysearch_jax.config import methods as config_methods
from anysearch_jax.environment import protocol
from anysearch_jax.methods import outcomes as outcomes_lib

_NAMES = "(?:think|search|answer)"
# A tag with a round or square bracket on either side.
_MISWRITTEN = re.compile(rf"[(\[]/?{_NAMES}[)\]>]|</?{_NAMES}[)\]]")


def measure(trajectory: types.Trajectory) -> dict[str, float]:
  """`well_formed`: 1 if the model thought and acted in tags, else 0.

  It is malformed without a thought, with a turn that neither searches nor
  answers, and with a tag in round or square brackets. A search beyond the
  budget is an action.
  """
  turns = [
    span.text for span in trajectory.spans if span.author == types.Author.MODEL
  ]
  thought = any(protocol.last_content(turn, "think") for turn in turns)
  formed = thought and all(
    _acts(turn) and not _MISWRITTEN.search(turn) for turn in turns
  )
  return {"well_formed": float(formed)}


@functools.partial(jax.jit, static_argnames="config")
def reward(
  outcomes: outcomes_lib.Outcomes, *, config: config_methods.IkeaConfig
) -> dict[str, chex.Array]:
  """The knowledge-boundary reward.

      malformed       bad_format
      right           right + kb[searches]
      wrong or none   searched_wrong after a search, else 0

  Args:
    outcomes: of groups; with `measures` of `measure`.
    config: the constants.

  Returns:
    `em`, `well_formed`, `kb` (what a right answer of this form gained) and
    `total`.
  """
  formed = outcomes.measures["well_formed"] != 0
  right = formed & (outcomes.em != 0)
  searches = jnp.where(outcomes.valid, outcomes.searches, 0)
  gains = jnp.array(config.kb, float)
  gain = gains[jnp.clip(searches, 0, len(config.kb) - 1)]
  wrong = config.searched_wrong * (searches > 0)
  scored = jnp.where(right, config.right + gain, wrong)
  return outcomes_lib.parts(
    outcomes.valid,
    em=outcomes.em,
    well_formed=formed,
    kb=jnp.where(right, gain, 0),
    total=jnp.where(formed, scored, config.bad_format),
  )


def _acts(turn: str) -> bool:
  """Whether a turn asks for something that its environment can do."""
  match protocol.last_action(turn):
    case protocol.Action(protocol.ActionKind.SEARCH, query):
      return bool(query)
    case action:
      return action is not None
