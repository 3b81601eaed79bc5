"""Servers of PostgreSQL that fail, invalid addresses, and passwords."""

from __future__ import annotations

import json
import os
import signal
import threading
import time

import postgres_tables
import pytest
from database_cases import ask, search
from postgres_tables import psycopg

from anysearch_jax import config, types
from launch import retrievers
from retrieval.postgres import retriever as retriever_lib
from retrieval.postgres import server as server_lib
from retrieval.postgres import table as table_lib

real = postgres_tables.real
server = postgres_tables.server
corpus = postgres_tables.corpus
built = postgres_tables.built


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
  server.timeout = 30.0  # A busy machine connects slowly.
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
