"""Requests of OpenAI's two APIs: the fields that services share, and refusals.

A field is honoured, is known to have no effect here, or is refused by its name:
no client may believe in a setting that the service ignores.
"""

from __future__ import annotations

import abc
import re
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

import pydantic
from starlette import exceptions

_MAX_STOPS = 4  # The limit of OpenAI's API.
# More than both APIs have. pydantic collects an error for each unknown field.
_MAX_FIELDS = 200
# Fields without an effect on an answer.
HARMLESS = frozenset(
  (
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "prompt_cache_options",
    "prediction",
    "parallel_tool_calls",
    "verbosity",
    "reasoning",
    "reasoning_effort",
    "include",
  )
)
# Parts of pydantic's locations that are no field: the tags of kinds of content,
# and the kinds of a value that has several.
_PYDANTIC_NAMES = ("type", "int", "str", "parts")
# The words around the expected value in pydantic's messages.
_PYDANTIC_WORDS = re.compile(
  r"^(Input|List|String) should (be |have )?|^Value error, "
  r"| after validation, not \d+$"
)
_ABSENT: tuple[Any, ...] = (None, [], {})


class RequestError(exceptions.HTTPException):
  """A request is refused.

  Args:
    status: HTTP status.
    message: what was found, what was expected, what to do.
    param: the invalid field of the request; None if no field is at fault.
    code: a machine-readable code, such as `model_not_found`.
    retry_after: seconds after which the client may try again.
  """

  def __init__(
    self,
    status: int,
    message: str,
    *,
    param: str | None = None,
    code: str | None = None,
    retry_after: int | None = None,
  ):
    headers = {} if retry_after is None else {"retry-after": str(retry_after)}
    super().__init__(status, message, headers)
    self.param = param
    self.code = code


def refuse(
  param: str,
  value: object,
  expected: str,
  *,
  status: int = 400,
  code: str = "invalid_value",
) -> RequestError:
  """Returns the error of a field that cannot be honoured.

  Args:
    param: name of the field.
    value: its value in the request.
    expected: the values that the service accepts, as the end of a sentence.
    status: HTTP status.
    code: a machine-readable code.
  """
  excerpt = repr(value)
  excerpt = excerpt if len(excerpt) <= 80 else f"{excerpt[:80]}..."
  message = f"{param}: found {excerpt}, expected {expected}."
  return RequestError(status, message, param=param, code=code)


def refusal(error: pydantic.ValidationError) -> RequestError:
  """Returns the first error of a body, or of a tool's arguments, as a sentence.

  Args:
    error: has one error for each kind of value that a field may have.
  """
  first_error, *others = error.errors(include_url=False, include_context=False)
  path = [name for name in first_error["loc"] if name not in _PYDANTIC_NAMES]
  # For an item of a list, the list is named: the path ends before the index.
  indices = [i for i, name in enumerate(path) if isinstance(name, int)]
  param = ".".join(map(str, path[: indices[0] if indices else None]))
  if not param:
    return no_object(first_error["msg"])
  if first_error["type"] == "missing":
    field = first_error["loc"][-1]
    missing = "nothing" if field == param else f"no {field!r}"
    return RequestError(
      400, f"{param}: found {missing}, expected a value.", param=param
    )
  if first_error["type"] == "extra_forbidden":
    return refuse(
      param,
      first_error["input"],
      "no such field: this service does not know or offer it, and stores "
      "nothing between requests",
      code="unsupported_parameter",
    )
  messages = [first_error["msg"]]
  for other in others:
    if other["loc"][:-1] == first_error["loc"][:-1] != ():
      messages.append(other["msg"])
  expected = [_PYDANTIC_WORDS.sub("", message) for message in messages]
  return refuse(param, first_error["input"], " or ".join(expected))


def no_object(cause: str) -> RequestError:
  """Returns the error of a body that is no JSON object."""
  return RequestError(
    400, f"Found a body that is no JSON object ({cause}), expected one."
  )


def _kind_of_content(content: Any) -> str:
  return "str" if isinstance(content, str) else "parts"


