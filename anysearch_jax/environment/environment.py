"""What a policy's environment says and reads: text in, text out.

An environment is a value. Those of the compared systems differ in prompts,
tags and manners; `rollout/episode` plays all of them. The defaults are the
paper's own (section "Method", appendix "Prompt Design").
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from anysearch_jax import types
from anysearch_jax.environment import protocol, scoring


def _nothing(budget: int, used: int) -> str:
  return ""


@dataclasses.dataclass(frozen=True)
class Verification:
  """The policy looks at its own answer, while searches are left.

  ask: the line that asks for it after an answer.
  accepted: whether what the policy says then lets the answer stand.
  go_on: the line that has it go on where not.
  """

  ask: str
  accepted: Callable[[str], bool]
  go_on: str


@dataclasses.dataclass(frozen=True)
class Environment:
  """The texts that frame an episode, and how those of the policy are read.

  Functions of (budget, used) take searches assigned and charged.

  Attributes:
    scaffold: prompt while the scaffold is on (the paper's Phase I).
    plain: prompt without the scaffold. `{B}` and `{Question}` stand for the
      budget and the question in both.
    over_budget: the line that answers a search beyond the budget.
    no_action: the line that answers a turn without a well-formed action.
    repeated: the line that answers a query a second time, uncharged; "": it is
      a search like others.
    stops: texts that end a turn.
    action: what a turn asks for, by its text.
    answer: the answer of a response, by its spans; None without one.
    format: whether a response is well formed, called as `scoring.check_format`
      is; None where the paper's grammar is not what a response follows.
    observation: what a search shows, by its passages and the texts that are
      not to appear in them; these are `markers` and the control tokens.
    before_turn: what precedes every turn while the scaffold is on.
    after_search: what follows an observation, scaffold or not.
    markers: texts that mean something here beside `protocol.TAGS`; whatever
      comes from outside cannot hold them.
    turns_are_budget: a turn without a search or an answer uses one search up,
      and there are one more turns than searches.
    ends_itself: a turn that asks for nothing and that the policy ended is its
      last one.
    verification: None where answers stand as they are.
  """

  scaffold: str
  plain: str
  over_budget: str
  no_action: str
  repeated: str = ""
  stops: tuple[str, ...] = protocol.STOPS
  action: Callable[[str], protocol.Action | None] = protocol.last_action
  answer: Callable[[Sequence[types.Span]], str | None] = scoring.extract_answer
  format: Callable[..., int] | None = scoring.check_format
  observation: Callable[[Sequence[types.Passage], Sequence[str]], str] = (
    protocol.observation
  )
  before_turn: Callable[[int, int], str] = protocol.budget_line
  after_search: Callable[[int, int], str] = _nothing
  markers: tuple[str, ...] = ()
  turns_are_budget: bool = False
  ends_itself: bool = False
  verification: Verification | None = None

  def judge(self, trajectory: types.Trajectory) -> scoring.Verdict:
    """What a trajectory that was played here is worth, before any weight."""
    return scoring.judge(
      trajectory.spans,
      golden_answers=trajectory.question.golden_answers,
      budget=trajectory.budget,
      searches=trajectory.searches,
      scaffold=trajectory.scaffold,
      read=self.answer,
      check=self.format,
    )
