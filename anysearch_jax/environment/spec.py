"""The environment of a policy, as a value.

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

# Maps an episode (`rollout.episode_state`) and the answer to its request, or
# None if its time is over, to the next state of the episode. If the step
# changes the address, later turns are sampled apart from earlier ones, and the
# caller releases the old address.
Step = Callable[[Any, Any], Any]


@dataclasses.dataclass(frozen=True)
class Environment:
  """The texts around an episode, and the rules that read the policy's texts.

  Functions of (budget, used) take the numbers of searches assigned and charged.

  Attributes:
    scaffold: prompt while the scaffold is on (the paper's Phase I).
    plain: prompt without the scaffold. Both prompts contain `{B}` and
      `{Question}`, which are replaced by the budget and the question.
    over_budget: line that answers a search beyond the budget.
    no_action: line that answers a turn without a well-formed action.
    system: content of the system message; "": the chat template's own, if any.
    prefill: beginning of the response, which the policy continues.
    chat: whether the chat template is applied to the prompt.
    repeated: line that answers a repeated query without a charge; "": a
      repeated query is searched and charged again.
    stops: texts that end a turn.
    action: returns the action of a turn from its text; None without an action.
    answer: returns the answer of a response from its spans; None without one.
    format: returns whether a response is well formed, with the signature of
      `scoring.check_format`; None if responses do not follow the paper's
      grammar.
    tools: the tools that the policy may call; one is named `search`.
    before_turn: returns the text before every turn while the scaffold is on.
    after_search: returns the text after an observation, with or without the
      scaffold.
    markers: texts with a meaning in this environment, besides `protocol.TAGS`.
      They are neutralised in questions and passages.
    turns_are_budget: a turn without a search or an answer consumes one search,
      so an episode has at most budget + 1 turns.
    ends_itself: a turn without an action ends the episode as invalid, unless a
      token limit ended the turn.
    step: advances episodes instead of `rollout.episode.step`, which it may
      call; its own state is in their `memory`. None: `rollout.episode.step`.
    keeps_room: whether a cap on tokens reserves room for the answer; False if
      `step` refuses searches in time.
    units: file of the texts that state caps besides searches, see `units`: the
      name of a shipped file, or a path.
    states_caps: whether the policy is told about those caps.
    marked: returns the answer with its citations, which `answer` leaves out;
      None if the environment has no citations.
    closed: prompt of an episode with a budget of 0 searches; "": the prompts
      above.
    last: prompt with `{Question}` and `{Passages}` that asks for an answer in a
      conversation of its own: once more after an episode without one, see
      `rollout.last_answer`, or in each episode, see `rollout.short_prompts`.
    more: prompt with the same placeholders that asks for one more query, see
      `rollout.short_prompts`; "": none is asked for.
    begin: changes an episode at its start, before the model is asked.
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
  last: str = ""
  more: str = ""
  begin: Callable[[Any], Any] | None = None

  def __post_init__(self):
    """Raises ValueError if a tool's call would not end its turn."""
    names = [tool.name for tool in self.tools]
    if protocol.SEARCH not in names or len({*names}) != len(names):
      raise ValueError(
        f"Environment.tools: found {', '.join(names) or 'none'}; expected "
        f"{protocol.SEARCH!r} and other names, each once."
      )
    for tool in self.tools:
      if tool.closes not in self.stops:
        raise ValueError(
          f"Environment.stops: found {self.stops}; expected {tool.closes!r} "
          f"too, which ends a call of {tool.name!r}."
        )

  def tool(self, name: str) -> tools_lib.Tool:
    """Returns a tool by its name.

    Raises:
      ValueError: the environment has no such tool.
    """
    for tool in self.tools:
      if tool.name == name:
        return tool
    raise ValueError(
      f"Environment.tools: found no tool {name!r}; expected one of "
      f"{', '.join(tool.name for tool in self.tools)}."
    )

  def with_tools(self, *new_tools: tools_lib.Tool) -> Environment:
    """Returns this environment with more tools.

    Turns end at the marks of all tools and at `</answer>`, and `action` reads
    the calls of all tools. The caller changes the prompt and `format`.

    Args:
      *new_tools: the tools, with names that this environment does not have.

    Raises:
      ValueError: a name occurs twice.
    """
    tools = (*self.tools, *new_tools)
    return dataclasses.replace(
      self,
      tools=tools,
      stops=(*(tool.closes for tool in tools), "</answer>"),
      action=tools_lib.action(tools),
    )

  @property
  def cites(self) -> bool:
    """Whether passages are numbered and answers cite them as `[2]`."""
    return self.marked is not None

  def cited(self, trajectory: types.Trajectory) -> citations.Cited:
    """Returns the answer of a trajectory, with the citations of shown passages.

    Args:
      trajectory: an episode of this environment.
    """
    if self.marked is None:
      return citations.Cited(self.answer(trajectory.spans))
    passages = citations.citable_passages(trajectory.observations)
    return citations.read_marks(self.marked(trajectory.spans), passages)

  @property
  def all_markers(self) -> tuple[str, ...]:
    """The markers of the environment and of its tools."""
    markers = [*self.markers]
    for tool in self.tools:
      markers += tool.markers
    return tuple(dict.fromkeys(markers))

  def prices(self, prices: budgets.Prices) -> budgets.Prices:
    """Returns prices with those of this environment's tools.

    Args:
      prices: the prices of a budget. Its price of a tool replaces `Tool.price`;
        without either, a call costs as much as a search.
    """
    tool_prices = {tool.name: tool.price for tool in self.tools}
    for name, price in prices.tools:
      if name in tool_prices:
        tool_prices[name] = price
    return dataclasses.replace(
      prices,
      tools=tuple(
        (name, price)
        for name, price in tool_prices.items()
        if price is not None
      ),
    )

  def judge(self, trajectory: types.Trajectory) -> scoring.Verdict:
    """Judges a trajectory that was played in this environment.

    Under caps besides searches, the environment may interrupt the policy and
    ask for its answer. That must not lower the format score, so the line that
    asks and the interrupted turn are left out. A refused search still lowers
    it. A prefill is read as the beginning of the response, and a `<think>` that
    a chat template opens as that of the first turn.

    Args:
      trajectory: the episode, with the accepted answers in its question.

    Returns:
      The answer, exact match and format, before reward weights.
    """
    spans = trajectory.spans
    if trajectory.caps.units:
      spans = self._without_asking(spans, trajectory.scaffold)
    if self.prefill:
      spans = (types.Span(types.Author.MODEL, self.prefill), *spans)
    golden_answers = trajectory.question.golden_answers
    verdict = scoring.judge(
      spans,
      golden_answers=golden_answers,
      budget=trajectory.budget,
      searches=trajectory.searches,
      scaffold=trajectory.scaffold,
      read=self.answer,
      check=self.format,
    )
    answer = trajectory.reported_answer
    if answer is None:
      return verdict
    em = scoring.exact_match(answer, golden_answers)
    return dataclasses.replace(verdict, answer=answer, em=em)

  def _without_asking(
    self, spans: Sequence[types.Span], scaffold: bool
  ) -> tuple[types.Span, ...]:
    """Returns spans without requests for the answer and interrupted turns."""
    line = types.Span(types.Author.ENVIRONMENT, self.over_budget)
    remaining: list[types.Span] = []
    for span in protocol.with_opened_reasoning(spans):
      if span != line:
        remaining.append(span)
      elif remaining and remaining[-1].author is types.Author.MODEL:
        # A turn with an action is a refused search, which remains.
        if self.action(remaining[-1].text) is None:
          # With the turn's budget block; the answer's turn has another.
          del remaining[-2 if scaffold else -1 :]
    return tuple(remaining)
