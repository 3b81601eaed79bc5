"""BATS, inference only: a budget tracker, and advice by what is left.

After each observation the policy reads how many searches it has used and has
left, and what to make of that. The four regimes are those of the paper's
appendix, by the share that is left: high from 70 %, medium from 30 %, low from
10 %, critical below. Optional are a plan that the policy keeps, and its own
verification of its answer while searches are left.

Deviations: one tool (the paper has a browser too); the paper's JSON calls are
this project's tags; after a verification that does not accept the answer the
policy goes on in the same context, where the paper starts a new one from a
summary; one answer is given, where the paper has a judge choose among several;
a turn follows the last search, where the paper's agent stops.
"""
# ruff: noqa: E501 - prompts stand as they are sent.

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

from anysearch_jax import types
from anysearch_jax.environment import environment, prompts, scoring
from anysearch_jax.methods import method

_PROMPT = """\
You are a research assistant who answers a question by reasoning and search, within a budget of tool calls. You have {B} searches.

Reason inside <think> and </think> before every action. To search, write <search> query </search>; what is found comes back between <information> and </information>, followed by a <budget> block that says how many searches are used and left. Let the budget guide you:
- HIGH (70 % or more left): explore; several different queries are affordable.
- MEDIUM (30 % to 70 %): be precise; search for what decides the question.
- LOW (10 % to 30 %): one search at most, and only if the answer depends on it.
- CRITICAL (less than 10 %): do not use a tool that is used up; answer with what you know.
%sWhen you know enough, write the final answer: <answer> Beijing </answer>

Question: {Question}
"""
_PLAN = """\
Keep a plan inside <think>: split the question into what narrows the search down (exploration) and what an answer must satisfy (verification), as a checklist with [ ] open, [x] done, [!] failed and [~] partly done, each with the number of the query that it rests on. Bring it up to date after every observation.
"""
REGIMES = ((0.7, "HIGH"), (0.3, "MEDIUM"), (0.1, "LOW"), (0.0, "CRITICAL"))
_ADVICE = {
  "HIGH": "Explore with different queries.",
  "MEDIUM": "Search for what decides the question.",
  "LOW": "Search once more only if the answer depends on it.",
  "CRITICAL": "Do not search any more; answer with what is known.",
}
_ASK = (
  "\nVerify the answer against every condition of the question. Reply with "
  'JSON only: {"verification": ..., "decision": "SUCCESS", "CONTINUE" or '
  '"PIVOT", "justification": ..., "trajectory_summary": ...}.\n'
)
_GO_ON = (
  "\nThe answer does not stand yet. Go on from what is known, with another "
  "approach if the last one failed.\n"
)
_DECISION = re.compile(r'"decision"\s*:\s*"(SUCCESS|CONTINUE|PIVOT)"')


def regime(budget: int, used: int) -> str:
  """Of the four, by the share of the budget that is left."""
  share = (budget - used) / budget if budget else 0.0
  return next(name for least, name in REGIMES if share >= least)


def track(budget: int, used: int) -> str:
  """The budget block that follows an observation."""
  name = regime(budget, used)
  return (
    f"<budget>Query Budget Used: {used}, Query Budget Remaining: "
    f"{budget - used}. {name}: {_ADVICE[name]}</budget>\n"
  )


def accepted(text: str) -> bool:
  """Whether a verification lets the answer stand; one that says nothing does."""
  # Not parsed: a policy writes JSON that is none, or too deep to read.
  return _DECISION.findall(text)[-1:] in ([], ["SUCCESS"])


def answer(spans: Sequence[types.Span]) -> str | None:
  """The last answer that the model gave; a verification gives none."""
  given, asked = [], False
  for span in spans:
    if span.author != types.Author.MODEL:
      asked |= span.text == _ASK
    elif asked:
      asked = False
    else:
      given.append(span)
  return scoring.extract_answer(given)


def _bats(plan: str, verifies: bool) -> environment.Environment:
  prompt = _PROMPT.replace("%s", plan)
  return environment.Environment(
    scaffold=prompt,
    plain=prompt,
    over_budget="\nNo search is left. Answer with what is known.\n",
    no_action=prompts.PROMPTS["paper"].no_action,
    answer=answer,
    format=None,
    after_search=track,
    verification=(
      environment.Verification(_ASK, accepted, _GO_ON) if verifies else None
    ),
  )


ENVIRONMENTS = {
  "bats": _bats("", verifies=False),
  "bats_plan": _bats(_PLAN, verifies=False),
  "bats_verify": _bats("", verifies=True),
  "bats_plan_verify": _bats(_PLAN, verifies=True),
  # Without advice: the world's policy has no words for it.
  "bats_world": dataclasses.replace(
    prompts.PROMPTS["world"],
    format=None,
    after_search=prompts.PROMPTS["world"].before_turn,
  ),
}

METHOD = method.Method("bats", "BATS", environments=ENVIRONMENTS)