def _stops(texts: Any) -> Any:
  """Returns a single text as a list of one."""
  return [texts] if isinstance(texts, str) else texts


def _is_off(flag: bool) -> bool:
  if flag:
    raise ValueError("false; this service has no other")
  return flag


class Part(pydantic.BaseModel):
  """A part of a content: a text, or why an answer was refused."""

  type: Literal["text", "input_text", "output_text", "refusal"]
  text: str = pydantic.Field(
    validation_alias=pydantic.AliasChoices("text", "refusal")
  )


class Form(pydantic.BaseModel, frozen=True):
  """The format of an answer; only plain text is offered."""

  type: Literal["text"] = "text"


class StreamOptions(pydantic.BaseModel, frozen=True):
  """How an answer is streamed."""

  include_usage: bool = False


class _Text(pydantic.BaseModel, frozen=True):
  format: Form = Form()


# A body of a megabyte can have 300,000 errors; the first is enough.
_Parts = Annotated[list[Part], pydantic.Field(fail_fast=True)]
Texts = Annotated[
  Annotated[str, pydantic.Tag("str")]
  | Annotated[_Parts, pydantic.Tag("parts")],
  pydantic.Discriminator(_kind_of_content),
]
Off = Annotated[bool, pydantic.AfterValidator(_is_off)]
Tokens = Annotated[int, pydantic.Field(ge=1, le=2**31)]
_NoCount = Annotated[int, pydantic.Field(ge=0, le=0)]
Zero = Annotated[float, pydantic.Field(ge=0, le=0)]
_Stop = Annotated[str, pydantic.Field(min_length=1)]


def text_of(content: str | Sequence[Part]) -> str:
  """Returns a content as one text, with a line for each of its parts."""
  if isinstance(content, str):
    return content
  return "\n".join(part.text for part in content)


class Request(pydantic.BaseModel):
  """The fields that both APIs have and every service reads alike.

  A null, an empty list and an empty object mean that a field is absent.

  Attributes:
    harmless: names of fields that have no effect in this service.
  """

  model_config = pydantic.ConfigDict(
    strict=True, extra="forbid", allow_inf_nan=False
  )
  harmless: ClassVar[frozenset[str]] = HARMLESS

  model: str | None = None
  stream: bool = False
  stream_options: StreamOptions = StreamOptions()
  temperature: Annotated[float, pydantic.Field(ge=0, le=2)] | None = None
  top_p: Annotated[float, pydantic.Field(gt=0, le=1)] | None = None
  logprobs: Off = False
  top_logprobs: _NoCount = 0
  stop: Annotated[
    list[_Stop],
    pydantic.Field(max_length=_MAX_STOPS),
    pydantic.BeforeValidator(_stops),
  ] = []
  n: int = pydantic.Field(default=1, ge=1, le=1)

  @pydantic.model_validator(mode="before")
  @classmethod
  def _without_effect(cls, body: Any) -> Any:
    if not isinstance(body, dict):
      return body
    if len(body) > _MAX_FIELDS:
      raise RequestError(
        400, f"Found {len(body)} fields, expected at most {_MAX_FIELDS}."
      )
    return {
      name: value
      for name, value in body.items()
      if value not in _ABSENT and name not in cls.harmless
    }

  @abc.abstractmethod
  def token_limits(self) -> list[int | None]:
    """Returns the fields that limit the tokens of an answer."""


class ChatRequest(Request):
  """Fields of `POST /v1/chat/completions`."""

  max_completion_tokens: Tokens | None = None
  max_tokens: Tokens | None = None
  response_format: Form = Form()
  function_call: Literal["auto", "none"] = "auto"
  logit_bias: dict[str, Zero] = {}
  modalities: list[Literal["text"]] = ["text"]

  def token_limits(self) -> list[int | None]:
    return [self.max_completion_tokens, self.max_tokens]


class ResponsesRequest(Request):
  """Fields of `POST /v1/responses`."""

  instructions: Texts | None = None
  max_output_tokens: Tokens | None = None
  background: Off = False
  text: _Text = _Text()

  def token_limits(self) -> list[int | None]:
    return [self.max_output_tokens]
