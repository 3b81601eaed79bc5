"""BATS, inference only: a budget tracker that gives advice.

After each observation the policy reads how many searches it has used, how many
remain, and advice. The advice depends on the remaining share of the budget, in
the four regimes of the paper's appendix: high from 70 %, medium from 30 %, low
from 10 %, critical below. Two options: the policy keeps a plan, and the policy
verifies its own answer while searches remain.

Deviations from the paper:
- There is one tool; the paper also has a browser.
- Calls are written in this project's tags, not in JSON.
- If a verification rejects the answer, the policy continues in the same
  context; the paper starts a new one from a summary.
- The policy gives one answer; in the paper a judge chooses among several.
- A turn follows the last search; the paper's agent stops there.
"""
# ruff: noqa: E501 - prompts are not wrapped: they are sent exactly as written.

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

from anysearch_jax import types
from anysearch_jax.environment import prompts, scoring, spec
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
  """Returns the regime for the remaining share of the budget."""
  share = (budget - used) / budget if budget else 0.0
  return next(name for least, name in REGIMES if share >= least)


def track(budget: int, used: int) -> str:
  """Returns the budget block that follows an observation."""
  name = regime(budget, used)
  return (
    f"<budget>Query Budget Used: {used}, Query Budget Remaining: "
    f"{budget - used}. {name}: {_ADVICE[name]}</budget>\n"
  )


def accepted(text: str) -> bool:
  """Whether a verification accepts the answer; without a decision it does."""
  # A pattern and not a JSON parser: policies write malformed JSON, and JSON
  # that is nested too deeply to parse.
  return _DECISION.findall(text)[-1:] in ([], ["SUCCESS"])


def answer(spans: Sequence[types.Span]) -> str | None:
  """Returns the model's last answer, ignoring its verification turns."""
  given, asked = [], False
  for span in spans:
    if span.author != types.Author.MODEL:
      asked |= span.text == _ASK
    elif asked:
      asked = False
    else:
      given.append(span)
  return scoring.extract_answer(given)


def _bats(plan: str, verifies: bool) -> spec.Environment:
  prompt = _PROMPT.replace("%s", plan)
  return spec.Environment(
    scaffold=prompt,
    plain=prompt,
    over_budget="\nNo search is left. Answer with what is known.\n",
    no_action=prompts.PROMPTS["paper"].no_action,
    answer=answer,
    format=None,
    after_search=track,
    verification=(
      spec.Verification(_ASK, accepted, _GO_ON) if verifies else None
    ),
  )


ENVIRONMENTS = {
  "bats": _bats("", verifies=False),
  "bats_plan": _bats(_PLAN, verifies=False),
  "bats_verify": _bats("", verifies=True),
  "bats_plan_verify": _bats(_PLAN, verifies=True),
  # Without advice: the world's vocabulary has no words for it.
  "bats_world": dataclasses.replace(
    prompts.PROMPTS["world"],
    format=None,
    after_search=prompts.PROMPTS["world"].before_turn,
  ),
}

METHOD = method.Method("bats", "BATS", environments=ENVIRONMENTS)
