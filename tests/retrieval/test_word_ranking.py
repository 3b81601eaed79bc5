"""The rows that are found without scoring all are those of scoring all."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retrieval.index import word_ranking


def matrix(seed, *, rows, words, ties=False):
  """Returns a random matrix of bm25s's form; frequent words come first."""
  rng = np.random.default_rng(seed)
  starts, indices, data = [0], [], []
  for word in range(words):
    n = max(1, rows // (word + 1))
    indices.append(np.sort(rng.choice(rows, n, replace=False)))
    values = rng.uniform(0.1, 1, n) * np.log1p(rows / n)
    data.append(np.round(values, 1) + 0.1 if ties else values)
    starts.append(starts[-1] + n)
  return {
    "data": np.concatenate(data).astype(np.float32),
    "indices": np.concatenate(indices).astype(np.int32),
    "indptr": np.asarray(starts),
    "num_docs": rows,
  }


def of_all_rows(scores, words, k):
  """Sums float32 in the order of the query, and sorts all rows."""
  sums = np.zeros(scores["num_docs"], np.float32)
  for word in words:
    here = slice(*scores["indptr"][word : word + 2])
    np.add.at(sums, scores["indices"][here], scores["data"][here])
  rows = np.flatnonzero(sums)
  rows = rows[np.argsort(-sums[rows], kind="stable")[:k]]
  return rows, sums[rows]


@given(
  st.integers(0, 2**32 - 1),
  st.integers(1, 3000),
  st.lists(st.integers(0, 29), max_size=12),
  st.sampled_from([1, 2, 10, 400]),
  st.booleans(),
)
@settings(max_examples=200, deadline=None)
def test_hits_are_those_of_scoring_all_rows(seed, rows, words, k, ties):
  scores = matrix(seed, rows=rows, words=30, ties=ties)
  ranking = word_ranking.WordRanking(scores)
  for _ in range(2):  # The second search finds clean buffers.
    hits = ranking.rank(words, k)
    expected = of_all_rows(scores, words, k)
    np.testing.assert_array_equal(hits.rows, expected[0])
    np.testing.assert_array_equal(hits.scores, expected[1])
    assert (hits.rows.dtype, hits.scores.dtype) == (np.int64, np.float32)


def test_frequent_words_are_only_looked_up(monkeypatch):
  """A word of every row is never added to all rows beside a rare one."""
  scores = matrix(0, rows=20_000, words=4000)
  ranking = word_ranking.WordRanking(scores)
  joined = []
  join = ranking._joined
  monkeypatch.setattr(
    ranking,
    "_joined",
    lambda rows, found, word, times: (
      joined.append(word) or join(rows, found, word, times)
    ),
  )
  words = [0, 1, 3000, 2500, 2000]
  hits = ranking.rank(words, 3)
  np.testing.assert_array_equal(hits.rows, of_all_rows(scores, words, 3)[0])
  assert 0 not in joined and 3000 in joined


@pytest.mark.parametrize("threads", [4])
def test_threads_do_not_disturb_each_other(threads):
  scores = matrix(1, rows=3000, words=30)
  ranking = word_ranking.WordRanking(scores)
  rng = np.random.default_rng(2)
  queries = [rng.integers(0, 30, 6).tolist() for _ in range(60)]
  expected = [of_all_rows(scores, words, 5)[0].tolist() for words in queries]
  wrong = []

  def search():
    for words, rows in zip(queries, expected, strict=True):
      if ranking.rank(words, 5).rows.tolist() != rows:
        wrong.append(words)

  running = [threading.Thread(target=search) for _ in range(threads)]
  for thread in running:
    thread.start()
  for thread in running:
    thread.join()
  assert not wrong
