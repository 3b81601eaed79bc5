"""The wire format of Search-R1's service, and the limits of requests.

    POST /retrieve      {"queries": [text], "topk": 3, "return_scores": true}
                        -> {"result": [[{"document": DOC, "score": 0.9}]]}
                        and without scores {"result": [[DOC]]}
                        (Search-R1, AnySearch, StepSearch, slime)

DOC is the result of `document`. Other keys of a request are ignored, except
filters, which are refused: their client would believe that it got what it asked
for. Numbers and booleans may be text ("3", "true"), because that service
parses requests with pydantic.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import orjson
import pydantic

from anysearch_jax import types
from anysearch_jax.host import json_files

Answers = Sequence[Sequence[types.Passage]]
# Keys under which clients of other search services ask for a part of a corpus.
_FILTERS = ("filter", "filters", "where")
# Lone surrogates: valid in JSON, but not in UTF-8 or for most encoders.
_SURROGATE = re.compile("[\ud800-\udfff]")


class RequestError(ValueError):
  """A request is refused, with a status and a message for the client."""

  def __init__(self, sentence: str, status: int = 422, **headers: str):
    super().__init__(sentence)
    self.status = status
    self.headers = {k.replace("_", "-"): v for k, v in headers.items()}


class ParsedRequest(NamedTuple):
  """A parsed request.

  Attributes:
    queries: any texts, without lone surrogates.
    k: passages for each query; None (in a request also null or 0) means the
      server's default.
    is_scored: whether the response has the passages' scores.
  """

  queries: list[str]
  k: int | None
  is_scored: bool


def _limit(default: Any, sentence: str) -> Any:
  return dataclasses.field(default=default, metadata={"help": sentence})


@dataclasses.dataclass(frozen=True)
class Limits:
  """Limits of a service; the help of each is that of the command's flag."""

  topk: int = _limit(3, "Passages for each query of a request without topk.")
  max_topk: int = _limit(100, "The most passages of a query.")
  queries: int = _limit(4096, "The most queries in a request.")
  passages: int = _limit(
    65536, "The most passages of a request, all queries together."
  )
  characters: int = _limit(8192, "Characters of a query that are searched.")
  body: int = _limit(16 << 20, "The most bytes of a request.")
  queue: int = _limit(16384, "The most queries that may wait; more get 429.")
  batch: int = _limit(128, "The most queries in a search.")
  deadline: float = _limit(
    30.0, "Seconds that a request of one query may take."
  )
  # Search-R1's client posts up to 2,560 queries at once.
  per_query: float = _limit(0.2, "Seconds more for each further query.")
  connections: int = _limit(
    4096, "The most open connections, if the system allows it."
  )
  headers: float = _limit(10.0, "Seconds to receive a request's headers.")

  def __post_init__(self):
    for field in dataclasses.fields(self):
      value = getattr(self, field.name)
      if not value > 0:
        raise ValueError(f"{field.name}: found {value}, expected more than 0.")
    # The largest request fits into the queue.
    pairs = {"max_topk": "topk", "passages": "max_topk", "queue": "queries"}
    for name, least in pairs.items():
      if getattr(self, name) < getattr(self, least):
        raise ValueError(
          f"{name}: found {getattr(self, name)}, expected {least} "
          f"({getattr(self, least)}) or more."
        )

  def seconds(self, queries: int) -> float:
    """Returns the seconds that a request with so many queries may take."""
    return self.deadline + self.per_query * max(0, queries - 1)

  def check(self, request: ParsedRequest) -> int:
    """Checks a request and returns the number of passages for each query.

    Raises:
      RequestError: the request exceeds a limit.
    """
    if len(request.queries) > self.queries:
      raise RequestError(
        f"Found {len(request.queries)} queries, expected at most "
        f"{self.queries}; split the request."
      )
    k = self.topk if request.k is None else request.k
    if not 1 <= k <= self.max_topk:
      raise RequestError(
        f"Expected 1 to {self.max_topk} passages for a query, or null for "
        f"{self.topk}; the request wants {'more' if k > 0 else 'fewer'}."
      )
    if len(request.queries) * k > self.passages:
      raise RequestError(
        f"Found {len(request.queries)} queries for {k} passages each, expected "
        f"at most {self.passages} passages in all; split the request."
      )
    return k


