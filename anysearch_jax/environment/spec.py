"""The environment of a policy, as a value: text in, text out.

The compared systems' environments differ in prompts, tags and turn rules;
`rollout/episode` plays all of them. The defaults are those of the paper
(section "Method", appendix "Prompt Design").
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from anysearch_jax import budgets, types
from anysearch_jax.environment import citations, protocol, scoring
from anysearch_jax.environment import tools as tools_lib

# Maps an episode (`rollout.episode_state`) and the event that answers its
# request, or None if its time is over, to the next episode. A new address asks
# for turns that are sampled apart; the caller then releases the old one.
Step = Callable[[Any, Any], Any]


@dataclasses.dataclass(frozen=True)
class Environment:
  """The texts around an episode, and how the policy's texts are read.

  Functions of (budget, used) take the numbers of searches assigned and charged.

  Attributes:
    scaffold: prompt while the scaffold is on (the paper's Phase I).
    plain: prompt without the scaffold. Both prompts contain `{B}` and
      `{Question}`, which are replaced by the budget and the question.
    system: content of the system message; "": the chat template's own, if any.
    prefill: beginning of the response, which the policy continues.
    chat: whether the chat template is applied to the prompt.
    over_budget: line that answers a search beyond the budget.
    no_action: line that answers a turn without a well-formed action.
    repeated: line that answers a repeated query without a charge; "": a
      repeated query is searched and charged again.
    stops: texts that end a turn.
    action: returns the action of a turn from its text; None without an action.
    answer: returns the answer of a response from its spans; None without one.
    format: returns whether a response is well formed, with the signature of
      `scoring.check_format`; None if responses do not follow the paper's
      grammar.
    tools: the tools that the policy may call, `search` among them.
    before_turn: returns the text before every turn while the scaffold is on.
    after_search: returns the text after an observation, with or without the
      scaffold.
    markers: texts with a meaning in this environment, besides `protocol.TAGS`.
      They are neutralised in questions and passages.
    turns_are_budget: a turn without a search or an answer consumes one search,
      so an episode has at most budget + 1 turns.
    ends_itself: a turn without an action ends the episode as invalid, unless a
      token limit ended the turn.
    step: advances its episodes in place of `rollout.episode.step`, which it may
      call, and keeps what it needs in their `memory`; None: as any other.
    keeps_room: whether a cap on tokens keeps room for the answer; False if
      `step` refuses searches in time.
    units: file of the texts that state a budget in units besides searches: the
      name of a shipped one or a path, see `units`.
    states_caps: whether those units are stated at all.
    marked: returns the answer with its citations, which `answer` leaves out;
      None if answers cite nothing.
    closed: prompt of an episode with a budget of 0 searches; "": as any other.
  """

  scaffold: str
  plain: str
  over_budget: str
  no_action: str
  system: str = ""
  prefill: str = ""
  chat: bool = True
  repeated: str = ""
  stops: tuple[str, ...] = protocol.STOPS
  action: Callable[[str], protocol.Action | None] = protocol.last_action
  answer: Callable[[Sequence[types.Span]], str | None] = protocol.extract_answer
  format: Callable[..., int] | None = scoring.check_format
  tools: tuple[tools_lib.Tool, ...] = (tools_lib.SEARCH,)
  before_turn: Callable[[int, int], str] = protocol.budget_line
  after_search: Callable[[int, int], str] = lambda budget, used: ""
  markers: tuple[str, ...] = ()
  turns_are_budget: bool = False
  ends_itself: bool = False
  step: Step | None = None
  keeps_room: bool = True
  units: str = "budget.toml"
  states_caps: bool = True
  marked: Callable[[Sequence[types.Span]], str | None] | None = None
  closed: str = ""

  def __post_init__(self):
    """Raises ValueError if a tool's call would not end its turn."""
    names = [each.name for each in self.tools]
    if protocol.SEARCH not in names or len({*names}) != len(names):
      raise ValueError(
        f"Environment.tools: found {', '.join(names) or 'none'}; expected "
        f"{protocol.SEARCH!r} and other names, each once."
      )
    for each in self.tools:
      if each.closes not in self.stops:
        raise ValueError(
          f"Environment.stops: found {self.stops}; expected {each.closes!r} "
          f"too, which ends a call of {each.name!r}."
        )

  def tool(self, name: str) -> tools_lib.Tool:
    """Returns a tool by its name; raises ValueError if it is missing."""
    for each in self.tools:
      if each.name == name:
        return each
    raise ValueError(
      f"Environment.tools: found no tool {name!r}; expected one of "
      f"{', '.join(each.name for each in self.tools)}."
    )

  def with_tools(self, *more: tools_lib.Tool) -> Environment:
    """Returns this environment with more tools, and their calls read.

    Turns end at the marks of all tools and at `</answer>`. The prompt and
    `format` are the caller's to change.
    """
    held = (*self.tools, *more)
    return dataclasses.replace(
      self,
      tools=held,
      stops=(*(each.closes for each in held), "</answer>"),
      action=tools_lib.action(held),
    )

  @property
  def cites(self) -> bool:
    """Whether passages are numbered and answers cite them as `[2]`."""
    return self.marked is not None

  def cited(self, trajectory: types.Trajectory) -> citations.Cited:
    """Returns the answer of a trajectory with its sound citations."""
    if self.marked is None:
      return citations.Cited(self.answer(trajectory.spans))
    known = citations.citable_passages(trajectory.observations)
    return citations.read_marks(self.marked(trajectory.spans), known)

  @property
  def all_markers(self) -> tuple[str, ...]:
    """The markers of the environment and of its tools."""
    of_tools = (m for each in self.tools for m in each.markers)
    return tuple(dict.fromkeys((*self.markers, *of_tools)))

  def prices(self, prices: budgets.Prices) -> budgets.Prices:
    """Returns the prices with those of the tools that have their own.

    A price of a tool in `prices` replaces the tool's own.
    """
    given = dict(prices.tools)
    own = ((e.name, given.get(e.name, e.price)) for e in self.tools)
    return dataclasses.replace(
      prices,
      tools=tuple((name, price) for name, price in own if price is not None),
    )

  def judge(self, trajectory: types.Trajectory) -> scoring.Verdict:
    """Judges a trajectory that was played in this environment.

    Under caps besides searches, being asked for the answer costs no format: the
    environment's line, and the turn that it cut to ask, are then as if they
    were not there. A search that was refused still costs it. A prefill is read
    as the beginning of the response.
    """
    spans = trajectory.spans
    if trajectory.caps.units:
      spans = self._without_asking(spans, trajectory.scaffold)
    if self.prefill:
      spans = (types.Span(types.Author.MODEL, self.prefill), *spans)
    return scoring.judge(
      spans,
      golden_answers=trajectory.question.golden_answers,
      budget=trajectory.budget,
      searches=trajectory.searches,
      scaffold=trajectory.scaffold,
      read=self.answer,
      check=self.format,
    )

  def _without_asking(
    self, spans: Sequence[types.Span], scaffold: bool
  ) -> tuple[types.Span, ...]:
    """Returns spans without requests for the answer and turns cut by them."""
    line = types.Span(types.Author.ENVIRONMENT, self.over_budget)
    kept: list[types.Span] = []
    for span in spans:
      if span != line:
        kept.append(span)
      elif kept and kept[-1].author is types.Author.MODEL:
        if self.action(kept[-1].text) is None:  # Not a refused search.
          # With its budget block; the answer's turn has one of its own.
          del kept[-1 - scaffold :]
    return tuple(kept)
