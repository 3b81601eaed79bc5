"""A turn of a session: what a program asks for, and what it gets.

OpenAI's APIs (`chat_api`, `responses_api`) read requests into these values and
write replies from them. A `Session` samples the turns and keeps the budget.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Protocol

# Rewards are summed and squared in float32.
LARGEST_REWARD = 1e6


@dataclasses.dataclass(frozen=True)
class Call:
  """A call of one of the program's tools.

  Attributes:
    id: by which the program's answer names it.
    name: name of the tool.
    arguments: JSON object of the arguments, as text.
  """

  id: str
  name: str
  arguments: str


@dataclasses.dataclass(frozen=True)
class Message:
  """A message of a conversation.

  Attributes:
    role: `system`, `user`, `assistant` or `tool`.
    content: its text; "" if it has none.
    calls: the calls of an assistant's message.
    call_id: the call that a tool's message answers; "" in other messages.
    reasoning: an assistant's reasoning, if the program sends it back.
  """

  role: str
  content: str
  calls: tuple[Call, ...] = ()
  call_id: str = ""
  reasoning: str = ""


@dataclasses.dataclass(frozen=True)
class TurnRequest:
  """A request for the next message of a conversation.

  Attributes:
    messages: the whole conversation so far.
    tools: the functions that the model may call, each with `name`,
      `description` and `parameters` (a JSON schema), as chat templates take
      them.
    max_tokens: limit on the message's tokens; None: the session's.
    stop: texts that end the message; they are not part of it.
    model: name of the model in the request, repeated in the reply.
    sampling: sampling parameters of the request, such as `temperature`. A
      training samples by the run's own; what differs is counted.
  """

  messages: tuple[Message, ...]
  tools: tuple[Mapping[str, Any], ...] = ()
  max_tokens: int | None = None
  stop: tuple[str, ...] = ()
  model: str = ""
  sampling: Mapping[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class TurnReply:
  """The next message of a conversation.

  Attributes:
    message: the assistant's message.
    is_cut: whether a limit on tokens ended it.
    prompt_tokens: number of tokens of the conversation.
    written_tokens: number of tokens that the model wrote for it.
    cached_tokens: number of the prompt's tokens that earlier turns had.
  """

  message: Message
  is_cut: bool
  prompt_tokens: int
  written_tokens: int
  cached_tokens: int = 0


@dataclasses.dataclass(frozen=True)
class Report:
  """What a program reports at its end.

  Attributes:
    answer: its answer; None: the last message's.
    reward: its own reward for the episode; None: that of the run's function.
  """

  answer: str | None = None
  reward: float | None = None


class RefusedError(Exception):
  """A request that a session does not serve, in the API's own terms.

  Attributes:
    message: a sentence.
    status: HTTP status.
    kind: OpenAI's type of the error, such as `invalid_request_error`, or
      `insufficient_quota` for a budget that is spent.
    code: a word for the cause, such as `budget_exhausted`.
    param: the field of the request at fault; "" if there is none.
  """

  def __init__(
    self,
    message: str,
    *,
    status: int = 400,
    kind: str = "invalid_request_error",
    code: str = "",
    param: str = "",
  ):
    super().__init__(message)
    self.message = message
    self.status = status
    self.kind = kind
    self.code = code
    self.param = param


class Session(Protocol):
  """One episode of a program, as the endpoint sees it.

  Attributes:
    key: the secret that its requests must bear.
  """

  key: str

  def budget_headers(self) -> Mapping[str, str]:
    """Returns the assigned and the remaining budget, as HTTP headers."""

  async def turn(self, request: TurnRequest) -> TurnReply:
    """Samples the next message.

    Turns of one session run one after the other. A cancelled turn leaves the
    session as it was, but for what was spent.

    Raises:
      RefusedError: the budget is spent, the session has ended, or the request
        cannot be served.
      types.EngineError: the engine could not sample.
    """

  def report(self, report: Report) -> None:
    """Ends the session with the program's report.

    Raises:
      RefusedError: the session has ended already.
    """


class Sessions(Protocol):
  """The open sessions, by their ids."""

  def find(self, session_id: str) -> Session | None:
    """Returns an open session; None if there is none of this id."""

  def note(self, event: str, session_id: str = "") -> None:
    """Counts an event of the endpoint.

    Args:
      event: its name, such as `large_body`.
      session_id: the session whose program caused it; "" if none is known.
    """

  def intruded(self, key: str) -> None:
    """Notes that a request for another session had this key."""
