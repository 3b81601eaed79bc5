"""The HTTP client of retrieval servers: its requests and its bisection."""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import logging
import math

import fake_retriever as fake
import httpx2
import hypothesis
import pytest
from hypothesis import strategies as st

from anysearch_jax import types
from anysearch_jax.host import http_calls
from retrieval import http_retriever
from retrieval.service import dialects, service


@pytest.fixture
def connect():
  with fake.clients() as start:
    yield start


def test_a_search_is_what_search_r1s_own_client_sends(connect):
  retriever = connect(fake.search_r1)
  assert asyncio.run(retriever.search(fake.ask("a", 2))) == fake.truth(
    fake.ask("a", 2)
  )
  (request,) = retriever.sent
  assert (request.method, str(request.url)) == ("POST", f"{fake.URL}/retrieve")
  assert fake.bodies(retriever) == [
    {"queries": ["a"], "topk": 2, "return_scores": True}
  ]


@hypothesis.settings(max_examples=40, deadline=None)
@hypothesis.given(
  asked=st.lists(
    st.builds(fake.ask, st.sampled_from("abcdef"), st.integers(1, 3)),
    max_size=12,
  ),
  batch=st.integers(1, 5),
)
def test_many_searches_are_few_calls_answered_in_order(asked, batch):
  seen = []

  def handler(request):
    seen.append(json.loads(request.content))
    return fake.search_r1(request)

  retriever = http_retriever.HttpRetriever(
    fake.URL, batch=batch, transport=httpx2.MockTransport(handler)
  )
  try:
    assert fake.search(retriever, *asked) == [
      fake.truth(request) for request in asked
    ]
  finally:
    retriever.close()
  sizes = {k: sum(r.k == k for r in asked) for k in (1, 2, 3)}
  assert len(seen) == sum(math.ceil(size / batch) for size in sizes.values())
  assert all(len(body["queries"]) <= batch for body in seen)
  assert retriever.counters["queries"] == len(asked)
  assert retriever.counters["requests"] == len(seen)


def test_a_url_may_name_the_route_as_search_r1s_flag_does(connect):
  for url in ("http://h:1/retrieve", "http://h:1/retrieve/", "http://h:1/"):
    retriever = http_retriever.HttpRetriever(url)
    assert retriever.url == "http://h:1"
    retriever.close()


@pytest.mark.parametrize(
  "url",
  [
    "",
    "h:8000",
    "ftp://h",
    "http://",
    "http://me:secret@h",
    "http://h?k=secret",
  ],
)
def test_invalid_url_is_refused_without_showing_it(url):
  with pytest.raises(ValueError, match="url") as caught:
    http_retriever.HttpRetriever(url)
  assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
  "query", ["", "naïve 東京", 'half \ud83d, nul \0, "quoted"\n']
)
def test_any_text_can_be_asked_for(connect, query):
  nothing = httpx2.Response(200, json={"result": [[]]})
  retriever = connect(lambda request: nothing)
  assert fake.search(retriever, fake.ask(query)) == [()]
  assert fake.bodies(retriever)[0]["queries"] == [query]


def test_one_corpus_is_searched_by_its_name_or_none(connect):
  retriever = connect(fake.search_r1, corpus="wiki")
  found = fake.search(retriever, fake.ask("a"), fake.ask("a", corpus="wiki"))
  assert found == [fake.truth(fake.ask("a"))] * 2
  with pytest.raises(ValueError, match="'news'.*only 'wiki'"):
    fake.search(retriever, fake.ask("a", corpus="news"))
  with pytest.raises(ValueError, match="k=0"):
    fake.search(retriever, fake.ask("a", 0))


def test_it_serves_one_event_loop_after_the_other_and_several_at_once(connect):
  retriever = connect(fake.search_r1)
  for _ in range(3):
    assert asyncio.run(retriever.search(fake.ask("a"))) == fake.truth(
      fake.ask("a")
    )
  with concurrent.futures.ThreadPoolExecutor(4) as pool:
    asked = [[fake.ask(f"{i}/{j}") for j in range(3)] for i in range(8)]
    found = pool.map(lambda requests: fake.search(retriever, *requests), asked)
    assert list(found) == [[fake.truth(r) for r in some] for some in asked]


def test_concurrent_calls_are_limited(connect):
  running = [0, 0]

  async def handler(request):
    running[0] += 1
    running[1] = max(running)
    await asyncio.sleep(0.005)
    running[0] -= 1
    return fake.search_r1(request)

  retriever = connect(
    handler, batch=1, patience=http_calls.Patience(concurrency=3)
  )
  fake.search(retriever, *(fake.ask(str(i)) for i in range(10)))
  assert running == [0, 3]


