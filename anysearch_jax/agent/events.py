"""What an agent tells while it works on a question, and its reply."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any

from anysearch_jax import budgets, types
from anysearch_jax.environment import citations, protocol

# A block of these names is an action; what the turn says before is reasoning.
_ACTION = re.compile("<search>|<answer>")
_TAGS = protocol.tags()
# An unfinished character of several bytes decodes to this one.
_UNFINISHED = "\ufffd"


@dataclasses.dataclass(frozen=True)
class Thinking:
  """A piece of the policy's reasoning, in order, without tags."""

  text: str


@dataclasses.dataclass(frozen=True)
class Searching:
  """The policy searches; `number` counts from 1."""

  number: int
  query: str


@dataclasses.dataclass(frozen=True)
class Found:
  """The passages that a search found, best first.

  numbers: by which an answer cites them; empty if it cites nothing.
  """

  number: int
  passages: tuple[types.Passage, ...]
  numbers: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Budget:
  """The searches charged so far, of those allowed."""

  used: int
  total: int

  @property
  def left(self) -> int:
    return self.total - self.used


@dataclasses.dataclass(frozen=True)
class Reply:
  """The result of a question.

  Attributes:
    answer: the policy's answer; None if it gave none, and `reason` says why. In
      an environment that cites, it has a mark `[2]` for each citation.
    outcome: how the episode ended.
    reason: "" for an answer.
    searches: number of searches charged, at most the budget.
    documents: the passages that each search showed, best first.
    tokens: number of tokens that the policy wrote.
    seconds: from the question's arrival to its end; the time in the agent's
      queue is included.
    trajectory: the whole episode.
    citations: numbers and passages that the answer cites, as its marks come.
    refused_citations: numbers that it cited and that no search had shown; their
      marks are removed from `answer`.
  """

  answer: str | None
  outcome: types.Outcome
  reason: str
  searches: int
  documents: tuple[tuple[types.Passage, ...], ...]
  tokens: int
  seconds: float
  trajectory: types.Trajectory
  citations: tuple[tuple[int, types.Passage], ...] = ()
  refused_citations: tuple[int, ...] = ()

  def record(self) -> dict[str, Any]:
    """Returns how the question ended as JSON values, without the answer.

    `caps` and `refused_citations` are left out if there are none, and `budget`
    is null without a cap on searches.
    """
    budget, caps = self.trajectory.budget, dict(self.trajectory.caps.caps)
    refused = list(self.refused_citations)
    return {
      "budget": budget if budget < budgets.UNCAPPED else None,
      **({"caps": caps} if caps else {}),
      "searches": self.searches,
      "outcome": str(self.outcome),
      "reason": self.reason,
      "seconds": round(self.seconds, 3),
      "documents": list(map(citations.passage_values, self.documents)),
      **({"refused_citations": refused} if refused else {}),
    }


@dataclasses.dataclass(frozen=True)
class Answer:
  """The last event of every question, with the reply."""

  reply: Reply

  @property
  def text(self) -> str | None:
    return self.reply.answer


Event = Thinking | Searching | Found | Budget | Answer


class Reasoning:
  """Collects the tokens of one turn and tells its new reasoning.

  The tokens of a call are decoded together with those of the call before, not
  with the whole turn: time is linear in the turn's length.
  """

  def __init__(
    self, decode: Callable[[Sequence[int]], str], tell: Callable[[str], None]
  ):
    self._decode = decode
    self._tell = tell
    # The ids that the next ones are decoded with, and their text. They are the
    # context that some tokenizers need for the space between two tokens.
    self._ids: list[int] = []
    self._known = ""
    self._rest = ""  # May be the beginning of a tag.
    self._told = 0
    self._acted = False

  def add(self, ids: Sequence[int]) -> None:
    """Adds sampled tokens."""
    if self._acted:
      return
    self._ids += ids
    text = self._decode(self._ids)
    if text.endswith(_UNFINISHED):
      return
    rest = self._rest + text[len(self._known) :]
    self._ids, self._known = list(ids), self._decode(ids)
    action = _ACTION.search(rest)
    self._acted = action is not None
    end = action.start() if action else len(rest) - _partial_tag(rest)
    shown, self._rest = rest[:end], rest[end:]
    shown = protocol.TAG_PATTERN.sub("", shown)
    self._say(shown if self._told else shown.lstrip())

  def end(self, text: str) -> None:
    """Tells the rest of the reasoning of a finished turn."""
    self._say(of_turn(text)[self._told :])

  def _say(self, piece: str) -> None:
    if piece:
      self._told += len(piece)
      self._tell(piece)


def of_turn(text: str) -> str:
  """Returns the text of a turn up to its first action, without tags.

  An extension of `text` only extends what is returned, unless `text` ends
  within a tag.
  """
  before, *_ = _ACTION.split(text, maxsplit=1)
  return protocol.TAG_PATTERN.sub("", before).lstrip()


def _partial_tag(text: str) -> int:
  """Returns the length of the end of `text` that may be an unfinished tag."""
  start = text.rfind("<")
  if start < 0:
    return 0
  end = text[start:]
  return len(end) if any(tag.startswith(end) for tag in _TAGS) else 0
