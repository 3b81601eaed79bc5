"""Reads the fields that OpenAI's two APIs share, and refuses the others.

A field is honoured, or has no effect here, or is refused by its name: a client
must not believe that something holds which does not.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import orjson
from starlette import requests, responses

from anysearch_jax import budgets
from anysearch_jax import config as config_lib

# At this length a text is certainly no question.
_CHARACTERS = 200_000
_STOPS = 4  # As in OpenAI's API.
# Fields without an effect on an answer.
_HARMLESS = frozenset(
  "user metadata store service_tier safety_identifier prompt_cache_key "
  "prompt_cache_retention parallel_tool_calls verbosity".split()
)
_BODY = 2**20  # Bytes of a request.
_BODY_SECONDS = 30.0


class RequestError(Exception):
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
    super().__init__(message)
    self.status, self.param, self.code = status, param, code
    self.retry_after = retry_after

  @property
  def headers(self) -> dict[str, str]:
    """The headers of the response."""
    if self.retry_after is None:
      return {}
    return {"retry-after": str(self.retry_after)}

  def body(self) -> dict[str, Any]:
    """The JSON of the response."""
    return {
      "error": {
        "message": str(self),
        "type": _type(self.status),
        "param": self.param,
        "code": self.code,
      }
    }


def _type(status: int) -> str:
  if status == 401:
    return "authentication_error"
  if status == 429:
    return "rate_limit_error"
  return "invalid_request_error" if status < 500 else "server_error"


def refuse(param: str, found: object, expected: str) -> RequestError:
  """Returns the error of a field that cannot be honoured."""
  shown = repr(found)
  shown = shown if len(shown) <= 80 else f"{shown[:80]}..."
  return RequestError(
    400,
    f"{param}: found {shown}, expected {expected}.",
    param=param,
    code="invalid_value",
  )


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
    choices: the most answers to one request.
    prices: by which a budget of dollars is charged.
  """

  model: str
  budget: int = 3
  max_budget: int = 10
  max_tokens: int = 4096
  seconds: float = 120.0
  sampling: config_lib.SamplingConfig = config_lib.SamplingConfig()
  choices: int = 8
  prices: budgets.Prices = budgets.NO_CAPS.prices


@dataclasses.dataclass(frozen=True)
class Asked:
  """A request that was read.

  question: the text that the policy gets, earlier turns included.
  model: as the request names it.
  budget: searches of an answer.
  caps: what else an answer may spend.
  sampling: how tokens are drawn; None: as the service does.
  stop: the answer is cut before the first of these texts.
  choices: number of answers; answer `i` has the seed `seed + i`.
  """

  question: str
  model: str
  budget: int
  max_tokens: int
  seed: int
  deadline: float
  stream: bool
  sampling: config_lib.SamplingConfig | None = None
  stop: tuple[str, ...] = ()
  choices: int = 1
  caps: budgets.Budget = budgets.NO_CAPS

  @property
  def assigned(self) -> budgets.Assigned:
    """The whole budget of an answer; a number if it is one of searches."""
    if not self.caps.units:
      return self.budget
    return dataclasses.replace(self.caps, searches=self.budget)


class Body:
  """The JSON object of a request, whose fields are taken one by one.

  Raises:
    RequestError: by every method, for a value that cannot be honoured.
  """

  def __init__(self, values: Any):
    if not isinstance(values, Mapping):
      raise RequestError(
        400, "Found a body that is no JSON object, expected one."
      )
    self._left = {k: v for k, v in values.items() if v is not None}

  def take(self, name: str) -> Any:
    """Returns a field, None if it is absent, and marks it as read."""
    return self._left.pop(name, None)

  def flag(self, name: str) -> bool:
    """Returns a truth value; absent is False."""
    found = self.take(name)
    if found is not None and not isinstance(found, bool):
      raise refuse(name, found, "true or false")
    return bool(found)

  def number(self, name: str, *, least: int, most: int) -> int | None:
    """Returns a whole number, None if it is absent."""
    found = self.take(name)
    if found is None:
      return None
    whole = isinstance(found, int) and not isinstance(found, bool)
    if not whole or not least <= found <= most:
      raise refuse(name, found, f"a whole number from {least} to {most}")
    return found

  def same(self, name: str, *served: Any) -> None:
    """Accepts a field only with one of the values that hold anyway."""
    found = self.take(name)
    # Python's True equals 1.
    equal = (
      found == value and isinstance(found, bool) == isinstance(value, bool)
      for value in served
    )
    if found is not None and not any(equal):
      values = " or ".join(repr(value) for value in served) or "no such field"
      raise refuse(name, found, f"{values}; this service has no other")

  def end(self) -> None:
    """Refuses the fields that nothing has read."""
    for name, found in self._left.items():
      if name not in _HARMLESS:
        raise RequestError(
          400,
          f"{name}: found {str(found)[:80]!r}, expected no such field: this "
          "service does not know or does not offer it.",
          param=name,
          code="unsupported_parameter",
        )


