"""Tables of PostgreSQL are filled and searched, on a real server."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import signal
import subprocess
import sys
import threading
import time

import database_cases
import numpy as np
import postgres_tables
import pytest
import retrieval_cases as cases
from database_cases import ask, search
from postgres_tables import prepared, psycopg, with_vectors

from anysearch_jax import config, types
from launch import retrievers
from retrieval import postgres

real = postgres_tables.real
pool = postgres_tables.pool
corpus = postgres_tables.corpus
built = postgres_tables.built


@pytest.fixture(scope="module")
def dense(real, corpus):
  with postgres.connect(real.address()) as pool:
    postgres.build(pool, "dense", corpus, encoder=cases.Encoder())
  return "dense"


# Searches.


def test_a_question_finds_the_passage_that_has_its_words(pool, built, corpus):
  retriever = postgres.PostgresRetriever(pool, built)
  (first, *_), blank, unknown = search(
    retriever, ask("n77"), ask(" \n"), ask("nothing-of-this")
  )
  p = corpus[77]
  assert first == types.Passage("77", p.title, p.text, first.score)
  assert blank == unknown == ()
  # More of the words rank first, however rare each is.
  (answer,) = search(retriever, ask("passages and number n12 or n12", 400))
  assert answer[0].id == "12" and len(answer) == 300
  scores = [p.score for p in answer]
  assert scores == sorted(scores, reverse=True)
  assert retriever.counters == {"queries": 4, "failures": 0}


def test_odd_texts_are_stored_and_asked(pool, tmp_path):
  rows = [
    ("It's", "don't \\ ' quote"),
    ("zero", "a\0b after"),
    ("long", f"{'x' * 5000} word"),
    ("surrogate", "\ud800 lone"),
    ("percent", "100%s %(k)s :1 & | ! url http://a.b/c?d=e&f=g end"),
  ]
  corpus = prepared(tmp_path / "odd", rows)
  postgres.build(pool, "odd", corpus, language="simple")
  retriever = postgres.PostgresRetriever(pool, "odd")
  asked = ["don't'\\ %s", "after\0", "word", "lone \ud800", "100%s ! & <->"]
  asked.append("see http://a.b/c?d=e&f=g")
  found = search(retriever, *(ask(query, 1) for query in asked))
  assert [answer[0].id for answer in found] == ["0", "1", "2", "3", "4", "4"]
  assert found[1][0].text == "a\ufffdb after"


@with_vectors
def test_dense_search_finds_the_rows_of_a_float64_product(pool, dense, corpus):
  retriever = postgres.PostgresRetriever(
    pool, dense, ranking="dense", encoder=cases.Encoder()
  )
  database_cases.finds_the_rows_of_a_float64_product(retriever, corpus)


@with_vectors
def test_a_graph_finds_more_with_more_candidates(pool, tmp_path, real):
  corpus = prepared(tmp_path / "g", [(f"t{i}", f"p{i}") for i in range(3000)])
  encoder = cases.Encoder()
  postgres.build(pool, "graph", corpus, encoder=encoder, vectors="hnsw")
  x = encoder.passages(list(corpus.contents(0, len(corpus)))).astype(float)
  queries = [f"query {i}" for i in range(20)]
  best = np.argsort(-(encoder.queries(queries).astype(float) @ x.T))[:, :10]
  share = {}
  with pool.connection() as c:
    # The planner scans small tables: what is tested is the graph.
    c.execute("ALTER ROLE admin SET enable_seqscan = off")
  for candidates in (10, 400):
    with postgres.connect(real.address()) as own:
      retriever = postgres.PostgresRetriever(
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
def test_hybrid_search_has_the_first_of_both(pool, dense, corpus):
  retriever = postgres.PostgresRetriever(
    pool, dense, ranking="hybrid", encoder=cases.Encoder()
  )
  database_cases.finds_the_first_of_both(retriever, corpus)


@pytest.mark.parametrize(
  ("table", "values", "sentence"),
  [
    ("gone", {}, "found no table that is finished"),
    ("pg_class", {}, "of this version did not make"),
    ("plain", {"ranking": "best"}, "expected one of words, dense, hybrid"),
    ("plain", {"ranking": "dense"}, "expected the one of table plain"),
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
    postgres.PostgresRetriever(pool, table, **values)


# Builds.

_KILLED = """
import os, signal, sys
from retrieval import passages, postgres

