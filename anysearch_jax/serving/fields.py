"""Fields of requests and citations, which OpenAI's two APIs share here."""

from __future__ import annotations

import abc
import dataclasses
import math
import re
import urllib.parse
import uuid
from collections.abc import Callable, Sequence
from typing import Annotated, Any, ClassVar, Literal

import pydantic

from anysearch_jax import budgets, types
from anysearch_jax import config as config_lib
from anysearch_jax.agent import events
from anysearch_jax.environment import citations, protocol
from anysearch_jax.host import openai_requests

# No question is longer than this, about 50,000 tokens.
MAX_CHARACTERS = 200_000
_MARK = re.compile(r"\[([0-9]+)\]")


def new_id() -> str:
  """Returns a new request id, which the response and the log contain."""
  return f"req_{uuid.uuid4().hex}"


def unavailable(request_id: str) -> str:
  """Returns a sentence that replaces an error with internal addresses."""
  return (
    "The model or the search service did not answer; try again later. The "
    f"service's log has the cause of {request_id}."
  )


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


class Message(pydantic.BaseModel):
  """A message of a conversation; its content is one or several texts."""

  type: Literal["message"] = "message"
  role: Literal["system", "developer", "user", "assistant"]
  content: openai_requests.Texts

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


class _Tool(pydantic.BaseModel):
  type: str


_Count = Annotated[int, pydantic.Field(ge=0, le=2**31)]


class Request(openai_requests.Request):
  """The fields that this service reads in both APIs.

  They are described in OpenAI's APIs. Only three have a meaning of this
  service: `budget` and `max_tool_calls` cap the spending of an answer, and
  `deadline` its seconds.
  """

  harmless = openai_requests.HARMLESS | {"truncation", "web_search_options"}
  search_tools: ClassVar[tuple[str, ...]] = ()

  budget: str | None = None
  max_tool_calls: _Count | None = None
  tool_choice: Literal["auto", "none"] = "auto"
  tools: list[_Tool] = []
  seed: Annotated[int, pydantic.Field(ge=0, lt=2**32)] = 42
  deadline: Annotated[float, pydantic.Field(gt=0)] = math.inf
  presence_penalty: openai_requests.Zero = 0
  frequency_penalty: openai_requests.Zero = 0

  @pydantic.field_validator("tools")
  @classmethod
  def _search(cls, tools: list[_Tool]) -> list[_Tool]:
    for tool in tools:
      if tool.type not in cls.search_tools:
        expected = ", ".join(cls.search_tools) or "no tools"
        raise openai_requests.refuse(
          "tools",
          tool.type,
          f"{expected}: this policy searches and has no other tool",
        )
    return tools

  @abc.abstractmethod
  def turns(self) -> list[tuple[str, str]]:
    """Returns role and text of each message."""

  def include_draft(self) -> bool:
    """Returns whether the client asks for the text of an unfinished answer."""
    return False


def role_texts(messages: Sequence[Message]) -> list[tuple[str, str]]:
  """Returns role and text of each message."""
  return [
    (message.role, openai_requests.text_of(message.content))
    for message in messages
  ]


def parse_request(
  api: type[Request], body: bytes, served: Served
) -> ParsedRequest:
  """Reads the JSON of a request.

  Args:
    api: the model of the request's fields in its API.
    body: the request's body.
    served: defaults and limits.

  Raises:
    openai_requests.RequestError: a field cannot be honoured.
  """
  try:
    request = api.model_validate_json(body)
  except pydantic.ValidationError as error:
    raise openai_requests.refusal(error) from error
  question = conversation(request.turns(), cites=served.cites)
  if not question.strip():
    raise openai_requests.RequestError(
      400, "Found no question, expected a text.", code="no_question"
    )
  if len(question) > MAX_CHARACTERS:
    raise openai_requests.RequestError(
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
    raise openai_requests.refuse(
      "model", model, expected, status=404, code="model_not_found"
    )
  if not budget.isascii() or not budget.isdecimal() or len(budget) > 9:
    raise openai_requests.refuse("model", model, "a number of searches after @")
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
    raise openai_requests.RequestError(
      400, f"budget: {error}", param="budget"
    ) from error


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
    raise openai_requests.RequestError(
      400,
      f"Found different budgets ({listed}), expected one.",
      param=min(requested),
    )
  if request.tool_choice == "none":
    return 0
  for name, budget in requested.items():
    if budget > served.max_budget:
      raise openai_requests.refuse(
        name, budget, f"at most {served.max_budget} searches"
      )
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
    raise openai_requests.RequestError(
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