DEFAULT = Limits()


def document(passage: types.Passage) -> dict[str, Any]:
  """Returns a passage in wire format; as in Search-R1, without title quotes."""
  placed = passage.source._asdict() if passage.source.path else {}
  return placed | {
    "id": passage.id,
    "contents": passage.contents,
    "title": passage.title.strip('"'),
    "text": passage.text,
  }


def read(body: Mapping[str, Any]) -> ParsedRequest:
  """Parses a request.

  Args:
    body: the result of `load`.

  Raises:
    RequestError: a value is missing or invalid.
  """
  return ParsedRequest(
    queries=_read(body, "queries", _TEXTS),
    k=_read(body, "topk", _COUNT) or None,
    is_scored=bool(_read(body, "return_scores", _FLAG)),
  )


def response(answers: Answers, *, is_scored: bool) -> dict[str, Any]:
  """Returns a response, as a value for `dump`.

  Args:
    answers: the passages of each query.
    is_scored: whether the response has their scores.
  """

  def format_passage(passage: types.Passage) -> dict[str, Any]:
    fields = document(passage)
    if is_scored:
      return {"document": fields, "score": passage.score}
    return fields

  return {
    "result": [list(map(format_passage, passages)) for passages in answers]
  }


def load(body: bytes) -> Mapping[str, Any]:
  """Parses the JSON object in a request's body.

  Raises:
    RequestError: the body is not a JSON object, or has a filter.
  """
  try:
    # orjson rejects lone surrogates, which models write.
    value = json_files.parse(body)
  except (ValueError, RecursionError) as error:
    raise RequestError(
      f"Found no JSON ({_clean(str(error)):.200}), expected an object."
    ) from error
  if not isinstance(value, dict):
    raise RequestError(f"Found {_kind(value)}, expected a JSON object.")
  for key in _FILTERS:
    if value.get(key):
      raise RequestError(
        f"{key}: found {_kind(value[key])}, expected none; this service "
        "searches the whole corpus. A run filters by retrieval.filter, with a "
        "collection of Milvus."
      )
  return value


def dump(value: Any) -> bytes:
  """Returns a value as JSON in UTF-8; lone surrogates become U+FFFD.

  Raises:
    TypeError, ValueError: JSON cannot represent the value.
  """
  try:
    return orjson.dumps(value)
  except TypeError:
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return _clean(text).encode()


def _clean(text: str) -> str:
  # Fast path: nearly all texts are ASCII, and `isascii` takes constant time.
  return text if text.isascii() else _SURROGATE.sub("\ufffd", text)


_Text = Annotated[str, pydantic.AfterValidator(_clean)]
# Parsers of values, and what they expect.
_TEXTS = pydantic.TypeAdapter(list[_Text]), "a list of texts"
_COUNT = pydantic.TypeAdapter(int | None), "a whole number"
_FLAG = pydantic.TypeAdapter(bool | None), "true or false"


def _read(
  body: Mapping[str, Any], key: str, field_type: tuple[Any, str]
) -> Any:
  parser, expected = field_type
  try:
    return parser.validate_python(body.get(key))
  except pydantic.ValidationError as error:
    kind = _kind(error.errors()[0]["input"])
    raise RequestError(f"{key}: found {kind}, expected {expected}.") from None


def _kind(value: Any) -> str:
  """Names the kind of a value, so that error messages stay short."""
  kinds = {list: "a list", dict: "an object", str: "text", bool: "a boolean"}
  return "nothing" if value is None else kinds.get(type(value), "a number")