def asked(
  body: Body,
  served: Served,
  *,
  question: str,
  tokens: Sequence[str],
  choices: bool = False,
) -> Asked:
  """Reads the fields that both APIs have, and ends the body.

  Args:
    body: whose other fields have been taken.
    served: what may be asked.
    question: from the API's own fields.
    tokens: the API's names for the limit of tokens; at most one may be given.
    choices: whether the API has `n`.
  """
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
  model, named = _model(body, served)
  stream = body.flag("stream")
  for name in ("top_k", "logit_bias", "top_logprobs"):
    body.same(name)
  for name in ("presence_penalty", "frequency_penalty"):
    body.same(name, 0)
  body.same("logprobs", False)
  limits = [
    n
    for name in tokens
    if (n := body.number(name, least=1, most=2**31)) is not None
  ]
  n = (body.number("n", least=1, most=served.choices) or 1) if choices else 1
  caps = _caps(body, served)
  result = Asked(
    question=question,
    model=model,
    budget=_budget(body, served, named, caps),
    max_tokens=min([served.max_tokens, caps.tokens, *limits]),
    seed=_or(body.number("seed", least=0, most=2**32 - 1 - n), 42),
    deadline=_deadline(body, served),
    stream=stream,
    sampling=_sampling(body, served),
    stop=_stop(body),
    choices=n,
    caps=caps.beyond_searches,
  )
  body.end()
  return result


def _sampling(body: Body, served: Served) -> config_lib.SamplingConfig | None:
  """Returns how tokens are drawn; None if the request does not say."""
  own: dict[str, Any] = {}
  for name, most in (("temperature", 2.0), ("top_p", 1.0)):
    found = body.take(name)
    if found is None:
      continue
    number = isinstance(found, int | float) and not isinstance(found, bool)
    if not number or not 0 <= found <= most or (name, found) == ("top_p", 0):
      least = "0" if name == "temperature" else "above 0"
      raise refuse(name, found, f"a number from {least} to {most:g}")
    own[name] = float(found)
  sampling = dataclasses.replace(served.sampling, **own)
  return None if sampling == served.sampling else sampling


def _stop(body: Body) -> tuple[str, ...]:
  found = body.take("stop")
  texts = [found] if isinstance(found, str) else found or []
  if (
    not isinstance(texts, list)
    or len(texts) > _STOPS
    or not all(isinstance(text, str) and text for text in texts)
  ):
    raise refuse("stop", found, f"a text, or a list of at most {_STOPS}")
  return tuple(texts)


def _model(body: Body, served: Served) -> tuple[str, int | None]:
  """Returns the model's name and the budget that it carries, as in name@3."""
  model = body.take("model")
  if model is None:
    return served.model, None
  names = (served.model, "anysearch")
  if model in names:
    return model, None
  name, at, budget = str(model).rpartition("@")
  if not at or name not in names:
    raise RequestError(
      404,
      f"model: found {str(model)[:80]!r}, expected {served.model!r} (or "
      f"'{served.model}@3' for a budget of 3).",
      param="model",
      code="model_not_found",
    )
  if not budget.isascii() or not budget.isdecimal() or len(budget) > 9:
    raise refuse("model", model, "a number of searches after @")
  return str(model), int(budget)


def _caps(body: Body, served: Served) -> budgets.Budget:
  """Returns the budget of the field `budget`, such as searches=3,tokens=256."""
  found = body.take("budget")
  if found is None:
    return budgets.NO_CAPS
  if not isinstance(found, str):
    raise refuse("budget", found, "a text such as searches=3,tokens=256")
  try:
    caps = budgets.parse(found, served.prices)
  except ValueError as error:
    raise RequestError(400, f"budget: {error}", param="budget") from error
  if caps.dollars < math.inf and not served.prices:
    raise refuse(
      "budget", found, "other units than dollars; this service has no prices"
    )
  return caps


