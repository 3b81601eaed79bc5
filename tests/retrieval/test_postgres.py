"""Tables of PostgreSQL are searched, on a real server."""

from __future__ import annotations

import collections
import math

import database_cases
import numpy as np
import postgres_tables
import pytest
import retrieval_cases as cases
from database_cases import ask, search
from postgres_tables import prepared, with_vectors

from anysearch_jax import types
from retrieval import analysis
from retrieval.postgres import retriever as retriever_lib
from retrieval.postgres import server as server_lib
from retrieval.postgres import table as table_lib

real = postgres_tables.real
server = postgres_tables.server
corpus = postgres_tables.corpus
built = postgres_tables.built


@pytest.fixture(scope="module")
def dense(real, corpus):
  server = server_lib.Server(real.address())
  table_lib.build(server, "dense", corpus, encoder=cases.Encoder())
  return "dense"


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
  retriever = retriever_lib.PostgresRetriever(
    server, dense, ranking="dense", encoder=cases.Encoder()
  )
  database_cases.finds_the_rows_of_a_float64_product(retriever, corpus)


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
  database_cases.finds_the_first_of_both(retriever, corpus)


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


def test_an_invalid_request_is_refused(server, built):
  retriever = retriever_lib.PostgresRetriever(server, built)
  with pytest.raises(ValueError, match="expected 1 or more"):
    search(retriever, ask("a", 0))
  with pytest.raises(ValueError, match="corpus 'other'"):
    search(retriever, ask("a", corpus="other"))
