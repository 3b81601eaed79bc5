"""Reads the fields that OpenAI's two APIs share, and refuses the others.

A field is honoured, or has no effect here, or is refused by its name: a client
must not believe that something holds which does not.
"""

from __future__ import annotations

import dataclasses
import math
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from anysearch_jax import budgets
from anysearch_jax import config as config_lib
from anysearch_jax.environment import citations

# At this length a text is certainly no question.
_CHARACTERS = 200_000
_STOPS = 4  # As in OpenAI's API.
_CHOICES = 8  # The most answers to one request.
# Fields without an effect on an answer.
_HARMLESS = frozenset(
  "user metadata store service_tier safety_identifier prompt_cache_key "
  "prompt_cache_retention parallel_tool_calls verbosity".split()
)
_ROLES = ("system", "developer", "user", "assistant")
_TYPES = {401: "authentication_error", 429: "rate_limit_error"}


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
    after = self.retry_after
    return {} if after is None else {"retry-after": str(after)}

  def body(self) -> dict[str, Any]:
    """The JSON of the response."""
    kind = "invalid_request_error" if self.status < 500 else "server_error"
    return {
      "error": {
        "message": str(self),
        "type": _TYPES.get(self.status, kind),
        "param": self.param,
        "code": self.code,
      }
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
  budget: searches of an answer.
  caps: what else an answer may spend.
  sampling: how tokens are drawn; None: as the service does.
  stop: the answer is cut before the first of these texts.
  choices: number of answers; answer `i` has the seed `seed + i`.
  usage: whether a stream of chunks ends with what was used.
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
  usage: bool = False

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

  def take(
    self,
    name: str,
    fits: Callable[[Any], bool] = lambda found: True,
    expected: str = "",
  ) -> Any:
    """Returns a field, None if it is absent, and marks it as read."""
    found = self._left.pop(name, None)
    if found is not None and not fits(found):
      raise refuse(name, found, expected)
    return found

  def flag(self, name: str) -> bool:
    """Returns a truth value; absent is False."""
    return bool(self.take(name, _is(bool), "true or false"))

  def whole(self, name: str, *, least: int, most: int) -> int | None:
    """Returns a whole number, None if it is absent."""
    return self.take(
      name,
      lambda found: _is(int)(found) and least <= found <= most,
      f"a whole number from {least} to {most}",
    )

  def number(
    self, name: str, fits: Callable[[float], bool], expected: str
  ) -> float | None:
    """Returns a number that fits, None if it is absent."""
    return self.take(
      name,
      lambda found: (_is(int)(found) or _is(float)(found)) and fits(found),
      expected,
    )

  def same(self, name: str, *served: Any) -> None:
    """Accepts a field only with one of the values that hold anyway."""
    values = " or ".join(map(repr, served)) or "no such field"
    expected = f"{values}; this service has no other"
    kinds = [(_is(bool)(value), value) for value in served]  # True equals 1.
    self.take(name, lambda found: (_is(bool)(found), found) in kinds, expected)

  def end(self) -> None:
    """Refuses the fields that nothing has read."""
    for name, found in self._left.items():
      if name not in _HARMLESS:
        expected = "no such field: this service does not know or offer it"
        raise refuse(name, found, expected, code="unsupported_parameter")


def _is(kind: type) -> Callable[[Any], bool]:
  """Returns whether a value has a type; a truth value is no number."""
  return lambda found: type(found) is kind


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
  limits = [body.whole(name, least=1, most=2**31) for name in tokens]
  n = (body.whole("n", least=1, most=_CHOICES) or 1) if choices else 1
  caps = _caps(body, served)
  seed = body.whole("seed", least=0, most=2**32 - 1 - n)
  seconds = body.number(
    "deadline", lambda found: 0 < found < math.inf, "seconds above 0"
  )
  temperature = body.number(
    "temperature", lambda found: 0 <= found <= 2, "a number from 0 to 2"
  )
  top_p = body.number(
    "top_p", lambda found: 0 < found <= 1, "a number from above 0 to 1"
  )
  own = {"temperature": temperature, "top_p": top_p}
  drawn: dict[str, Any] = {k: float(v) for k, v in own.items() if v is not None}
  sampling = dataclasses.replace(served.sampling, **drawn)
  result = Asked(
    question=question,
    model=model,
    budget=_budget(body, served, named, caps),
    max_tokens=min(served.max_tokens, caps.tokens, *filter(None, limits)),
    seed=42 if seed is None else seed,
    deadline=float(min(seconds or served.seconds, served.seconds)),
    stream=stream,
    sampling=None if sampling == served.sampling else sampling,
    stop=_stop(body),
    choices=n,
    caps=caps.beyond_searches,
  )
  body.end()
  return result


def _stop(body: Body) -> tuple[str, ...]:
  found = body.take("stop")
  texts = [found] if isinstance(found, str) else [] if found is None else found
  whole = isinstance(texts, list) and len(texts) <= _STOPS
  if not whole or not all(isinstance(text, str) and text for text in texts):
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
    known = f"{served.model!r} (or '{served.model}@3' for a budget of 3)"
    raise refuse("model", model, known, status=404, code="model_not_found")
  if not budget.isascii() or not budget.isdecimal() or len(budget) > 9:
    raise refuse("model", model, "a number of searches after @")
  return str(model), int(budget)


def _caps(body: Body, served: Served) -> budgets.Budget:
  """Returns the budget of the field `budget`, such as searches=3,tokens=256."""
  found = body.take("budget", _is(str), "a text such as searches=3,tokens=256")
  if found is None:
    return budgets.NO_CAPS
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
  given = {
    "model": named,
    "budget": caps.searches if "searches" in caps.units else None,
  }
  for name in ("max_tool_calls", "search_budget"):
    given[name] = body.whole(name, least=0, most=2**31)
  found = {name: n for name, n in given.items() if n is not None}
  if len(set(found.values())) > 1:
    said = ", ".join(f"{name} {n}" for name, n in found.items())
    raise RequestError(
      400, f"Found different budgets ({said}), expected one.", param=min(found)
    )
  choice = body.take(
    "tool_choice", lambda found: found in ("auto", "none"), "'auto' or 'none'"
  )
  if choice == "none":
    return 0
  for name, budget in found.items():
    if budget > served.max_budget:
      raise refuse(name, budget, f"at most {served.max_budget} searches")
    return budget
  return min(served.budget, served.max_budget)


def tools(body: Body, known: Collection[str]) -> None:
  """Accepts tools only if they search; the policy has no others."""
  for tool in body.take("tools", _is(list), "a list") or ():
    kind = tool.get("type") if isinstance(tool, Mapping) else tool
    if kind not in known:
      expected = ", ".join(sorted(known)) or "no tools"
      raise refuse(
        "tools", kind, f"{expected}: this policy searches and has no other tool"
      )


def plain_text(param: str, form: Any, expected: str) -> None:
  """Accepts a form of answers only if it is plain text."""
  kind = form.get("type") if isinstance(form, Mapping) else form
  if kind not in (None, "text"):
    raise refuse(param, kind, expected)


def conversation(
  turns: Sequence[tuple[str, str]], *, cites: bool = False
) -> str:
  """Returns the question that the policy gets for a conversation.

  The policy was trained for single questions. A single user message is passed
  on as it is. Otherwise the earlier messages come first, one after the other,
  as `role: text`, and the last message after `question:`. With `cites`, earlier
  answers lose their numbers, because each question counts its passages from 1.
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
  earlier = (
    f"{role}: {citations.without(text) if cites else text}"
    for role, text in turns[:-1]
  )
  return "\n".join([*earlier, f"question: {last}"])


def turns(
  messages: Sequence[Any], param: str, kinds: Collection[str]
) -> list[tuple[str, str]]:
  """Returns role and text of each message of the field `param`."""
  found = []
  for message in messages:
    given = message if isinstance(message, Mapping) else {"type": None}
    kind, role = given.get("type", "message"), given.get("role")
    if kind != "message" or role not in _ROLES:
      expected = f"messages with a text and a role of {', '.join(_ROLES)}"
      raise refuse(param, message, expected)
    found.append((role, text_of(given.get("content"), param, kinds)))
  return found


def text_of(content: Any, param: str, kinds: Collection[str]) -> str:
  """Returns the text of the content of a message, the field `param`.

  It is a text, or a list of parts with `text` whose `type` is one of `kinds`.
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