def _budget(
  body: Body, served: Served, named: int | None, caps: budgets.Budget
) -> int:
  """Returns the searches that a request allows."""
  given = {
    "model": named,
    "budget": caps.searches if "searches" in caps.units else None,
  }
  for name in ("max_tool_calls", "search_budget"):
    given[name] = body.number(name, least=0, most=2**31)
  found = {name: n for name, n in given.items() if n is not None}
  if len(set(found.values())) > 1:
    said = ", ".join(f"{name} {n}" for name, n in found.items())
    raise RequestError(
      400, f"Found different budgets ({said}), expected one.", param=min(found)
    )
  choice = body.take("tool_choice")
  if choice not in (None, "auto", "none"):
    raise refuse("tool_choice", choice, "'auto' or 'none'")
  if choice == "none":
    return 0
  for name, budget in found.items():
    if budget > served.max_budget:
      raise refuse(name, budget, f"at most {served.max_budget} searches")
    return budget
  return min(served.budget, served.max_budget)


def _deadline(body: Body, served: Served) -> float:
  found = body.take("deadline")
  if found is None:
    return served.seconds
  number = isinstance(found, int | float) and not isinstance(found, bool)
  if not number or not 0 < found < math.inf:
    raise refuse("deadline", found, "seconds above 0")
  return float(min(found, served.seconds))


def _or(value: int | None, default: int) -> int:
  return default if value is None else value


def tools(body: Body, known: Collection[str]) -> None:
  """Accepts tools only if they search; the policy has no others."""
  found = body.take("tools")
  if found is None:
    return
  if not isinstance(found, list):
    raise refuse("tools", found, "a list")
  for tool in found:
    kind = tool.get("type") if isinstance(tool, Mapping) else tool
    if kind not in known:
      expected = ", ".join(sorted(known)) or "no tools"
      raise refuse(
        "tools",
        kind,
        f"{expected}: this policy searches and has no other tool",
      )


def conversation(turns: Sequence[tuple[str, str]]) -> str:
  """Returns the question that the policy gets for a conversation.

  The policy was trained for single questions. A single user message is passed
  on as it is. Otherwise the earlier messages come first, one after the other,
  as `role: text`, and the last message after `question:`.

  Args:
    turns: role and text of each message; the last one is the user's.
  """
  if not turns:
    raise RequestError(
      400, "Found no message, expected a question.", code="no_question"
    )
  role, last = turns[-1]
  if role != "user":
    raise RequestError(
      400,
      f"Found {role!r} as the role of the last message, expected 'user': the "
      "question that is to be answered.",
    )
  if len(turns) == 1:
    return last
  earlier = (f"{role}: {text}" for role, text in turns[:-1])
  return "\n".join([*earlier, f"question: {last}"])


def text_of(content: Any, param: str, kinds: Collection[str]) -> str:
  """Returns the text of a message's content.

  Args:
    content: a text, or a list of parts with `type` and `text`.
    param: the field's name, for errors.
    kinds: the types of parts that hold text.
  """
  if isinstance(content, str):
    return content
  if not isinstance(content, list):
    raise refuse(param, content, "a text or a list of texts")
  texts = []
  for part in content:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind not in kinds or not isinstance(part.get("text"), str):
      raise refuse(param, part, f"texts of type {' or '.join(kinds)}")
    texts.append(part["text"])
  return "\n".join(texts)


async def read(request: requests.Request) -> Any:
  """Returns the JSON of a request's body."""
  body, more = bytearray(), True
  try:
    async with asyncio.timeout(_BODY_SECONDS):
      while more:
        message = await request.receive()
        if message["type"] == "http.disconnect":
          raise RequestError(499, "The client left.")
        body += message.get("body", b"")
        more = message.get("more_body", False)
        if len(body) > _BODY:
          raise RequestError(
            413, f"The request has more than {_BODY} bytes; send less."
          )
  except TimeoutError as error:
    raise RequestError(
      408, f"The body took more than {_BODY_SECONDS:g} seconds."
    ) from error
  try:
    return json.loads(body)
  except (ValueError, RecursionError) as error:
    raise RequestError(
      400, f"The body is no JSON ({error}); expected an object."
    ) from error


def respond(
  value: Any, status: int = 200, headers: Mapping[str, str] | None = None
) -> responses.Response:
  """Returns a response of JSON."""
  return responses.Response(encode(value), status, headers, "application/json")


def encode(value: Any) -> bytes:
  """Returns a value as JSON."""
  try:
    return orjson.dumps(value)
  except TypeError:
    # A policy may write half a surrogate pair, which orjson refuses to encode.
    return json.dumps(value).encode()
