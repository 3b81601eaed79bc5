"""Servers of parts of an index, and replicas, as one retriever."""

from __future__ import annotations

import asyncio
import json
import threading

import fake_retriever as fake
import httpx2
import numpy as np
import pytest
import retrieval_cases as cases

from anysearch_jax import types
from anysearch_jax.host import http_calls
from anysearch_jax.retrieval import http_retriever
from anysearch_jax.retrieval.index import building, opening
from anysearch_jax.retrieval.service import service

KINDS = ["bm25", "flat"]
QUERIES = ["water n3", "fire about n77", "Title 5", "passage", "number n150"]


@pytest.fixture(scope="module")
def built(tmp_path_factory):
  """Returns a function that builds an index of 200 passages of a kind."""
  folder = tmp_path_factory.mktemp("parts")

  def build(kind):
    source = cases.write(folder / "c.jsonl", 200)
    encoder = None if kind == "bm25" else cases.Encoder()
    settings = building.Settings(kind, shard=17)
    building.build(source, folder / kind, settings, encoder=encoder)
    return folder / kind

  return build


def opened(folder, kind, part=None):
  encoder = None if kind == "bm25" else cases.Encoder()
  return opening.open_index(folder, encoder=encoder, part=part)


@pytest.mark.parametrize("of", [1, 2, 5])
@pytest.mark.parametrize("kind", KINDS)
def test_parts_together_have_the_rows_and_scores_of_the_whole(built, kind, of):
  whole = opened(built(kind), kind)
  pieces = [opened(built(kind), kind, (i, of)) for i in range(of)]
  for queries in (QUERIES, QUERIES[:1], QUERIES * 4):
    for k in (1, 7, 300):
      expected = whole.hits(queries, k)
      found = [piece.hits(queries, k) for piece in pieces]
      for each, hits in zip(expected, zip(*found, strict=True), strict=True):
        rows = np.concatenate([h.rows for h in hits])
        scores = np.concatenate([h.scores for h in hits])
        assert len(set(rows.tolist())) == len(rows)
        best = np.argsort(-scores, kind="stable")[:k]
        np.testing.assert_array_equal(scores[best], each.scores)
        np.testing.assert_array_equal(rows[best], each.rows)


@pytest.mark.parametrize(
  "text", ["", "2", "2/2", "-1/2", "1/0", "a/b", "0/2/3"]
)
def test_an_invalid_part_is_refused(text):
  with pytest.raises(ValueError, match="expected I/N"):
    opening.parse_part(text)
  assert opening.parse_part("1/2") == (1, 2)


def test_more_parts_than_files_are_refused(built):
  with pytest.raises(ValueError, match="13 parts of an index with 12"):
    opened(built("flat"), "flat", (0, 13))


# Servers.


class Network(httpx2.AsyncBaseTransport):
  """Hands a request to the handler of its host; counts queries by host."""

  def __init__(self, **handlers):
    self.handlers, self.lock = handlers, threading.Lock()
    self.asked = dict.fromkeys(handlers, 0)

  async def handle_async_request(self, request):
    host = request.url.host
    with self.lock:
      if request.url.path == "/retrieve":
        self.asked[host] += len(json.loads(request.content)["queries"])
    return await self.handlers[host](request)


def app(searching):
  transport = httpx2.ASGITransport(service.create_app(searching))
  return transport.handle_async_request


def answers(request):
  async def later():
    return fake.search_r1(request)

  return later()


async def refuses(request):
  raise httpx2.ConnectError("refused", request=request)


async def sleeps(request):
  await asyncio.sleep(60)


@pytest.fixture
def connect():
  made = []

  def start(address, network, **settings):
    settings = {"patience": fake.QUICK} | settings
    settings["transport"] = network
    made.append(http_retriever.ShardedRetriever(address, **settings))
    return made[-1]

  yield start
  for each in made:
    each.close()