def picky(bad):
  """Makes a validating server that refuses batches with a `bad` query."""

  def handler(request):
    if any(map(bad, json.loads(request.content)["queries"])):
      return httpx2.Response(422, json={"detail": "Query 0 is blank."})
    return fake.search_r1(request)

  return handler


@pytest.mark.parametrize("bad", [{7}, {0, 1}, {30, 31}, set(range(0, 32, 3))])
def test_refused_query_fails_alone(connect, bad):
  retriever = connect(picky(lambda query: int(query) in bad))
  requests = [fake.ask(str(i)) for i in range(32)]
  found = fake.search(retriever, *requests)
  for i, (request, answer) in enumerate(zip(requests, found, strict=True)):
    if i in bad:
      assert isinstance(answer, http_calls.RefusedError)
      assert answer.status == 422
    else:
      assert answer == fake.truth(request)


def failing(bad, how):
  """Makes a server that fails for batches with a `bad` query."""

  def handler(request):
    if any(map(bad, json.loads(request.content)["queries"])):
      return how(request)
    return fake.search_r1(request)

  return handler


FAILURES = {
  **{str(n): fake.status(n) for n in (400, 413, 422, 500, 501)},
  "NaN": fake.status(200, '{"result": [NaN]}'),
  "too few": fake.status(200, '{"result": []}'),
}


@pytest.mark.parametrize("how", FAILURES)
def test_one_query_that_breaks_a_server_fails_alone_in_201(connect, how):
  retriever = connect(failing("77".__eq__, FAILURES[how]))
  requests = [fake.ask(str(i)) for i in range(201)]
  for _ in range(2):  # Now the client knows a query that has an answer.
    found = fake.search(retriever, *requests)
    failed = [r.query for r, a in zip(requests, found) if a != fake.truth(r)]
    assert failed == ["77"]
    assert isinstance(found[77], http_calls.AnswerError)
  assert retriever.counters["failures"] == 2
  assert retriever.counters["splits"] == 16
  assert len(retriever.sent) < 40


@pytest.mark.parametrize("how", FAILURES)
@pytest.mark.parametrize("known", [False, True])
def test_server_that_always_fails_is_asked_a_few_times(connect, how, known):
  wrong = [lambda query: not known or query != "good"]
  retriever = connect(failing(lambda q: wrong[0](q), FAILURES[how]), batch=512)
  if known:
    fake.search(retriever, fake.ask("good"))
    wrong[0] = lambda query: True
  found = fake.search(retriever, *(fake.ask(str(i)) for i in range(512)))
  assert all(isinstance(answer, http_calls.AnswerError) for answer in found)
  # A batch, and the query that had an answer.
  sent, failures = len(retriever.sent), retriever.counters["failures"]
  assert (sent, failures) == (3, 1) if known else sent < 40 and failures < 9


def test_a_dead_server_is_not_asked_for_the_parts_of_a_batch(connect):
  retriever = connect(fake.broken)
  fake.search(retriever, *(fake.ask(str(i)) for i in range(201)))
  assert len(retriever.sent) == 1 + fake.QUICK.retries
  assert retriever.counters["splits"] == 0


def test_bad_queries_do_not_keep_good_ones_from_being_asked(connect):
  patience = http_calls.Patience(retries=0, failures=2, pause=0.001)
  retriever = connect(
    failing(lambda q: q.startswith("bad"), fake.status(500)), patience=patience
  )
  good = fake.ask("good")
  assert fake.search(retriever, good) == [fake.truth(good)]
  for i in range(5):
    (failed,) = fake.search(retriever, fake.ask(f"bad{i}"))
    assert "HTTP 500" in str(failed)
  assert fake.search(retriever, good) == [fake.truth(good)]


def test_a_server_that_breaks_is_left_alone_after_some_batches(connect):
  """Holds whether it has answered before or not; each batch counts once."""
  patience = http_calls.Patience(retries=0, failures=3, pause=0.001)
  broken = []
  retriever = connect(
    failing(lambda q: broken, fake.status(500)),
    patience=patience,
    clock=fake.Clock(),
  )
  requests = [fake.ask(str(i)) for i in range(9)]
  fake.search(retriever, *requests)
  broken.append(True)
  for _ in range(5):
    found = fake.search(retriever, *requests)
  assert "3 calls in a row failed" in str(found[0])
  assert len(retriever.sent) == 1 + 3 * 2


