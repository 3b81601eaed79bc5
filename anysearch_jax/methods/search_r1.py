"""Search-R1: an outcome reward, a fixed budget, GRPO or PPO.

Its tags are those of the AnySearch paper. Its texts are our own words
(`texts/search_r1.toml`); the prompt states the number of searches, because the
comparison tells every system its budget.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

from anysearch_jax import types
from anysearch_jax.algorithms import method
from anysearch_jax.config import settings
from anysearch_jax.environment import prompts, scoring, spec, wording


def environment(texts: Mapping[str, str]) -> spec.Environment:
  """Returns the environment of the texts that `wording.ONE_PROMPT` lists."""
  prompt = wording.template(texts["prompt"])
  return spec.Environment(
    scaffold=prompt,
    plain=prompt,
    over_budget=wording.template(texts["over_budget"]),
    no_action=wording.template(texts["no_action"]),
  )


def wordings(
  name: str,
  slots: Mapping[str, wording.Slots] = {},
  *,
  folder: pathlib.Path = wording.SHIPPED,
  **changes: Any,
) -> dict[str, wording.Wording]:
  """Returns the texts of a system that is played like Search-R1.

  Args:
    name: name of its environment, and of its file of texts.
    slots: placeholders of the texts that Search-R1's file does not have.
    folder: folder of the file of texts.
    **changes: attributes of its environment that differ from Search-R1's.
  """
  slots = {**wording.ONE_PROMPT, **slots}
  words = wording.Wording(f"{name}.toml", slots, environment, folder)
  return {
    name: words.then(lambda env: dataclasses.replace(env, **changes)),
    "search_r1_world": prompts.WORLD,
  }


WORDINGS = wordings("search_r1")


def measure(trajectory: types.Trajectory) -> dict[str, float]:
  """Returns `gold_found`: 1 if a search showed an accepted answer, else 0."""
  answers = trajectory.question.golden_answers
  is_found = any(
    scoring.contains(passage.contents, answers)
    for observation in trajectory.observations
    for passage in observation.passages
  )
  return {"gold_found": float(is_found)}


@dataclasses.dataclass(frozen=True)
class Options:
  """Search-R1's reward: exact match, or its variant with a format reward."""

  format_variant: bool = settings.learning(False)
  """Whether the reward includes the format; the other values count only then.
  """
  structure: float = settings.learning(0.2, settings.SHARE)
  """Reward of a well-formed response without a right answer; a right answer in
  a malformed response loses the same amount."""
  final: float = settings.learning(0.1, settings.REWARD)
  """Reward of a wrong answer in a malformed response."""
  retrieval: float = settings.learning(0.0, settings.SHARE)
  """Added to `structure` for a well-formed response without a right answer, if
  a passage that was shown contains an accepted answer."""


@method.jitted
def reward(o: method.Outcomes, c: Options) -> method.Terms:
  """Returns exact match or, with `c.format_variant`, this table.

                      right           wrong                     no answer
      well formed     1               structure (+ retrieval)   the same
      malformed       1 - structure   final                     0

  `retrieval` is added if `gold_found` is 1.
  """
  import jax.numpy as jnp

  em = o.em
  if not c.format_variant:
    return {"em": em, "total": em}
  format_ = o.format
  gold_found = o.measures["gold_found"]
  right = 1 - c.structure * (1 - format_)
  formed = c.structure + c.retrieval * gold_found
  malformed = c.final * o.answered
  wrong = jnp.where(format_ != 0, formed, malformed)
  return {
    "em": em,
    "format": format_,
    "gold_found": gold_found,
    "total": jnp.where(em != 0, right, wrong),
  }


METHOD = method.compared(
  "search_r1",
  "Search-R1",
  WORDINGS,
  reward,
  ("gold_found",),
  measure,
  options=Options(),
)
