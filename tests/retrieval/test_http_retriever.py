"""The HTTP client of retrieval servers: requests, replies and bisection."""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import math

import fake_retriever as fake
import httpx2
import hypothesis
import pytest
from hypothesis import strategies as st

from anysearch_jax import types
from anysearch_jax.host import http_calls
from anysearch_jax.retrieval import http_retriever
from anysearch_jax.retrieval.service import service


@pytest.fixture
def connect():
  with fake.clients() as start:
    yield start


def test_a_search_is_what_search_r1s_own_client_sends(connect):
  retriever = connect(fake.search_r1)
  asked = fake.ask("a", 2)
  assert asyncio.run(retriever.search(asked)) == fake.truth(asked)
  (request,) = retriever.sent
  assert (request.method, str(request.url)) == ("POST", f"{fake.URL}/retrieve")
  sent = {"queries": ["a"], "topk": 2, "return_scores": True}
  assert fake.bodies(retriever) == [sent]


ASKED = st.builds(fake.ask, st.sampled_from("abcdef"), st.integers(1, 3))


@hypothesis.settings(max_examples=25, deadline=None)
@hypothesis.given(st.lists(ASKED, max_size=12), st.integers(1, 5))
def test_many_searches_are_few_calls_answered_in_order(asked, batch):
  seen = []

  def handler(request):
    seen.append(json.loads(request.content))
    return fake.search_r1(request)

  retriever = http_retriever.HttpRetriever(
    fake.URL, batch=batch, transport=httpx2.MockTransport(handler)
  )
  try:
    assert fake.search(retriever, *asked) == list(map(fake.truth, asked))
  finally:
    retriever.close()
  sizes = {k: sum(r.k == k for r in asked) for k in (1, 2, 3)}
  assert len(seen) == sum(math.ceil(size / batch) for size in sizes.values())
  assert all(len(body["queries"]) <= batch for body in seen)
  assert retriever.counters["queries"] == len(asked)
  assert retriever.counters["requests"] == len(seen)


