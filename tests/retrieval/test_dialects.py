"""The wire formats, compared with what other projects' clients read."""

from __future__ import annotations

import json

import hypothesis
import orjson
import pytest
from hypothesis import strategies as st

from anysearch_jax import types
from anysearch_jax.retrieval.service import dialects

LIMA = types.Passage("7", '"Lima"', "Lima is the capital.\nOf Peru.", 0.5)
CUSCO = types.Passage("9", '"Cusco"', "Cusco was.", 0.25)
LIMA_DOCUMENT = {
  **{"id": "7", "title": "Lima", "text": "Lima is the capital.\nOf Peru."},
  "contents": '"Lima"\nLima is the capital.\nOf Peru.',
}
CUSCO_DOCUMENT = {
  **{"id": "9", "title": "Cusco", "text": "Cusco was."},
  "contents": '"Cusco"\nCusco was.',
}
FOUND = [(LIMA, CUSCO), ()]

any_text = st.text(st.characters(exclude_categories=()))


DOCUMENTS = [LIMA_DOCUMENT, CUSCO_DOCUMENT]
SCORED = [
  {"document": LIMA_DOCUMENT, "score": 0.5},
  {"document": CUSCO_DOCUMENT, "score": 0.25},
]


@pytest.mark.parametrize(
  "is_scored, passages", [(True, SCORED), (False, DOCUMENTS)]
)
def test_a_request_of_search_r1_gets_its_answer(is_scored, passages):
  body = {"queries": ["a", "b"], "topk": 2}
  if is_scored:
    body["return_scores"] = True
  asked = dialects.read(body)
  assert asked == (["a", "b"], 2, is_scored)
  response = dialects.response(FOUND, is_scored=asked.is_scored)
  assert response == {"result": [passages, []]}


@pytest.mark.parametrize(
  "value, k",
  [
    *[(None, None), (0, None), (0.0, None), ("0", None)],
    *[(3.0, 3), (-1, -1), ("3", 3), (" 3 ", 3), ("3.0", 3), (True, 1)],
  ],
)
def test_null_and_zero_leave_the_count_to_the_server(value, k):
  assert dialects.read({"queries": ["a"], "topk": value}).k == k


@pytest.mark.parametrize(
  "value, scored",
  [("true", True), ("1", True), (1, True), ("False", False), ("no", False)],
)
def test_a_flag_may_be_text_or_a_number(value, scored):
  asked = dialects.read({"queries": ["a"], "return_scores": value})
  assert asked.is_scored == scored


@pytest.mark.parametrize("key", ["filter", "filters", "where"])
def test_a_filter_is_refused_and_not_ignored(key):
  body = {"queries": ["a"], key: {"year": 2018}}
  with pytest.raises(
    dialects.RequestError, match=f"^{key}: found an object, .*whole corpus"
  ):
    dialects.load(json.dumps(body).encode())
  for nothing in (None, {}, [], ""):
    body[key] = nothing
    assert dialects.load(json.dumps(body).encode()) == body


@pytest.mark.parametrize(
  "body, sentence",
  [
    ({}, "queries: found nothing, expected a list"),
    ({"queries": "a"}, "queries: found text"),
    ({"queries": ["a", 7]}, "found a number"),
    (
      {"queries": ["a"], "topk": "three"},
      "topk: found text, expected a whole number",
    ),
    ({"queries": [], "topk": 2.5}, "found a number"),
    ({"queries": [], "topk": float("nan")}, "a number"),
    (
      {"queries": [], "return_scores": 2},
      "return_scores: found a number, expected true or false",
    ),
    ({"query": "a"}, "queries: found nothing, expected a list"),
  ],
)
def test_invalid_request_is_an_error(body, sentence):
  with pytest.raises(dialects.RequestError, match=sentence):
    dialects.read(body)


@hypothesis.settings(max_examples=100, deadline=None)
@hypothesis.given(any_text, st.booleans())
def test_any_text_is_written_as_strict_json(text, escaped):
  body = json.dumps({"text": text}, ensure_ascii=escaped)
  body = body.encode("utf-8", "surrogatepass")
  read = dialects.load(body)["text"]
  assert read == json.loads(body)["text"]
  written = orjson.loads(dialects.dump({"text": read}))["text"]
  assert written == "".join(
    "\ufffd" if "\ud800" <= each <= "\udfff" else each for each in read
  )


@pytest.mark.parametrize(
  "body",
  [
    *(b"", b"{", b"[1]", b'"text"', b"null", b"\xff\xfe", b"\xef\xbb\xbf"),
    *(b"{'a': 1}", b'{"a":' * 5000, b"[" * 200_000),
    b'{"a": 1' + b"0" * 6000 + b"}",
  ],
  ids=range(11),
)
def test_body_without_an_object_is_an_error(body):
  with pytest.raises(dialects.RequestError, match="expected .* ?object"):
    dialects.load(body)


def test_non_finite_numbers_are_refused():
  # Beside a lone surrogate, so that the slower writer has it.
  with pytest.raises(ValueError):
    dialects.dump({"text": "\ud800", "score": float("inf")})
