"""IKEA: a reward for searching only where the policy lacks knowledge.

It is played in Search-R1's environment or, with `episode.prompts=ikea`, under a
prompt that asks the policy to skip searches, as IKEA's own does. The policy can
answer half of IKEA's training questions without a search; the generated world
has both kinds too.
"""

from __future__ import annotations

import dataclasses
import pathlib
import re

import jax.numpy as jnp

import anysearch_jax as aj

TEXTS = pathlib.Path(__file__).with_name("texts")
WORDINGS = {
  "search_r1": aj.search_r1.WORDINGS["search_r1"],
  **aj.search_r1.wordings("ikea", folder=TEXTS),
}

_NAMES = "(?:think|search|answer)"
# A tag with a round or square bracket on either side.
_MISWRITTEN = re.compile(rf"[(\[]/?{_NAMES}[)\]>]|</?{_NAMES}[)\]]")


@dataclasses.dataclass(frozen=True)
class Options:
  """IKEA's knowledge-boundary reward."""

  kb: tuple[float, ...] = aj.settings.learning(
    (0.6, 0.4, 0.2, 0.0), aj.settings.REWARD
  )
  """Bonus of a right answer after 0, 1, 2, ... searches; the last one also
  counts for more searches."""
  bad_format: float = aj.settings.learning(-1.0, aj.settings.REWARD)
  """Reward of a malformed response."""
  searched_wrong: float = aj.settings.learning(0.05, aj.settings.REWARD)
  """Reward of a wrong or missing answer after a search; without a search it is
  0."""
  right: float = aj.settings.learning(1.0, aj.settings.POSITIVE)
  """Reward of a right answer, to which `kb` is added."""


def measure(trajectory: aj.Trajectory) -> dict[str, float]:
  """Returns `well_formed`: 1 if the model thought and acted in tags, else 0.

  A response is malformed if it has no thought, if one of its turns neither
  searches nor answers, or if a tag has a round or square bracket. A search
  beyond the budget counts as an action.
  """
  turns = aj.scoring.turns(trajectory.spans)
  thought = any(aj.protocol.last_content(turn, "think") for turn in turns)
  empty = (None, aj.protocol.Action(aj.protocol.ActionKind.SEARCH, ""))
  formed = thought and all(
    aj.protocol.last_action(turn) not in empty and not _MISWRITTEN.search(turn)
    for turn in turns
  )
  return {"well_formed": float(formed)}


@aj.method.jitted
def reward(o: aj.Outcomes, c: Options) -> aj.method.Terms:
  """Returns the knowledge-boundary reward.

      malformed              bad_format
      right answer           right + kb[searches]
      wrong or no answer     searched_wrong after a search, else 0

  `kb[searches]` is the last entry of `kb` if there are more searches. The term
  `kb` is the bonus of a well-formed right answer, and 0 for the others.
  """
  formed = o.measures["well_formed"] != 0
  right = formed & (o.em != 0)
  searches = jnp.where(o.valid, o.searches, 0)
  gains = jnp.array(c.kb, float)
  gain = gains[jnp.clip(searches, 0, len(c.kb) - 1)]
  wrong = c.searched_wrong * (searches > 0)
  scored = jnp.where(right, c.right + gain, wrong)
  return {
    "well_formed": formed,
    "kb": jnp.where(right, gain, 0),
    "total": jnp.where(formed, scored, c.bad_format),
  }


METHOD = aj.method.compared(
  "ikea",
  "IKEA",
  WORDINGS,
  reward,
  measures=("well_formed",),
  measure=measure,
  options=Options(),
)
