"""What OpenAI's two APIs share: fields of requests, refusals, and citations.

A field is honoured, or has no effect here, or is refused by its name: a client
must not believe that something holds which does not.
"""

from __future__ import annotations

import dataclasses
import math
import re
import urllib.parse
import uuid
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

import pydantic
from starlette import exceptions

from anysearch_jax import budgets, types
from anysearch_jax import config as config_lib
from anysearch_jax.agent import events
from anysearch_jax.environment import citations

# At this length a text is certainly no question.
_CHARACTERS = 200_000
_MARK = re.compile(r"\[([0-9]+)\]")
_STOPS = 4  # As in OpenAI's API.
# Fields without an effect on an answer.
_HARMLESS = frozenset(
  (
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "parallel_tool_calls",
    "verbosity",
    "reasoning",
    "reasoning_effort",
    "include",
    "truncation",
    "web_search_options",
  )
)
# What pydantic's messages have around the value that it expects.
_AROUND = re.compile(
  r"^(Input|List|String) should (be |have )?|^Value error, "
  r"| after validation, not \d+$"
)
_TYPES = {401: "authentication_error", 429: "rate_limit_error"}


class RequestError(exceptions.HTTPException):
  """A request is refused.

  Args:
    status: HTTP status.
    message: what was found, what was expected, what to do.
    param: the field of the request that is at fault, if one is.
    code: for programs, such as `model_not_found`.
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


def error_of(error: exceptions.HTTPException) -> dict[str, Any]:
  """Returns the JSON of an error in OpenAI's form."""
  status = error.status_code
  kind = "invalid_request_error" if status < 500 else "server_error"
  return {
    "message": error.detail,
    "type": _TYPES.get(status, kind),
    "param": getattr(error, "param", None),
    "code": getattr(error, "code", None),
  }


def new_id() -> str:
  """Returns the id of a request, by which its client and the log name it."""
  return f"req_{uuid.uuid4().hex}"


def unavailable(request: str) -> str:
  """Returns what is told instead of an error with internal addresses."""
  return (
    "The model or the search service did not answer; try again later. The "
    f"service's log has the cause of {request}."
  )


def refuse(
  param: str,
  found: object,
  expected: str,
  *,
  status: int = 400,
  code: str = "invalid_value",
) -> RequestError:
  """Returns the error of a field that cannot be honoured."""
  shown = repr(found)
  shown = shown if len(shown) <= 80 else f"{shown[:80]}..."
  said = f"{param}: found {shown}, expected {expected}."
  return RequestError(status, said, param=param, code=code)


@dataclasses.dataclass(frozen=True)
class Served:
  """What a service offers.

  Attributes:
    model: the policy's name.
    budget: searches of a request that does not say.
    max_budget: the most searches that a request may ask for.
    max_tokens: tokens that the policy may write.
    seconds: the longest deadline, and that of a request that does not say.
    sampling: of a request that does not say.
    prices: by which a budget of dollars is charged.
    cites: whether answers cite passages as `[2]`; the agent says so.
  """

  model: str
  budget: int = 3
  max_budget: int = 10
  max_tokens: int = 4096
  seconds: float = 120.0
  sampling: config_lib.SamplingConfig = config_lib.SamplingConfig()
  prices: budgets.Prices = budgets.NO_CAPS.prices
  cites: bool = False


@dataclasses.dataclass(frozen=True)
class Asked:
  """A request that was read.

  question: the text that the policy gets, earlier turns included.
  model: as the request names it.
  budget: what an answer may spend.
  sampling: how tokens are drawn; None: as the service does.
  stop: the answer is cut before the first of these texts.
  usage: whether a stream of chunks ends with what was used.
  """

  question: str
  model: str
  budget: budgets.Budget
  max_tokens: int
  seed: int
  deadline: float
  stream: bool
  sampling: config_lib.SamplingConfig | None = None
  stop: tuple[str, ...] = ()
  usage: bool = False


def _texts(content: Any) -> Any:
  """Returns a content that is a text as a list of one part."""
  if isinstance(content, str):
    return [{"type": "text", "text": content}]
  return content


def _stops(texts: Any) -> Any:
  """Returns a single text as a list of one."""
  return [texts] if isinstance(texts, str) else texts


def _is_off(flag: bool) -> bool:
  if flag:
    raise ValueError("false; this service has no other")
  return flag


class _Part(pydantic.BaseModel):
  type: Literal["text", "input_text", "output_text"]
  text: str


Texts = Annotated[list[_Part], pydantic.BeforeValidator(_texts)]


class Message(pydantic.BaseModel):
  """A message of a conversation; its content is one or several texts."""

  type: Literal["message"] = "message"
  role: Literal["system", "developer", "user", "assistant"]
  content: Texts


Messages = Annotated[list[Message], pydantic.Field(min_length=1)]


class Form(pydantic.BaseModel):
  """The form of an answer."""

  type: Literal["text"] = "text"


class _Tool(pydantic.BaseModel):
  type: str


