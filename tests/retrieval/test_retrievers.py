"""The retriever that a configuration names, as episodes use it."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest
import retrieval_cases as cases
import small_run

from anysearch_jax import config as config_lib
from anysearch_jax import types
from anysearch_jax.rollout import searching
from launch import retrievers
from retrieval import recording
from retrieval.index import building, opening
from retrieval.service import dialects, service


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  """Makes a BM25 index over twenty passages."""
  folder = tmp_path_factory.mktemp("index")
  source = cases.write(folder / "c.jsonl")
  building.build(source, folder / "bm25", building.Settings("bm25"))
  return folder / "bm25"


def config(**values):
  made = config_lib.RetrievalConfig(**values)
  return dataclasses.replace(small_run.CONFIG, retrieval=made)


def ask(retriever, *queries, k=3, corpus=""):
  async def run():
    return await retriever.search_many(
      [types.SearchRequest(query, k, corpus) for query in queries]
    )

  return asyncio.run(run())


def test_an_index_answers_episodes(folder):
  made = retrievers.make(config(kind="index", index=str(folder)), None)
  (first,) = ask(made, "number n7", k=1)
  assert [(p.id, p.title) for p in first] == [("7", '"Title 7"')]
  identity = opening.open_index(folder).identity
  assert made.identity()["identity"] == identity
  with pytest.raises(ValueError, match="of corpus 'other'"):
    ask(made, "n7", corpus="other")


def test_without_an_entry_the_questions_own_passages_are_searched():
  own = object()
  assert retrievers.make(config(), own) is own


def test_a_run_is_repeated_from_its_log_with_no_retriever(folder, tmp_path):
  log = str(tmp_path / "answers.sqlite")
  recorded = retrievers.make(
    config(kind="index", index=str(folder), log=log), None
  )
  seen = ask(recorded, "number n7", "water")
  strict = retrievers.make(
    config(kind="index", index="gone", log=log, log_mode="strict"), None
  )
  told = ask(strict, "water", "number n7", "never asked")
  for mine, theirs in zip(told[:2], seen[::-1], strict=True):
    assert [(p.id, p.title, p.text, p.score) for p in mine] == [
      (p.id, p.title, p.text, p.score) for p in theirs
    ]
  # Not a failed episode: this run cannot be had from this log.
  assert isinstance(told[2], recording.MissError)
  assert "never asked" in str(told[2])
  assert strict.identity() == recorded.identity()


def test_failures_reach_episodes_as_their_own_kind(tmp_path):
  # Nothing listens there, and no time is lost on it.
  made = config(kind="http", url="http://127.0.0.1:9")
  try:
    retriever = retrievers.make(made, None)
  except ValueError as error:
    assert "retrieval: " in str(error)
  else:
    with pytest.raises(types.RetrievalError):
      raise ask(retriever, "x")[0]


def test_searcher_accepts_the_retriever(folder):
  made = retrievers.make(config(kind="index", index=str(folder)), None)
  searcher = searching.BatchingRetriever(made, config_lib.SearchConfig())

  async def run():
    return await asyncio.gather(
      *(searcher.search(types.SearchRequest("n3", 2, "")) for _ in range(5))
    )

  answers = asyncio.run(run())
  assert all(answer == answers[0] for answer in answers)
  assert searcher.counters["batched_queries"] == 1


@pytest.mark.parametrize(
  ("values", "message"),
  [
    ({"kind": "faiss"}, "retrieval.kind: found 'faiss', expected one of lex"),
    ({"kind": "http"}, "retrieval.url: found '' with retrieval.kind 'http'"),
    ({"url": "http://a"}, "retrieval.url: found 'http://a' with retrieval.kin"),
    ({"kind": "index", "index": "gone"}, "found no finished index"),
    ({"kind": "http", "url": "a"}, "retrieval.url: found 'a', expected an ad"),
    ({"kind": "milvus"}, "retrieval.milvus: found ''"),
    ({"kind": "milvus", "milvus": "h"}, "milvus needs|expected the address"),
    ({"ranking": "dense"}, "expected it with kind milvus or postgres only"),
    ({"kind": "postgres"}, "retrieval.postgres: found ''"),
    ({"kind": "postgres", "postgres": "h"}, "postgres needs|not shown"),
    ({"kind": "postgres", "postgres": "password=x"}, "with a password"),
    (
      {"kind": "postgres", "postgres": "postgresql://me:a/b@h/d"},
      "with a password",
    ),
    ({"table": "t"}, "expected it with kind postgres only"),
    ({"kind": "web", "web": "searxng"}, "address of a server for searxng"),
    ({"kind": "web", "web": "serper", "url": "http://a"}, "none for others"),
    ({"kind": "http", "url": "http://a,"}, "retrieval.url: found '', expected"),
    ({"kind": "web", "web": "bing"}, "kind: found 'bing'"),
    ({"log": "gone.sqlite", "log_mode": "strict"}, "retrieval.log: "),
    ({"log": "x.sqlite", "log_mode": "write"}, "log_mode: found 'write'"),
  ],
)
def test_invalid_retrieval_is_refused(values, message, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  with pytest.raises(ValueError, match=message):
    retrievers.make(config(**values), object())


def test_the_service_serves_what_the_client_asks(folder):
  """The client asks the service's application directly."""
  import httpx2

  from retrieval import http_retriever

  app = service.create_app(opening.open_index(folder), limits=dialects.Limits())
  made = http_retriever.HttpRetriever(
    "http://retriever", transport=httpx2.ASGITransport(app=app)
  )
  direct = retrievers.make(config(kind="index", index=str(folder)), None)
  queries = ["number n7", "water n3", "nothing of this"]
  over_http, here = ask(made, *queries), ask(direct, *queries)
  for mine, theirs in zip(over_http, here, strict=True):
    assert [(p.id, p.contents) for p in mine] == [
      (p.id, p.contents) for p in theirs
    ]
    assert [p.score for p in mine] == pytest.approx([p.score for p in theirs])
  made.close()