postgres._BATCH = 20
postgres.build(
  postgres.connect(sys.argv[1]),
  "resumed",
  passages.Corpus(sys.argv[2]),
  on_rows=lambda done, of: done == 40 and os.kill(os.getpid(), signal.SIGKILL),
)
"""


def test_a_build_that_was_killed_resumes(real, pool, tmp_path, monkeypatch):
  corpus = prepared(tmp_path / "r", [("t", f"word n{i}") for i in range(50)])
  monkeypatch.setattr(postgres, "_BATCH", 20)
  killed = subprocess.run(
    [
      *(sys.executable, "-c", _KILLED, real.address()),
      str(tmp_path / "r" / "prepared"),
    ],
    cwd=pathlib.Path(__file__).parents[2],
    timeout=300,
  )
  assert killed.returncode == -signal.SIGKILL
  with pytest.raises(ValueError, match="finish it, by launch.build_index"):
    postgres.PostgresRetriever(pool, "resumed")
  told = []
  postgres.build(pool, "resumed", corpus, on_rows=lambda *a: told.append(a))
  assert told == [(40, 50), (50, 50)]
  postgres.build(pool, "resumed", corpus)  # Once more changes nothing.
  retriever = postgres.PostgresRetriever(pool, "resumed")
  (answer,) = search(retriever, ask("n49", 1))
  assert answer[0].id == "49"


def test_two_builders_of_one_table_are_refused(pool, tmp_path, monkeypatch):
  corpus = prepared(tmp_path / "t", [("t", f"word n{i}") for i in range(50)])
  monkeypatch.setattr(postgres, "_BATCH", 20)

  def build_too(done, of):
    if not done:
      postgres.build(pool, "two", corpus)

  with pytest.raises(ValueError, match="duplicate key.*Build it again"):
    postgres.build(pool, "two", corpus, on_rows=build_too)


@with_vectors
def test_a_server_that_refuses_pgvector_is_named(real, corpus):
  with psycopg.connect(real.address(), autocommit=True) as admin:
    admin.execute("CREATE ROLE plainuser LOGIN PASSWORD 'word-of-pass-1234'")
    admin.execute("CREATE DATABASE plain_db OWNER plainuser")
  address = real.address("plainuser", "plain_db")
  with postgres.connect(address, password="word-of-pass-1234") as pool:
    with pytest.raises(ValueError, match='permission denied.*"vector"'):
      postgres.build(pool, "p", corpus, encoder=cases.Encoder())


@pytest.mark.parametrize(
  ("values", "sentence"),
  [
    ({"table": "Big Table"}, "expected small letters"),
    ({"table": "plain", "fields": ["id"]}, "name another table"),
    ({"vectors": "ivf"}, "expected flat or hnsw"),
    ({"language": "klingon"}, "expected one of the server's: .*english"),
    ({"fields": ["gone"]}, "no passage with the field 'gone'"),
  ],
)
def test_invalid_settings_of_a_build_are_refused(
  pool, built, corpus, values, sentence
):
  values = {"table": "t"} | values
  with pytest.raises(ValueError, match=sentence):
    postgres.build(pool, values.pop("table"), corpus, **values)


# Servers that fail.


def test_a_search_goes_on_after_a_restart_of_the_server(real, pool, built):
  retriever = postgres.PostgresRetriever(pool, built)
  assert search(retriever, ask("n7"))[0][0].id == "7"
  real.stop("immediate")
  later = threading.Timer(1.0, real.start)
  later.start()
  found = search(retriever, *(ask(f"n{i}", 1) for i in range(8)))
  later.join(60)
  assert [answer[0].id for answer in found] == [str(i) for i in range(8)]


def test_a_server_that_is_gone_fails_searches_in_time(real, built):
  pool = postgres.connect(real.address(), timeout=1.0)
  retriever = postgres.PostgresRetriever(pool, built)
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


def test_a_table_that_changes_under_a_run_fails_searches(pool, tmp_path):
  postgres.build(pool, "moved", prepared(tmp_path / "a", [("a", "word")]))
  retriever = postgres.PostgresRetriever(pool, "moved")
  with pool.connection() as connection:
    connection.execute("DROP TABLE moved")
  postgres.build(pool, "moved", prepared(tmp_path / "b", [("b", "word")]))
  (answer,) = search(retriever, ask("word"))
  assert isinstance(answer, types.RetrievalError)
  assert "another one than this run has searched" in str(answer)


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
  with postgres.connect(address, password=word) as pool:
    postgres.build(pool, "passages", corpus)
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


def test_the_command_builds_what_a_run_searches(real, tmp_path):
  source = cases.write(tmp_path / "c.jsonl", 50)
  address = real.address()
  said = database_cases.built_by_the_command(
    *("--kind=postgres", f"--corpus={source}", f"--address={address}"),
    *(f"--output={tmp_path / 'o'}", "--table=commanded"),
  )
  assert "commanded of 50 passages" in said
  c = config.RetrievalConfig(
    kind="postgres", postgres=address, table="commanded"
  )
  found = retrievers.make(config.ExperimentConfig(retrieval=c), None)
  (answer,) = search(found, ask("n7", 1))
  assert answer[0].id == "7"
  identity = found.identity()["identity"]
  assert (identity["kind"], identity["table"]) == ("postgres", "commanded")
  assert len(identity["corpus"]["sha256"]) == 64
  dense = dataclasses.replace(c, ranking="dense")
  with pytest.raises(
    ValueError, match="launch.build_index --kind=postgres had"
  ):
    retrievers.make(config.ExperimentConfig(retrieval=dense), None)
