"""The environments of the paper and of the generated world.

Their texts are `methods/texts/paper.toml` and `world.toml`. `{B}` and
`{Question}` are placeholders for the budget and the question. `paper_fetch` is
the paper's environment with a second tool, which opens a page, `anysearch` with
the turn rules of the authors' run. `documents` is
for a user's own documents and models that were not trained here: answers cite
passages. `documents_tools` is the same for models that search by their own tool
calls, so it names no tag. The texts of these three are our own words.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping

from anysearch_jax.environment import (
  citations,
  protocol,
  scoring,
  spec,
  tools,
  wording,
)

_SLOTS = {
  "scaffold": wording.PROMPT,
  "plain": wording.PROMPT,
  "over_budget": wording.LINE,
  "no_action": wording.LINE,
}


def _environment(texts: Mapping[str, str]) -> spec.Environment:
  lines = (wording.template(texts[name]) for name in _SLOTS)
  scaffold, plain, over, no_action = lines
  return spec.Environment(scaffold, plain, over, no_action)


def _with_fetch(texts: Mapping[str, str]) -> spec.Environment:
  """Returns an environment in which pages can be opened too."""
  env = _environment(texts).with_tools(tools.FETCH)
  formed = functools.partial(scoring.check_format, calls={"fetch": "page"})
  return dataclasses.replace(env, format=formed)


def _documents(
  texts: Mapping[str, str],
  states: str = "<budget>{}</budget>",
  begins: str = "<information>",
  ends: str = "</information>",
) -> spec.Environment:
  """Returns an environment whose answers cite the passages.

  `states` is before a turn, on a line of its own, because chat models read it
  at the end of a message; `begins` and `ends` are around the passages.
  """
  observation = functools.partial(
    citations.observation, begins=begins, ends=ends
  )
  return dataclasses.replace(
    _environment(texts),
    tools=(dataclasses.replace(tools.SEARCH, numbered=observation),),
    before_turn=lambda budget, used: (
      f"\n{states.format(protocol.budget_state(budget, used))}\n"
    ),
    answer=lambda spans: citations.without_marks(
      protocol.extract_answer(spans)
    ),
    marked=protocol.extract_answer,
  )


def _documents_tools(texts: Mapping[str, str]) -> spec.Environment:
  """Returns the environment without tags of a model that calls tools."""
  texts = {**texts, "scaffold": texts["prompt"], "plain": texts["prompt"]}
  env = _documents(texts, "Searches: {}.", begins="", ends="")
  return dataclasses.replace(env, format=None)


WORLD = wording.Wording("world.toml", _SLOTS, _environment).then(
  lambda env: dataclasses.replace(env, units="budget_world.toml")
)
WORDINGS = {
  "paper": wording.Wording("paper.toml", _SLOTS, _environment),
  "anysearch": wording.Wording("paper.toml", _SLOTS, _environment).then(
    lambda env: dataclasses.replace(
      env,
      action=protocol.first_action,
      before_turn=lambda budget, used: protocol.budget_line(
        budget, used
      ).rstrip(),
    )
  ),
  "paper_fetch": wording.Wording("paper_fetch.toml", _SLOTS, _with_fetch),
  "documents": wording.Wording("documents.toml", _SLOTS, _documents),
  "documents_tools": wording.Wording(
    "documents_tools.toml", wording.ONE_PROMPT, _documents_tools
  ),
  "world": WORLD,
}
PROMPTS = {key: each.environment() for key, each in WORDINGS.items()}
