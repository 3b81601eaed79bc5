"""The events that an agent tells while it answers a question, and its reply."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any

from anysearch_jax import budgets, types
from anysearch_jax.environment import citations, protocol

# A block of these names is an action; the text before it is reasoning.
_ACTION = re.compile("<search>|<answer>")
_TAGS = protocol.tags()
# Tokenizers decode the first bytes of an unfinished character to this one.
_UNFINISHED = "\ufffd"


@dataclasses.dataclass(frozen=True)
class Thinking:
  """A piece of the policy's reasoning, in order, without tags."""

  text: str


@dataclasses.dataclass(frozen=True)
class Drafting:
  """A piece of a text, in order, that may become the answer.

  It does not if a search or another turn follows.
  """

  text: str


@dataclasses.dataclass(frozen=True)
class Searching:
  """The policy begins a search; `number` counts from 1."""

  number: int
  query: str


@dataclasses.dataclass(frozen=True)
class Found:
  """The passages that a search showed to the policy.

  Attributes:
    number: of the search, from 1.
    passages: best first.
    numbers: the passages' numbers for citations; empty if the environment has
      no citations.
  """

  number: int
  passages: tuple[types.Passage, ...]
  numbers: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Budget:
  """The searches charged so far, and the searches allowed."""

  used: int
  total: int

  @property
  def left(self) -> int:
    """The number of searches that remain."""
    return self.total - self.used


@dataclasses.dataclass(frozen=True)
class Reply:
  """The result of a question.

  Attributes:
    answer: the policy's answer; None if it gave none. In an environment with
      citations, it has a mark `[2]` for each citation.
    outcome: how the episode ended.
    reason: why there is no answer; "" if there is one.
    searches: number of searches charged, at most the budget.
    documents: for each search, the passages that it showed, best first.
    tokens: number of tokens that the policy wrote.
    seconds: from the question's arrival to the reply, time in the agent's queue
      included.
    trajectory: the whole episode.
    citations: number and passage of each citation, in the order of the marks.
    refused_citations: cited numbers that no search had shown; their marks are
      removed from `answer`.
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
    """Returns the reply as JSON values, without the answer and the episode.

    `caps` and `refused_citations` are omitted if they are empty, and `budget`
    is null without a cap on searches.
    """
    budget = self.trajectory.budget
    values: dict[str, Any] = {
      "budget": budget if budget < budgets.UNCAPPED else None
    }
    if caps := dict(self.trajectory.caps.caps):
      values["caps"] = caps
    values |= {
      "searches": self.searches,
      "outcome": str(self.outcome),
      "reason": self.reason,
      "seconds": round(self.seconds, 3),
      "documents": list(map(citations.passage_values, self.documents)),
    }
    if self.refused_citations:
      values["refused_citations"] = list(self.refused_citations)
    return values


@dataclasses.dataclass(frozen=True)
class Answer:
  """The last event of every question, with the reply."""

  reply: Reply

  @property
  def text(self) -> str | None:
    """The policy's answer; None if it gave none."""
    return self.reply.answer


Event = Thinking | Drafting | Searching | Found | Budget | Answer


class Reasoning:
  """Collects the tokens of one turn and tells its new reasoning.

  The tokens of a call are decoded together with those of the previous call, not
  with the whole turn, so the time is linear in the turn's length.

  Args:
    decode: returns the text of token ids.
    tell: called with each new piece of reasoning, without tags.
    draft: called with each new piece of an answer; None: it is not told.
  """

  def __init__(
    self,
    decode: Callable[[Sequence[int]], str],
    tell: Callable[[str], None],
    draft: Callable[[str], None] | None = None,
  ):
    self._decode = decode
    self._tell = tell
    self._draft = draft
    # The ids that the next ones are decoded with, and their text. They are the
    # context that some tokenizers need for the space between two tokens.
    self._ids: list[int] = []
    self._context = ""
    self._partial_tag = ""  # Text that may be the beginning of a tag.
    self._told_characters = 0
    self._is_drafting = False
    self._has_ended = False

  def add(self, ids: Sequence[int]) -> None:
    """Adds sampled tokens."""
    if self._has_ended:
      return
    self._ids += ids
    text = self._decode(self._ids)
    if text.endswith(_UNFINISHED):
      return
    new_text = self._partial_tag + text[len(self._context) :]
    self._ids = list(ids)
    self._context = self._decode(ids)
    action = None if self._is_drafting else _ACTION.search(new_text)
    end = action.start() if action else len(new_text) - _partial_tag(new_text)
    self._partial_tag = new_text[end:]
    piece = protocol.TAG_PATTERN.sub("", new_text[:end])
    if self._is_drafting:
      self._tell_draft(piece)
    else:
      self._tell_piece(piece if self._told_characters else piece.lstrip())
    if action is not None:
      self._partial_tag = new_text[action.end() :]
      self._is_drafting = action[0] == "<answer>"
      self._has_ended = not self._is_drafting or self._draft is None

  def end(self, text: str) -> None:
    """Tells the rest of the reasoning of a finished turn."""
    self._tell_piece(of_turn(text)[self._told_characters :])

  def _tell_draft(self, piece: str) -> None:
    if piece and self._draft is not None:
      self._draft(piece)

  def _tell_piece(self, piece: str) -> None:
    if piece:
      self._told_characters += len(piece)
      self._tell(piece)


def of_turn(text: str) -> str:
  """Returns the text of a turn up to its first action, without tags.

  If `text` grows, the result only grows too, unless `text` ends within a tag.
  """
  reasoning, *_ = _ACTION.split(text, maxsplit=1)
  return protocol.TAG_PATTERN.sub("", reasoning).lstrip()


def _partial_tag(text: str) -> int:
  """Returns the length of the end of `text` that may be an unfinished tag."""
  start = text.rfind("<")
  if start < 0:
    return 0
  end = text[start:]
  return len(end) if any(tag.startswith(end) for tag in _TAGS) else 0
