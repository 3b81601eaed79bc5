"""The environments of the paper and of the generated world.

Their texts are `methods/texts/paper.toml` and `world.toml`. `{B}` and
`{Question}` are placeholders for the budget and the question. `paper_fetch` is
the paper's environment with a second tool, which opens a page; its texts are
our own words.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Mapping

from anysearch_jax import budgets
from anysearch_jax.environment import scoring, spec, tools, units, wording

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


def _with_fetch(env: spec.Environment) -> spec.Environment:
  """Returns an environment in which pages can be opened too."""
  formed = functools.partial(scoring.check_format, calls={"fetch": "page"})
  return dataclasses.replace(env.with_tools(tools.FETCH), format=formed)


def _world(env: spec.Environment) -> spec.Environment:
  return dataclasses.replace(env, units="budget_world.toml")


WORLD = wording.Wording("world.toml", _SLOTS, _environment).then(_world)
WORDINGS = {
  "paper": wording.Wording("paper.toml", _SLOTS, _environment),
  "paper_fetch": wording.Wording(
    "paper_fetch.toml", _SLOTS, lambda texts: _with_fetch(_environment(texts))
  ),
  "world": WORLD,
}
PROMPTS = {key: each.environment() for key, each in WORDINGS.items()}

_SLOT = re.compile(r"\{(?:B|Question)\}")


def render(
  template: str,
  *,
  budget: int,
  question: str,
  caps: budgets.Budget = budgets.NO_CAPS,
  texts: str = "budget.toml",
) -> str:
  """Fills a prompt in one pass, so that a question may itself contain `{B}`.

  Args:
    template: `scaffold` or `plain` of a `spec.Environment`.
    budget: searches assigned to the episode, >= 0.
    question: the question, already neutralised.
    caps: what else the episode may spend, if that is stated.
    texts: `units` of that environment.

  Returns:
    The content of the user message. Sentences about `caps` come first.

  Raises:
    ValueError: the budget is negative.
  """
  if budget < 0:
    raise ValueError(
      f"Found a budget of {budget} searches; expected 0 or more (0 is to "
      "answer without a search)."
    )
  values = {"{B}": units.searches(texts, budget), "{Question}": question}
  filled = _SLOT.sub(lambda match: values[match[0]], template)
  return units.assigned(texts, caps) + filled