def test_transient_failure_is_retried_once(connect):
  retriever = connect(fake.fails_first(1, fake.status(500)))
  request = fake.ask("a")
  assert fake.search(retriever, request) == [fake.truth(request)]
  assert retriever.counters["failures"] == 0


def test_server_that_refuses_everything_is_not_asked_for_every_query(connect):
  retriever = connect(picky(lambda query: True), batch=512)
  found = fake.search(retriever, *(fake.ask(str(i)) for i in range(512)))
  assert all(isinstance(answer, http_calls.RefusedError) for answer in found)
  assert len(retriever.sent) < 40


def test_a_token_is_sent_and_shown_nowhere(connect, monkeypatch, caplog):
  caplog.set_level(logging.DEBUG)
  monkeypatch.setenv("RETRIEVER_TOKEN", "s3cret-token")

  def handler(request):
    token = request.headers["authorization"]
    return httpx2.Response(403, json={"detail": f"Not for {token}."})

  retriever = connect(handler, token_variable="RETRIEVER_TOKEN")
  sentence = fake.failure(retriever)
  assert sentence.endswith("HTTP 403: Not for Bearer ....")
  (request,) = retriever.sent
  assert request.headers["authorization"] == "Bearer s3cret-token"
  with fake.listening(fake.die_at_once) as url:
    over_sockets = http_retriever.HttpRetriever(
      url, token_variable="RETRIEVER_TOKEN", patience=fake.QUICK
    )
    fake.failure(over_sockets)
    over_sockets.close()
  assert caplog.records
  assert "s3cret" not in caplog.text + repr(retriever) + sentence


@pytest.mark.parametrize("value", [None, "", " ", "two words", "é", "a\nb"])
def test_a_token_that_cannot_be_sent_is_refused_by_name(monkeypatch, value):
  monkeypatch.delenv("RETRIEVER_TOKEN", raising=False)
  if value is not None:
    monkeypatch.setenv("RETRIEVER_TOKEN", value)
  with pytest.raises(ValueError, match="RETRIEVER_TOKEN") as caught:
    http_retriever.HttpRetriever(fake.URL, token_variable="RETRIEVER_TOKEN")
  assert not (value or "").strip() or value not in str(caught.value)


@pytest.mark.parametrize(
  ("reply", "expected"),
  [
    (
      httpx2.Response(200, json={"identity": {"kind": "bm25"}}),
      {"kind": "bm25"},
    ),
    (httpx2.Response(200, json={"status": "ok"}), None),
    (httpx2.Response(200, text="OK"), None),
    (httpx2.Response(404), None),
    (httpx2.Response(405), None),
  ],
  ids=str,
)
def test_identity_is_the_servers_or_its_address(connect, reply, expected):
  retriever = connect(lambda request: reply)
  assert retriever.identity() == (expected or {"kind": "http", "url": fake.URL})
  assert [(r.method, r.url.path) for r in retriever.sent] == [
    ("GET", "/health")
  ]


def test_a_server_out_of_reach_has_no_identity(connect):
  with pytest.raises(types.RetrievalError, match="tried 3 times"):
    connect(fake.broken).identity()


@pytest.mark.parametrize(
  "settings",
  [{"deadline": 0}, {"retries": -1}, {"concurrency": 0}, {"pause": math.nan}],
  ids=str,
)
def test_invalid_patience_is_refused_by_name(settings):
  (name,) = settings
  with pytest.raises(ValueError, match=f"{name}: found"):
    http_calls.Patience(**settings)


class Letters:
  """A search whose passages are the queries."""

  identity = {"kind": "letters"}

  def __len__(self):
    return 26

  def search(self, queries, k):
    return [fake.truth(fake.ask(query, k)) for query in queries]


def test_it_understands_the_service_of_this_package():
  """Tests identity, batches and a refused query over the service's app."""
  retriever = http_retriever.HttpRetriever(
    fake.URL,
    transport=httpx2.ASGITransport(
      service.create_app(Letters(), limits=dialects.Limits(blank="reject"))
    ),
  )
  assert retriever.identity() == {"kind": "letters"}
  requests = [fake.ask("a"), fake.ask("naïve 東京", 1), fake.ask("c")]
  *found, refused = fake.search(retriever, *requests, fake.ask(" "))
  assert found == [fake.truth(request) for request in requests]
  assert isinstance(refused, http_calls.RefusedError)
  assert "blank" in str(refused)
  retriever.close()