class _StreamOptions(pydantic.BaseModel):
  include_usage: bool = False


Off = Annotated[bool, pydantic.AfterValidator(_is_off)]
Tokens = Annotated[int, pydantic.Field(ge=1, le=2**31)]
_Count = Annotated[int, pydantic.Field(ge=0, le=2**31)]
_Zero = Annotated[float, pydantic.Field(ge=0, le=0)]
_Stop = Annotated[str, pydantic.Field(min_length=1)]


class Request(pydantic.BaseModel):
  """The fields that both APIs have. A null means that a field is absent.

  OpenAI's APIs describe them, but for `budget` and `max_tool_calls`,
  which say what an answer may spend, and `deadline`.
  """

  model_config = pydantic.ConfigDict(
    strict=True, extra="forbid", allow_inf_nan=False
  )
  search_tools: ClassVar[tuple[str, ...]] = ()

  model: str | None = None
  budget: str | None = None
  max_tool_calls: _Count | None = None
  tool_choice: Literal["auto", "none"] = "auto"
  tools: list[_Tool] = []
  stream: bool = False
  stream_options: _StreamOptions = _StreamOptions()
  seed: Annotated[int, pydantic.Field(ge=0, lt=2**32)] = 42
  deadline: Annotated[float, pydantic.Field(gt=0)] = math.inf
  temperature: Annotated[float, pydantic.Field(ge=0, le=2)] | None = None
  top_p: Annotated[float, pydantic.Field(gt=0, le=1)] | None = None
  presence_penalty: _Zero = 0
  frequency_penalty: _Zero = 0
  logprobs: Off = False
  stop: Annotated[
    list[_Stop],
    pydantic.Field(max_length=_STOPS),
    pydantic.BeforeValidator(_stops),
  ] = []
  n: int = pydantic.Field(default=1, ge=1, le=1)

  @pydantic.model_validator(mode="before")
  @classmethod
  def _without_effect(cls, values: Any) -> Any:
    if not isinstance(values, dict):
      return values
    return {
      name: value
      for name, value in values.items()
      if value is not None and name not in _HARMLESS
    }

  @pydantic.field_validator("tools")
  @classmethod
  def _search(cls, tools: list[_Tool]) -> list[_Tool]:
    for tool in tools:
      if tool.type not in cls.search_tools:
        expected = ", ".join(cls.search_tools) or "no tools"
        raise refuse(
          "tools",
          tool.type,
          f"{expected}: this policy searches and has no other tool",
        )
    return tools

  def turns(self) -> list[tuple[str, str]]:
    """Returns role and text of each message."""
    raise NotImplementedError

  def token_limits(self) -> list[int | None]:
    """Returns the limits of the tokens of an answer."""
    raise NotImplementedError


def text_of(parts: Sequence[_Part]) -> str:
  """Returns the text of a content."""
  return "\n".join(part.text for part in parts)


def said_by(messages: Sequence[Message]) -> list[tuple[str, str]]:
  """Returns role and text of each message."""
  return [(message.role, text_of(message.content)) for message in messages]


def read(api: type[Request], body: bytes, served: Served) -> Asked:
  """Reads the JSON of a request.

  Args:
    api: the fields of the API that is asked.
    body: of the request.
    served: what may be asked.

  Raises:
    RequestError: a field cannot be honoured.
  """
  try:
    request = api.model_validate_json(body)
  except pydantic.ValidationError as error:
    raise _refusal(error) from error
  question = conversation(request.turns(), cites=served.cites)
  if not question.strip():
    raise RequestError(
      400, "Found no question, expected a text.", code="no_question"
    )
  if len(question) > _CHARACTERS:
    raise RequestError(
      400,
      f"Found a question of {len(question)} characters, expected at most "
      f"{_CHARACTERS}.",
      code="context_length_exceeded",
    )
  model, searches = _model(request, served)
  caps = _caps(request, served)
  sampling = served.sampling
  if request.temperature is not None:
    sampling = dataclasses.replace(sampling, temperature=request.temperature)
  if request.top_p is not None:
    sampling = dataclasses.replace(sampling, top_p=request.top_p)
  limits = [limit for limit in request.token_limits() if limit is not None]
  return Asked(
    question=question,
    model=model,
    budget=dataclasses.replace(
      caps, searches=_searches(request, served, searches, caps)
    ),
    max_tokens=min(served.max_tokens, caps.tokens, *limits),
    seed=request.seed,
    deadline=min(request.deadline, served.seconds),
    stream=request.stream,
    sampling=None if sampling == served.sampling else sampling,
    stop=tuple(request.stop),
    usage=request.stream_options.include_usage,
  )


