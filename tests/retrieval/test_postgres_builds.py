"""Tables of PostgreSQL are filled, resumed and refused, on a real server."""

from __future__ import annotations

import dataclasses
import math
import pathlib
import signal
import subprocess
import sys

import postgres_tables
import pytest
import retrieval_cases as cases
from database_cases import ask, search
from postgres_tables import prepared, psycopg, with_vectors

from anysearch_jax import config, types
from launch import databases, retrieval_settings, retrievers
from retrieval.postgres import retriever as retriever_lib
from retrieval.postgres import server as server_lib
from retrieval.postgres import table as table_lib

real = postgres_tables.real
server = postgres_tables.server
corpus = postgres_tables.corpus
built = postgres_tables.built


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
