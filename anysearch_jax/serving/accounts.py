"""What a request used, for logs, metrics and its key."""

from __future__ import annotations

import contextlib
import dataclasses
import time
import uuid
from typing import Any

from anysearch_jax.agent import events
from anysearch_jax.serving import fields


class EndedError(Exception):
  """The request has ended: its client left, or another answer to it failed."""


@dataclasses.dataclass
class Account:
  """What a request used, for logs, metrics and its key.

  `tell` runs in the agent's thread, the rest in the service's.

  replies: of the questions that have ended.
  begun: questions that had a place, ended or not.
  searches: made so far, by questions that have not ended as well.
  heard: whether anything beyond the budget was told.
  status: of the response.
  ends: is closed when the request has ended.
  """

  route: str
  id: str = dataclasses.field(default_factory=lambda: f"req_{uuid.uuid4().hex}")
  key: str = ""
  asked: fields.Asked | None = None
  replies: list[events.Reply] = dataclasses.field(default_factory=list)
  begun: int = 0
  searches: int = 0
  heard: bool = False
  status: int = 200
  started: float = dataclasses.field(default_factory=time.monotonic)
  ends: contextlib.ExitStack = dataclasses.field(
    default_factory=contextlib.ExitStack
  )
  _ended: bool = False

  def tell(self, event: events.Event) -> None:
    """Counts what an event costs, before it is made.

    Raises:
      EndedError: the request has ended, and what it used was read. Nothing may
        be used after that, so the episode ends here.
    """
    match event:
      case events.Budget(used=0):
        self.begun += 1
      case events.Searching():
        self.searches += 1
      case events.Answer(reply):
        self.replies.append(reply)
    # After counting: `close` marks the end before it reads the counts.
    if self._ended:
      raise EndedError

  def close(self) -> None:
    """Ends the request; what it used is final."""
    self._ended = True
    self.ends.close()

  @property
  def tokens(self) -> int:
    return sum(reply.tokens for reply in self.replies)

  @property
  def most_tokens(self) -> int:
    """What the request can have used: all of a question that was cut short."""
    if self.asked is None:
      return 0
    replies = tuple(self.replies)
    cut = self.begun - len(replies)
    return sum(r.tokens for r in replies) + cut * self.asked.max_tokens

  def line(
    self, status: int, seconds: float, with_question: bool
  ) -> dict[str, Any]:
    """Returns the values of the request's line in the log."""
    values: dict[str, Any] = {
      "request": self.id,
      "route": self.route,
      "status": status,
      "key": self.key,
      "seconds": round(seconds, 3),
      "budget": self.asked.budget if self.asked else None,
      "searches": self.searches,
      "tokens": self.tokens,
      "outcomes": [str(reply.outcome) for reply in self.replies],
    }
    if with_question and self.asked:
      values["question"] = self.asked.question
    return values
