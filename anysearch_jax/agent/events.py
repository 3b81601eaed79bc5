"""What an agent tells while it works on a question, and its reply."""

from __future__ import annotations

import dataclasses

from anysearch_jax import types


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
  """The passages that a search found, best first."""

  number: int
  passages: tuple[types.Passage, ...]


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
    answer: the policy's answer; None if it gave none, and `reason` says why.
    outcome: how the episode ended.
    reason: "" for an answer.
    searches: number of searches charged, at most the budget.
    documents: the passages that each search showed, best first.
    tokens: number of tokens that the policy wrote.
    seconds: from the question's arrival to its end; the time in the agent's
      queue is included.
    trajectory: the whole episode.
  """

  answer: str | None
  outcome: types.Outcome
  reason: str
  searches: int
  documents: tuple[tuple[types.Passage, ...], ...]
  tokens: int
  seconds: float
  trajectory: types.Trajectory


@dataclasses.dataclass(frozen=True)
class Answer:
  """The last event of every question, with the reply."""

  reply: Reply

  @property
  def text(self) -> str | None:
    return self.reply.answer


Event = Thinking | Searching | Found | Budget | Answer