@pytest.mark.parametrize(
  "url",
  [
    *("", "h:8000", "ftp://h", "http://"),
    *("http://me:secret@h", "http://h?k=secret"),
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


def test_a_named_corpus_and_no_passages_are_refused(connect):
  retriever = connect(fake.search_r1)
  with pytest.raises(ValueError, match="'news'.*one retriever for each"):
    fake.search(retriever, fake.ask("a", corpus="news"))
  with pytest.raises(ValueError, match="k=0"):
    fake.search(retriever, fake.ask("a", 0))


def test_it_serves_one_event_loop_after_the_other_and_several_at_once(connect):
  retriever = connect(fake.search_r1)
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

  patience = http_calls.Patience(concurrency=3)
  retriever = connect(handler, batch=1, patience=patience)
  fake.search(retriever, *(fake.ask(str(i)) for i in range(10)))
  assert running == [0, 3]


# Bisection.


def failing(bad, how):
  """Makes a server that fails for batches with a `bad` query."""

  def handler(request):
    if any(map(bad, json.loads(request.content)["queries"])):
      return how(request)
    return fake.search_r1(request)

  return handler


REFUSES = fake.status(422, '{"detail": "Query 0 is blank."}')
FAILURES = {
  "422": REFUSES,
  "500": fake.status(500),
  "NaN": fake.status(200, '{"result": [NaN]}'),
  "too few": fake.status(200, '{"result": []}'),
}


@pytest.mark.parametrize("bad", [{7}, {0, 1}, {30, 31}, set(range(0, 32, 3))])
def test_refused_query_fails_alone(connect, bad):
  retriever = connect(failing(lambda query: int(query) in bad, REFUSES))
  requests = [fake.ask(str(i)) for i in range(32)]
  found = fake.search(retriever, *requests)
  for i, (request, answer) in enumerate(zip(requests, found, strict=True)):
    if i in bad:
      assert isinstance(answer, http_calls.RefusedError)
      assert answer.status == 422
    else:
      assert answer == fake.truth(request)


@pytest.mark.parametrize("how", FAILURES)
def test_one_query_that_breaks_a_server_fails_alone_in_201(connect, how):
  retriever = connect(failing("77".__eq__, FAILURES[how]))
  requests = [fake.ask(str(i)) for i in range(201)]
  found = fake.search(retriever, *requests)
  failed = [r.query for r, a in zip(requests, found) if a != fake.truth(r)]
  assert failed == ["77"]
  assert isinstance(found[77], http_calls.AnswerError)
  assert retriever.counters["failures"] == 1
  assert retriever.counters["splits"] == 8
  assert len(retriever.sent) < 20


@pytest.mark.parametrize("how", FAILURES)
def test_server_that_always_fails_is_asked_a_few_times(connect, how):
  retriever = connect(FAILURES[how], batch=512)
  found = fake.search(retriever, *(fake.ask(str(i)) for i in range(512)))
  assert all(isinstance(answer, http_calls.AnswerError) for answer in found)
  assert len(retriever.sent) == 17 and retriever.counters["failures"] < 9


def test_transient_failure_is_retried_once(connect):
  retriever = connect(fake.fails_first(1, fake.status(500)))
  request = fake.ask("a")
  assert fake.search(retriever, request) == [fake.truth(request)]
  assert retriever.counters["failures"] == 0


# Tokens and identities.


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


@pytest.mark.parametrize(
  ("how", "sentence"),
  [(fake.broken, "tried 3 times"), (fake.status(403), "HTTP 403")],
)
def test_a_server_out_of_reach_has_no_identity(connect, how, sentence):
  with pytest.raises(types.RetrievalError, match=sentence):
    connect(how).identity()


class Letters:
  """A search whose passages are the queries."""

  identity = {"kind": "letters"}
  health_fields: dict[str, object] = {}

  def __len__(self):
    return 26

  def search(self, queries, k):
    return [fake.truth(fake.ask(query, k)) for query in queries]


class Documents(Letters):
  def search(self, queries, k):
    source = types.Source("n/a.pdf", 2, "One > Two")
    return [(types.Passage("a.pdf#1", "A", "b", 1.0, source),) for _ in queries]


def test_passages_of_documents_keep_their_places_over_the_service():
  retriever = http_retriever.HttpRetriever(
    fake.URL, transport=httpx2.ASGITransport(service.create_app(Documents()))
  )
  ((found,),) = fake.search(retriever, fake.ask("a", 1))
  assert found.source == ("n/a.pdf", 2, "One > Two")
  retriever.close()


def test_it_understands_the_service_of_this_package():
  """Tests identity, batches and a refused query over the service's app."""
  retriever = http_retriever.HttpRetriever(
    fake.URL, transport=httpx2.ASGITransport(service.create_app(Letters()))
  )
  assert retriever.identity() == {"kind": "letters"}
  requests = [fake.ask("a"), fake.ask("naïve 東京", 1), fake.ask("c")]
  *found, refused = fake.search(retriever, *requests, fake.ask("d", 101))
  assert found == [fake.truth(request) for request in requests]
  assert isinstance(refused, http_calls.RefusedError)
  assert "Expected 1 to 100 passages" in str(refused)
  retriever.close()


# Replies.


def replied(connect, content):
  """Returns the results of two queries with k=2 for a given reply."""
  body = content if isinstance(content, bytes) else json.dumps(content).encode()
  retriever = connect(lambda request: httpx2.Response(200, content=body))
  return fake.search(retriever, fake.ask("a", 2), fake.ask("b", 2))


def with_hit(**changes):
  return {"result": [[fake.hit("a", 0) | changes], []]}


def with_document(**changes):
  return with_hit(document=fake.hit("a", 0)["document"] | changes)


HIT = 'expected a hit such as {"document"'
LIES = {
  "a page": (b"<html>Sign in</html>", "'<html>Sign in</html>'.*expected JSON"),
  "deep": (b"[" * 100_000, "expected JSON"),
  "NaN": (b'{"result": [[{"score": NaN}], []]}', "it says NaN"),
  "a list": ([], r"found \[\], expected an object with a list"),
  "no list": ({"result": None}, "expected an object with a list"),
  "an answer less": ({"result": []}, "'0 answers', expected 1"),
  "an answer more": ({"result": [[], [], []]}, "'3 answers', expected 1"),
  "a hit more": (
    {"result": [[fake.hit("a", i) for i in range(3)], []]},
    "'3 hits', expected at most 2",
  ),
  "bare documents": ({"result": [[fake.hit("a", 0)["document"]], []]}, HIT),
  "no contents": (with_hit(document={"id": "1"}), "at 0/document/contents"),
  "half a pair": (with_document(contents="a\n\ud83d"), HIT),
  "no score": (with_hit(score=None), "found None.*at 0/score.*valid number"),
  "a true score": (with_hit(score=True), "found True.*valid number"),
  "a score too large": (
    b'{"result": [[{"document": {"contents": "a"}, "score": 1e999}], []]}',
    "found inf.*finite number",
  ),
  "an id of a flag": (with_document(id=True), "found True.*at 0/document/id"),
}


@pytest.mark.parametrize("name", LIES)
def test_malformed_reply_is_refused_and_quoted(connect, name):
  content, sentence = LIES[name]
  first, second = replied(connect, content)
  with pytest.raises(types.RetrievalError, match=sentence):
    raise first
  assert second == () or isinstance(second, types.RetrievalError)


def test_a_wrong_hit_fails_its_own_query_only(connect):
  retriever = connect(fake.status(200, json.dumps(with_hit(score=None))))
  first, second = fake.search(retriever, fake.ask("a", 2), fake.ask("b", 2))
  assert "valid number" in str(first)
  assert second == ()
  assert len(retriever.sent) == 1
  assert retriever.counters["failures"] == 1


def test_replies_of_other_servers_are_accepted(connect):
  """BM25 of Search-R1 has no ids, others add keys, scores may ascend."""
  contents = "one line"
  hits = [
    {"document": {"contents": contents, "title": "t"}, "score": -1},
    {"document": {"contents": "a\nb\nc", "id": 7}, "score": 2.5, "x": 1},
  ]
  others = [{"document": {"contents": contents}, "score": 0}]
  found = replied(connect, {"result": [hits, others], "took": 3})
  (first, second), (third,) = found
  assert (first.title, first.text, first.score) == ("one line", "", -1.0)
  assert (second.id, second.title, second.text) == ("7", "a", "b\nc")
  # Passages without ids are identified by their contents.
  assert first.id == third.id != ""
