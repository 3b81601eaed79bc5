"""Hostile requests to the search service, and hostile answers from services."""

from __future__ import annotations

import asyncio
import email.utils
import json
import math

import hostile
import httpx2
import hypothesis
import orjson
import pytest

from anysearch_jax import types
from anysearch_jax.host import http_calls
from anysearch_jax.retrieval import http_retriever
from anysearch_jax.retrieval.service import dialects, service

CALLER = http_calls.Caller(secret="key", advice="")
LIMITS = dialects.Limits(
  characters=200, max_topk=9, queries=3, passages=20, body=4000
)
KEYS = (
  *("queries", "query", "topk", "top_k", "top_n"),
  *("return_scores", "return_score", "\ud800", "Query"),
)
WORDS = ("queries", "query", "result", "error", "detail")


def passage(tape):
  return types.Passage(tape.text(1), tape.text(3), tape.text(), 0.5)


def body(tape):
  """Draws nearly a request, as JSON that may be damaged, or any bytes."""
  values = {tape.pick(KEYS): tape.value() for _ in range(tape.below(4))}
  several = {"queries": tape.some(lambda: tape.text(4), 4)}
  one, two = tape.text(4), tape.some(lambda: tape.text(4), 2)
  values |= tape.pick(({}, several, {"query": one}, {"query": two}))
  data = hostile.as_json(values, escaped=tape.pick((True, False)))
  return tape.pick((data, data, tape.damage(data), tape.raw()))


@hostile.cases(8_000)
@hypothesis.given(hostile.tapes(80))
def test_any_answer_of_a_service_is_a_value_or_an_error(tape):
  values = {tape.pick(WORDS): tape.value() for _ in range(2)}
  data = hostile.as_json(values, escaped=tape.pick((True, False)))
  data = tape.pick((data, data, tape.damage(data), tape.raw()))
  try:
    value = CALLER._parse("http://x", data)
  except types.RetrievalError as error:
    assert "http://x: found" in str(error) and len(str(error)) < 700
  else:
    again = json.loads(data, parse_constant=lambda name: pytest.fail(name))
    assert repr(value) == repr(again)
  said = http_calls.message(data, CALLER.redact)
  assert 0 < len(said) <= 300
  assert said.isprintable()
  date = email.utils.format_datetime(
    email.utils.parsedate_to_datetime("Fri, 14 Mar 2031 15:09:26 +0000")
  )
  day = tape.damage(date.encode()).decode("latin-1")
  header = tape.pick((day, tape.text(3), tape.raw(2).decode("latin-1")))
  seconds = http_calls.retry_after({"retry-after": header})
  assert 0 <= seconds < math.inf


class Found:
  """A search that finds given passages."""

  identity = {"kind": "told"}
  health_fields: dict[str, object] = {}

  def __init__(self):
    self.told, self.asked = [], []

  def __len__(self):
    return 1

  def search(self, queries, k):
    self.asked += queries
    return [self.told[:k] for _ in queries]


def test_hostile_documents_come_through_the_wire():
  search = Found()
  app = service.create_app(search)
  retriever = http_retriever.HttpRetriever(
    "http://service", transport=httpx2.ASGITransport(app)
  )
  met = set()

  async def ask(request):
    return await retriever.search_many([request])

  with asyncio.Runner() as loop:

    @hostile.cases(2_500)
    @hypothesis.given(hostile.tapes(100))
    def through(tape):
      search.told = tape.some(lambda: passage(tape), 3)
      search.asked = []
      query = tape.text(4)
      (answer,) = loop.run(ask(types.SearchRequest(query, 3)))
      met.add(not query.strip())
      if not query.strip():
        assert answer == () and not search.asked
        return
      assert search.asked == [hostile.halved(hostile.whole(query))]
      assert [each.contents for each in answer] == [
        hostile.halved(each.contents) for each in search.told
      ]
      assert [each.id for each in answer] == [
        hostile.halved(p.id) for p in search.told
      ]

    through()
  retriever.close()
  app.state.service.close()
  assert met == {True, False}


async def call(app, scope, parts):
  """Returns the status and body of an app's answer."""
  sent, parts = [], list(parts)

  async def receive():
    if parts:
      part = parts.pop(0)
      return {"type": "http.request", "body": part, "more_body": bool(parts)}
    await asyncio.sleep(3600)

  async def send(message):
    sent.append(message)

  await asyncio.wait_for(app(scope, receive, send), 30)
  start, *rest = sent
  return start["status"], b"".join(each["body"] for each in rest)


def test_hostile_headers_are_answered(caplog):
  search = Found()
  app = service.create_app(search, limits=LIMITS, token="secret")
  names = (
    *(b"authorization", b"content-length", b"content-type", b"cookie"),
    *(b"transfer-encoding", b"content-encoding", b"x-forwarded-for", b"host"),
  )
  values = (b"Bearer secret", b"bearer secre", b"9" * 5000, b"\xb2", b"")
  met = set()
  with asyncio.Runner() as loop:

    @hostile.cases(2_500)
    @hypothesis.given(hostile.tapes(120))
    def answered(tape):
      def header():
        return tape.pick(names), tape.pick((tape.pick(values), tape.raw(3)))

      headers = tape.some(header, 4)
      headers += tape.pick(([], [(b"authorization", b"Bearer secret")]))
      # Most requests search, so that all refusals of a search are met.
      paths = ("/health", "/metrics", "/" + tape.text(3))
      paths = (*["/retrieve"] * 3, *paths)
      scope = {
        **{"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1"},
        "method": tape.pick(("POST", "POST", "POST", "GET", "TRACE")),
        **{"scheme": "http", "path": tape.pick(paths), "root_path": ""},
        **{"query_string": tape.raw(2), "headers": headers},
        **{"client": None, "server": ("service", 80)},
      }
      search.told = [passage(tape)]
      parts = tape.some(lambda: body(tape), 3, least=1)
      parts += tape.pick(([], [], [], [b" " * (LIMITS.body + 1)]))
      status, said = loop.run(call(app, scope, parts))
      met.add(status)
      assert status in (200, 401, 404, 405, 413, 422), (status, said)
      if scope["path"] == "/retrieve":
        orjson.loads(said)
        # The first of a name is the one that is read.
        first = dict(reversed(headers)).get(b"authorization", b"")
        scheme, _, token = first.partition(b" ")
        right = scheme.lower() == b"bearer" and token == b"secret"
        assert status != 200 or right
        assert (status != 401) == right or status == 405

    answered()
  app.state.service.close()
  assert met == {200, 401, 404, 405, 413, 422}
  assert not [each for each in caplog.records if each.levelname == "ERROR"]