@pytest.mark.parametrize("kind", KINDS)
def test_services_of_all_parts_answer_as_one_index(built, connect, kind):
  folder = built(kind)
  whole = opened(folder, kind)
  parts = {f"h{i}": app(opened(folder, kind, (i, 4))) for i in range(4)}
  network = Network(**parts)
  retriever = connect("http://h0,http://h1, http://h2,http://h3", network)
  asked = [fake.ask(q, k) for q in QUERIES for k in (1, 4)]
  found = fake.search(retriever, *asked)
  assert found == [whole.search([r.query], r.k)[0] for r in asked]
  assert retriever.identity() == whole.identity


@pytest.mark.parametrize("order", ["01", "021", "001"])
def test_parts_that_are_not_one_index_are_refused(built, connect, order):
  folder = built("bm25")
  parts = [app(opened(folder, "bm25", (int(p), 3))) for p in order]
  network = Network(**{f"h{i}": part for i, part in enumerate(parts)})
  address = ",".join(f"http://{host}" for host in network.handlers)
  retriever = connect(address, network)
  with pytest.raises(types.RetrievalError, match="of one index, in this order"):
    retriever.identity()


def test_the_best_of_all_shards_are_returned(connect):
  """Shards with equal scores come in their order."""

  def of(scores):
    async def handler(request):
      hits = [
        {"document": {"id": name, "contents": f'"T"\n{name}'}, "score": score}
        for name, score in scores
      ]
      return httpx2.Response(200, json={"result": [hits]})

    return handler

  network = Network(
    a=of([("a1", 5.0), ("a2", 2.0), ("a3", 2.0)]),
    b=of([("b1", 7.0), ("b2", 2.0), ("b3", 1.0)]),
  )
  retriever = connect("http://a,http://b", network)
  (found,) = fake.search(retriever, fake.ask("q", 5))
  assert [p.id for p in found] == ["b1", "a1", "a2", "a3", "b2"]


def test_a_failed_shard_fails_the_query_and_is_named(connect):
  network = Network(a=answers, b=refuses)
  retriever = connect("http://a,http://b", network)
  found = fake.search(retriever, fake.ask("q1"), fake.ask("q2"))
  assert all(isinstance(each, types.RetrievalError) for each in found)
  assert "http://b/retrieve" in str(found[0])


@pytest.mark.parametrize("broken", [refuses, sleeps])
def test_another_replica_answers_for_one_that_fails(connect, broken):
  network = Network(a=broken, b=answers)
  patience = http_calls.Patience(deadline=2.0, retries=0, failures=100)
  retriever = connect("http://a|http://b", network, patience=patience)
  assert fake.search(retriever, fake.ask("q")) == [fake.truth(fake.ask("q"))]
  # For a while the failed one is asked last.
  for _ in range(3):
    fake.search(retriever, fake.ask("q"))
  assert network.asked == {"a": 1, "b": 4}


def test_a_replica_that_failed_is_asked_again_later(connect):
  now = [0.0]
  network = Network(a=refuses, b=answers)
  retriever = connect("http://a|http://b", network, clock=lambda: now[0])
  fake.search(retriever, fake.ask("q"))
  network.handlers["a"] = answers
  before = network.asked["a"]
  fake.search(retriever, fake.ask("q"))
  assert network.asked["a"] == before
  now[0] = fake.QUICK.cooldown + 1
  fake.search(retriever, fake.ask("q"))
  assert network.asked["a"] == before + 1


def test_replicas_share_the_queries(connect):
  network = Network(a=answers, b=answers)
  retriever = connect("http://a|http://b", network)
  asked = [fake.ask(f"q{i}") for i in range(1024)]
  assert fake.search(retriever, *asked) == [fake.truth(r) for r in asked]
  assert network.asked == {"a": 512, "b": 512}
  assert retriever.counters["queries"] == 1024


@pytest.mark.parametrize("address", ["http://a,", "http://a||http://b", ","])
def test_an_empty_address_is_refused(address):
  with pytest.raises(ValueError, match="url is invalid"):
    http_retriever.ShardedRetriever(address)
