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

import jax.numpy as jnp

from anysearch_jax import types
from anysearch_jax.algorithms import method
from anysearch_jax.config import methods as constants
from anysearch_jax.environment import prompts, scoring, spec, wording


def environment(texts: Mapping[str, str]) -> spec.Environment:
  """Returns the environment of a prompt, an `over_budget` and a `no_action`."""
  named = (wording.template(texts[name]) for name in wording.ONE_PROMPT)
  prompt, over_budget, no_action = named
  return spec.Environment(prompt, prompt, over_budget, no_action)


def wordings(
  name: str,
  slots: Mapping[str, wording.Slots] = {},
  *,
  folder: pathlib.Path = wording.SHIPPED,
  **changes: Any,
) -> dict[str, wording.Wording]:
  """Returns the texts of a system that is played like Search-R1.

  Args:
    name: of its environment and of its file of texts.
    slots: of the texts that Search-R1's file lacks.
    folder: where the file of texts is.
    **changes: attributes of its environment.
  """
  slots = {**wording.ONE_PROMPT, **slots}
  own = wording.Wording(f"{name}.toml", slots, environment, folder)
  return {
    name: own.then(lambda env: dataclasses.replace(env, **changes)),
    "search_r1_world": prompts.WORLD,
  }


WORDINGS = wordings("search_r1")


def measure(trajectory: types.Trajectory) -> dict[str, float]:
  """Returns `gold_found`: 1 if a shown passage holds a gold answer, else 0."""
  answers = trajectory.question.golden_answers
  found = any(
    scoring.contains(passage.contents, answers)
    for shown in trajectory.observations
    for passage in shown.passages
  )
  return {"gold_found": float(found)}


@method.jitted
def reward(o: method.Outcomes, c: constants.SearchR1Config) -> method.Terms:
  """Returns exact match or, with `c.format_variant`, this table.

                      right           wrong                     no answer
      well formed     1               structure (+ retrieval)   the same
      malformed       1 - structure   final                     0

  `retrieval` is added if `gold_found` is 1.
  """
  em = o.em
  if not c.format_variant:
    return {"em": em, "total": em}
  format_, found = o.format, o.measures["gold_found"]
  right = 1 - c.structure * (1 - format_)
  formed = c.structure + c.retrieval * found
  malformed = c.final * o.answered
  wrong = jnp.where(format_ != 0, formed, malformed)
  return {
    "em": em,
    "format": format_,
    "gold_found": found,
    "total": jnp.where(em != 0, right, wrong),
  }


METHOD = method.compared(
  "search_r1", "Search-R1", WORDINGS, reward, ("gold_found",), measure
)
