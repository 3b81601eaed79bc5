"""Fields of a turn's request, which OpenAI's two APIs share here.

A program names any model, which the training plays. It may ask for tools, stop
texts and a limit on tokens. A training cannot force tokens or a format.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeVar

import orjson
import pydantic

from anysearch_jax.host import openai_requests
from anysearch_jax.sessions import turns

R = TypeVar("R", bound=pydantic.BaseModel)
_NO_PARAMETERS = {"type": "object", "properties": {}}


def _choice(choice: Any) -> Any:
  if choice not in ("auto", "none"):
    raise ValueError(
      "'auto' or 'none': a training cannot force the model to call a tool"
    )
  return choice


def unserved(expected: str) -> pydantic.BeforeValidator:
  """Returns the validator of a field that is refused with a reason."""

  def refuse(_: Any) -> None:
    raise ValueError(expected)

  return pydantic.BeforeValidator(refuse)


class Function(pydantic.BaseModel):
  """A tool of the program."""

  type: Literal["function"] = "function"
  name: Annotated[str, pydantic.Field(pattern=r"^[A-Za-z0-9_.-]{1,128}$")]
  description: str | None = None
  # JsonValue refuses deep nesting, at which writers of JSON would fail.
  parameters: dict[str, pydantic.JsonValue] | None = None

  def tool(self) -> dict[str, Any]:
    """Returns the tool as chat templates take it."""
    return {
      "name": self.name,
      "description": self.description or "",
      "parameters": self.parameters or _NO_PARAMETERS,
    }


_Penalty = Annotated[float, pydantic.Field(ge=-2, le=2)]


class Request(openai_requests.Request):
  """The fields that both APIs have."""

  harmless = openai_requests.HARMLESS | {"seed"}

  tool_choice: Annotated[
    Literal["auto", "none"], pydantic.BeforeValidator(_choice)
  ] = "auto"
  presence_penalty: _Penalty | None = None
  frequency_penalty: _Penalty | None = None

  def turn(self) -> turns.TurnRequest:
    """Returns the turn that the request asks for."""
    sampling = {
      "temperature": self.temperature,
      "top_p": self.top_p,
      "presence_penalty": self.presence_penalty,
      "frequency_penalty": self.frequency_penalty,
    }
    limits = [limit for limit in self.token_limits() if limit is not None]
    is_offered = self.tool_choice == "auto"
    return turns.TurnRequest(
      messages=tuple(self.turn_messages()),
      tools=tuple(f.tool() for f in self.functions() if is_offered),
      max_tokens=min(limits, default=None),
      stop=tuple(self.stop),
      model=self.model or "",
      sampling={k: v for k, v in sampling.items() if v is not None},
    )

  @abc.abstractmethod
  def turn_messages(self) -> Sequence[turns.Message]:
    """Returns the conversation so far."""

  @abc.abstractmethod
  def functions(self) -> Sequence[Function]:
    """Returns the tools of the program."""


def read(api: type[R], body: bytes) -> R:
  """Reads the JSON of a request.

  Raises:
    openai_requests.RequestError: a field cannot be honoured.
  """
  try:
    # Refuses what pydantic's reader takes: NaN, and any depth.
    values = orjson.loads(body)
  except orjson.JSONDecodeError as error:
    raise openai_requests.no_object(str(error)) from error
  try:
    return api.model_validate(values)
  except pydantic.ValidationError as error:
    raise openai_requests.refusal(error) from error


def role_of(role: str) -> str:
  """Returns a turn's role for one of the APIs'."""
  return "system" if role == "developer" else role
