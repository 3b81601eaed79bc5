"""Fields of requests, refusals and citations, which OpenAI's two APIs share.

A field is honoured, is known to have no effect here, or is refused by its name:
no client may believe in a setting that the service ignores.
"""

from __future__ import annotations

import dataclasses
import math
import re
import urllib.parse
import uuid
from collections.abc import Callable, Sequence
from typing import Annotated, Any, ClassVar, Literal

import pydantic
from starlette import exceptions

from anysearch_jax import budgets, types
from anysearch_jax import config as config_lib
from anysearch_jax.agent import events
from anysearch_jax.environment import citations, protocol

# No question is longer than this, about 50,000 tokens.
MAX_CHARACTERS = 200_000
_MARK = re.compile(r"\[([0-9]+)\]")
_MAX_STOPS = 4  # The limit of OpenAI's API.
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
    "prompt_cache_options",
    "prediction",
    "parallel_tool_calls",
    "verbosity",
    "reasoning",
    "reasoning_effort",
    "include",
    "truncation",
    "web_search_options",
  )
)
# Parts of pydantic's locations that are no field: the tag of a kind of content,
# and the kinds of a value that has several.
_PYDANTIC_NAMES = ("type", "int", "str")
# The words around the expected value in pydantic's messages.
_PYDANTIC_WORDS = re.compile(
  r"^(Input|List|String) should (be |have )?|^Value error, "
  r"| after validation, not \d+$"
)
_ABSENT: tuple[Any, ...] = (None, [], {})
_TYPES = {401: "authentication_error", 429: "rate_limit_error"}


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
  """Returns a new request id, which the response and the log contain."""
  return f"req_{uuid.uuid4().hex}"


def unavailable(request_id: str) -> str:
  """Returns a sentence that replaces an error with internal addresses."""
  return (
    "The model or the search service did not answer; try again later. The "
    f"service's log has the cause of {request_id}."
  )


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


def url_of(passage: types.Passage) -> str:
  """Returns the URL of a passage: its id, if that is one, or a URN."""
  if passage.id.startswith(("http://", "https://")):
    return passage.id
  return f"urn:passage:{urllib.parse.quote(passage.id, safe='/')}"


@dataclasses.dataclass(frozen=True)
class Served:
  """The model that a service offers, with its defaults and limits.

  Attributes:
    model: the policy's name.
    budget: default number of searches.
    max_budget: the most searches that a request may ask for.
    max_tokens: the most tokens that the policy may write for an answer.
    seconds: the longest deadline, which is also the default.
    sampling: default temperature, top-p and top-k.
    prices: prices by which a budget of dollars is charged.
    cites: whether answers cite passages as `[2]`, taken from the agent.
    url_of: returns the URL of a passage for the client of a request.
  """

  model: str
  budget: int = 3
  max_budget: int = 10
  max_tokens: int = 4096
  seconds: float = 120.0
  sampling: config_lib.SamplingConfig = config_lib.SamplingConfig()
  prices: budgets.Prices = budgets.NO_CAPS.prices
  cites: bool = False
  url_of: Callable[[types.Passage], str] = url_of


