"""Any bytes get a valid JSON response, and the server continues."""

from __future__ import annotations

import asyncio
import json

import held_search
import httpx2
import hypothesis
import orjson
import pytest
from hypothesis import strategies as st

from retrieval.service import dialects, service

_TEXT = st.text(st.characters(exclude_categories=()), max_size=12)
_HOSTILE = st.sampled_from(
  ["\ud800", "\x00", "\u202e\u0627", " \n\t", "", "\U0001f600", "x" * 5000]
)


near_requests = st.fixed_dictionaries(
  {},
  optional={
    "queries": st.lists(_HOSTILE | _TEXT, max_size=4),
    "query": _HOSTILE | _TEXT | st.lists(_TEXT, max_size=3),
    **dict.fromkeys(
      ("topk", "top_k", "top_n"),
      st.integers(-1, 12) | st.sampled_from([None, 2.0, 2.5, "2", True, 1e300]),
    ),
    **dict.fromkeys(
      ("return_scores", "return_score"),
      st.booleans() | st.sampled_from([None, 1, "true"]),
    ),
    "\ud800": st.none() | _TEXT,
  },
)


def check(route, body, response):
  """Checks what must hold for the response to any bytes."""
  assert response.headers["content-type"] == "application/json"
  value = orjson.loads(response.content)  # Strict about UTF-8 and numbers.
  if response.status_code != 200:
    assert response.status_code in (413, 422)
    assert 10 < len(value["detail"]) < 400
    return
  request = json.loads(body)
  if route == "/retrieve" and "queries" in request:
    assert len(value["result"]) == len(request["queries"])
    documents = [
      item["document"] if request.get("return_scores") else item
      for some in value["result"]
      for item in some
    ]
  elif route == "/batch_search":
    if request.get("return_score"):
      value, scores = value
      assert [len(some) for some in scores] == [len(some) for some in value]
    assert len(value) == len(request["query"])
    documents = [each for some in value for each in some]
  else:
    if route == "/search" and request.get("return_score"):
      value, scores = value
      assert len(scores) == len(value)
    documents = value
  for each in documents:
    assert set(each) == {"id", "contents", "title", "text"}


@pytest.mark.parametrize(
  ("route", "blank"),
  [("/retrieve", "reject"), ("/search", "empty"), ("/batch_search", "empty")],
)
@pytest.mark.parametrize(
  "kind, examples, met", [("near", 100, {200, 422}), ("any", 30, {422})]
)
def test_any_body_gets_an_answer_or_an_error(route, blank, kind, examples, met):
  bodies = {
    "near": near_requests.map(lambda value: json.dumps(value).encode()),
    "any": st.binary(max_size=60),
  }
  values = dialects.Limits(
    blank=blank, characters=4000, max_topk=9, body=20_000
  )
  app = service.create_app(held_search.HeldSearch(), limits=values)
  client = httpx2.AsyncClient(
    transport=httpx2.ASGITransport(app), base_url="http://service"
  )
  statuses = set()
  with asyncio.Runner() as loop:

    @hypothesis.settings(max_examples=examples, deadline=None)
    @hypothesis.given(bodies[kind])
    def fuzz(body):
      response = loop.run(client.post(route, content=body))
      statuses.add(response.status_code)
      check(route, body, response)

    fuzz()
    body = {"queries": ["a"], "query": ["a"] if "batch" in route else "a"}
    assert loop.run(client.post(route, json=body)).status_code == 200
    app.state.service.close()
  assert met <= statuses