def _refusal(error: pydantic.ValidationError) -> RequestError:
  """Returns the first error of a body as a sentence."""
  first, *_ = error.errors(include_url=False, include_context=False)
  path = [name for name in first["loc"] if name != "type"]
  # Of a list, its field is named.
  numbers = [i for i, name in enumerate(path) if isinstance(name, int)]
  param = ".".join(map(str, path[: numbers[0] if numbers else None]))
  if not param:
    return RequestError(
      400,
      f"Found a body that is no JSON object ({first['msg']}), expected one.",
    )
  if first["type"] == "missing":
    return RequestError(
      400, f"{param}: found nothing, expected a value.", param=param
    )
  if first["type"] == "extra_forbidden":
    return refuse(
      param,
      first["input"],
      "no such field: this service does not know or offer it, and stores "
      "nothing between requests",
      code="unsupported_parameter",
    )
  return refuse(param, first["input"], _AROUND.sub("", first["msg"]))


def _model(request: Request, served: Served) -> tuple[str, int | None]:
  """Returns the model's name and the budget that it carries, as in name@3."""
  model = request.model
  if model is None:
    return served.model, None
  names = (served.model, "anysearch")
  if model in names:
    return model, None
  name, at, budget = model.rpartition("@")
  if not at or name not in names:
    known = f"{served.model!r} (or '{served.model}@3' for a budget of 3)"
    raise refuse("model", model, known, status=404, code="model_not_found")
  if not budget.isascii() or not budget.isdecimal() or len(budget) > 9:
    raise refuse("model", model, "a number of searches after @")
  return model, int(budget)


def budget_of(text: str, prices: budgets.Prices) -> budgets.Budget:
  """Returns the budget of a text such as searches=3,tokens=256.

  Raises:
    ValueError: the text is no budget, or it has dollars without `prices`.
  """
  budget = budgets.parse(text, prices)
  if budget.dollars < math.inf and not prices:
    raise ValueError(
      f"found {text!r}, expected other units than dollars: nothing here has a "
      "price."
    )
  return budget


def _caps(request: Request, served: Served) -> budgets.Budget:
  """Returns the budget of the field `budget`."""
  if request.budget is None:
    return budgets.NO_CAPS
  try:
    return budget_of(request.budget, served.prices)
  except ValueError as error:
    raise RequestError(400, f"budget: {error}", param="budget") from error


def _searches(
  request: Request, served: Served, named: int | None, caps: budgets.Budget
) -> int:
  """Returns the searches of an answer, which several fields may say."""
  given = {
    "model": named,
    "budget": caps.searches if "searches" in caps.units else None,
    "max_tool_calls": request.max_tool_calls,
  }
  asked = {name: n for name, n in given.items() if n is not None}
  if len(set(asked.values())) > 1:
    listed = ", ".join(f"{name} {n}" for name, n in asked.items())
    raise RequestError(
      400,
      f"Found different budgets ({listed}), expected one.",
      param=min(asked),
    )
  if request.tool_choice == "none":
    return 0
  for name, budget in asked.items():
    if budget > served.max_budget:
      raise refuse(name, budget, f"at most {served.max_budget} searches")
    return budget
  return min(served.budget, served.max_budget)


def conversation(
  turns: Sequence[tuple[str, str]], *, cites: bool = False
) -> str:
  """Returns the question that the policy gets for a conversation.

  The policy was trained for single questions. A single user message is passed
  on as it is. Otherwise the earlier messages come first, one after the other,
  as `role: text`, and the last message after `question:`. With `cites`, earlier
  answers lose their numbers, because each question counts its passages from 1.
  """
  role, last = turns[-1]
  if role != "user":
    raise RequestError(
      400,
      f"Found {role!r} as the role of the last message, expected 'user': the "
      "question that is to be answered.",
    )
  if len(turns) == 1:
    return last
  earlier = (
    f"{role}: {citations.without_marks(text) if cites else text}"
    for role, text in turns[:-1]
  )
  return "\n".join([*earlier, f"question: {last}"])


def url_of(passage: types.Passage) -> str:
  """Returns the URL of a passage: its id, if that is one, or a URN."""
  if passage.id.startswith(("http://", "https://")):
    return passage.id
  return f"urn:passage:{urllib.parse.quote(passage.id, safe='/')}"


def url_citations(reply: events.Reply, *, cites: bool) -> list[dict[str, Any]]:
  """Returns the citations of an answer.

  With `cites` there is one for each mark such as `[2]`, with the number and the
  place in the document. Otherwise there is one for each passage that was shown:
  the policy has read it, which does not prove the answer.
  """
  text = reply.answer or ""
  if not cites:
    read = {url_of(p): p for passages in reply.documents for p in passages}
    return [_annotation(passage, 0, len(text)) for passage in read.values()]
  passages = dict(reply.citations)
  return [
    _annotation(passages[int(mark[1])], *mark.span()) | {"number": int(mark[1])}
    for mark in _MARK.finditer(text)
    if int(mark[1]) in passages
  ]


def _annotation(passage: types.Passage, start: int, end: int) -> dict[str, Any]:
  """Returns a citation of a passage by a part of an answer."""
  values = {
    "type": "url_citation",
    "url": url_of(passage),
    "title": citations.title(passage),
    "start_index": start,
    "end_index": end,
  }
  return values | citations.source(passage)