@dataclasses.dataclass(frozen=True)
class ParsedRequest:
  """A request of either API, with the service's defaults filled in.

  Attributes:
    question: the text that the policy gets, with the earlier turns.
    model: the model's name, as the request spells it.
    budget: the caps on searches, tokens, dollars and seconds.
    max_tokens: limit on the tokens that the policy writes.
    seed: seeds the sampling, in [0, 2^32).
    deadline: seconds until the reply is due.
    stream: whether the answer is streamed.
    sampling: temperature, top-p and top-k; None: those of the service.
    stop: the answer is cut before the first of these texts.
    usage: whether a stream of chunks ends with the numbers of tokens.
    drafts: whether the text of an answer is streamed while it is written.
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
  drafts: bool = False


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

  @pydantic.model_validator(mode="before")
  @classmethod
  def _unanswered(cls, message: Any) -> Any:
    """Takes an answer without content, which clients send back, as a text."""
    if (
      isinstance(message, dict)
      and message.get("role") == "assistant"
      and message.get("content") is None
      and not message.get("tool_calls")
    ):
      return message | {"content": message.get("refusal") or ""}
    return message


Messages = Annotated[list[Message], pydantic.Field(min_length=1)]


class Form(pydantic.BaseModel):
  """The format of an answer; only plain text is offered."""

  type: Literal["text"] = "text"


class _Tool(pydantic.BaseModel):
  type: str


class StreamOptions(pydantic.BaseModel):
  """How an answer is streamed."""

  include_usage: bool = False


Off = Annotated[bool, pydantic.AfterValidator(_is_off)]
Tokens = Annotated[int, pydantic.Field(ge=1, le=2**31)]
_Count = Annotated[int, pydantic.Field(ge=0, le=2**31)]
_NoCount = Annotated[int, pydantic.Field(ge=0, le=0)]
Zero = Annotated[float, pydantic.Field(ge=0, le=0)]
_Stop = Annotated[str, pydantic.Field(min_length=1)]


class Request(pydantic.BaseModel):
  """The fields that both APIs have.

  A null, an empty list and an empty object mean that a field is absent.

  They are described in OpenAI's APIs. Only three have a meaning of this
  service: `budget` and `max_tool_calls` cap the spending of an answer, and
  `deadline` its seconds.
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
  stream_options: StreamOptions = StreamOptions()
  seed: Annotated[int, pydantic.Field(ge=0, lt=2**32)] = 42
  deadline: Annotated[float, pydantic.Field(gt=0)] = math.inf
  temperature: Annotated[float, pydantic.Field(ge=0, le=2)] | None = None
  top_p: Annotated[float, pydantic.Field(gt=0, le=1)] | None = None
  presence_penalty: Zero = 0
  frequency_penalty: Zero = 0
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
    return {
      name: value
      for name, value in body.items()
      if value not in _ABSENT and name not in _HARMLESS
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

  def include_draft(self) -> bool:
    """Returns whether the client asks for the text of an unfinished answer."""
    return False

  def token_limits(self) -> list[int | None]:
    """Returns the fields that limit the tokens of an answer."""
    raise NotImplementedError


def text_of(parts: Sequence[_Part]) -> str:
  """Returns the parts of a content as one text, a line each."""
  return "\n".join(part.text for part in parts)


def role_texts(messages: Sequence[Message]) -> list[tuple[str, str]]:
  """Returns role and text of each message."""
  return [(message.role, text_of(message.content)) for message in messages]


def parse_request(
  api: type[Request], body: bytes, served: Served
) -> ParsedRequest:
  """Reads the JSON of a request.

  Args:
    api: the model of the request's fields in its API.
    body: the request's body.
    served: defaults and limits.

  Raises:
    RequestError: a field cannot be honoured.
  """
  try:
    request = api.model_validate_json(body)
  except pydantic.ValidationError as error:
    raise refusal(error) from error
  question = conversation(request.turns(), cites=served.cites)
  if not question.strip():
    raise RequestError(
      400, "Found no question, expected a text.", code="no_question"
    )
  if len(question) > MAX_CHARACTERS:
    raise RequestError(
      400,
      f"Found a question of {len(question)} characters, expected at most "
      f"{MAX_CHARACTERS}.",
      code="context_length_exceeded",
    )
  model = served.model if request.model is None else request.model
  searches = budget_of_model(model, served)
  caps = _caps(request, served)
  sampling = served.sampling
  if request.temperature is not None:
    sampling = dataclasses.replace(sampling, temperature=request.temperature)
  if request.top_p is not None:
    sampling = dataclasses.replace(sampling, top_p=request.top_p)
  limits = [limit for limit in request.token_limits() if limit is not None]
  return ParsedRequest(
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
    drafts=request.include_draft(),
  )


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
    return RequestError(
      400,
      f"Found a body that is no JSON object ({first_error['msg']}), expected "
      "one.",
    )
  if first_error["type"] == "missing":
    return RequestError(
      400, f"{param}: found nothing, expected a value.", param=param
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


def budget_of_model(model: str, served: Served) -> int | None:
  """Returns the budget in a model's name, 3 for `name@3`, or None.

  Raises:
    RequestError: the service has no such model.
  """
  names = (served.model, "anysearch")
  if model in names:
    return None
  name, separator, budget = model.rpartition("@")
  if not separator or name not in names:
    expected = f"{served.model!r} (or '{served.model}@3' for a budget of 3)"
    raise refuse("model", model, expected, status=404, code="model_not_found")
  if not budget.isascii() or not budget.isdecimal() or len(budget) > 9:
    raise refuse("model", model, "a number of searches after @")
  return int(budget)


def budget_of(text: str, prices: budgets.Prices) -> budgets.Budget:
  """Returns the budget of a text such as searches=3,tokens=256.

  Args:
    text: the caps, as `budgets.parse` reads them.
    prices: by which dollars are charged; empty if nothing has a price.

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
  request: Request, served: Served, of_model: int | None, caps: budgets.Budget
) -> int:
  """Returns the number of searches; the fields that state it must agree."""
  counts = {
    "model": of_model,
    "budget": caps.searches if "searches" in caps.units else None,
    "max_tool_calls": request.max_tool_calls,
  }
  requested = {name: n for name, n in counts.items() if n is not None}
  if len(set(requested.values())) > 1:
    listed = ", ".join(f"{name} {n}" for name, n in requested.items())
    raise RequestError(
      400,
      f"Found different budgets ({listed}), expected one.",
      param=min(requested),
    )
  if request.tool_choice == "none":
    return 0
  for name, budget in requested.items():
    if budget > served.max_budget:
      raise refuse(name, budget, f"at most {served.max_budget} searches")
    return budget
  return min(served.budget, served.max_budget)


def conversation(
  turns: Sequence[tuple[str, str]], *, cites: bool = False
) -> str:
  """Returns the question that the policy gets for a conversation.

  The policy was trained for single questions. A single user message is passed
  on unchanged. Otherwise the earlier messages come first, each as `role: text`,
  and the last message after `question:`. With `cites`, the citations of earlier
  answers are removed, because each question numbers its passages from 1.
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
  earlier = [
    (role, (citations.without_marks(text) or "") if cites else text)
    for role, text in turns[:-1]
  ]
  return protocol.conversation(earlier, last)


def url_citations(reply: events.Reply, served: Served) -> list[dict[str, Any]]:
  """Returns the citations of an answer.

  If the agent cites, there is one for each mark such as `[2]`, with the number
  and the place in the document. Otherwise there is one for each passage that
  was shown: the policy has read it, but it need not support the answer.
  """
  text = reply.answer or ""
  if not served.cites:
    by_url = {url_of(p): p for passages in reply.documents for p in passages}
    return [
      _annotation(passage, served, 0, len(text)) for passage in by_url.values()
    ]
  passages = dict(reply.citations)
  return [
    _annotation(passages[int(mark[1])], served, *mark.span())
    | {"number": int(mark[1])}
    for mark in _MARK.finditer(text)
    if int(mark[1]) in passages
  ]


def _annotation(
  passage: types.Passage, served: Served, start: int, end: int
) -> dict[str, Any]:
  """Returns a citation of a passage by a part of an answer."""
  values = {
    "type": "url_citation",
    "url": served.url_of(passage),
    "title": citations.title(passage),
    "start_index": start,
    "end_index": end,
  }
  return values | citations.source(passage)
