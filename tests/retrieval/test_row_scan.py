"""Exact search on a CPU returns what a float64 product returns, ties by row."""

from __future__ import annotations

import faiss
import numpy as np
import pytest

from retrieval.index import flat, row_scan, vectors

DIM = 48
BATCHES = (1, 2, 3, 4, 5, 8, 33, 130)


def units(count, seed=0):
  x = np.random.default_rng(seed).normal(size=(count, DIM)).astype(np.float32)
  return x / np.linalg.norm(x, axis=1, keepdims=True)


def with_copies(count=3000):
  """Returns rows with a few and with hundreds of equal ones, in all parts."""
  x = units(count)
  x[[5, 1200, 2999]] = x[40]
  x[300:1900:3] = x[1901]
  return x


def queries_for(x, count):
  """Returns queries, some of which are equal to rows that are there often."""
  q = units(count, seed=1)
  q[:: max(1, count // 4)] = x[1901]
  q[-1] = x[40]
  return q


def oracle(queries, x, k):
  """Returns scores and rows of a float64 product; ties by ascending row."""
  scores = queries.astype(np.float64) @ x.astype(np.float64).T
  scores = scores.astype(np.float32)
  rows = np.argsort(-scores, axis=1, kind="stable")[:, :k]
  return np.take_along_axis(scores, rows, 1), rows


def opened(folder, x):
  made = vectors.Shards(
    folder, count=len(x), each=700, dim=DIM, dtype="float32"
  )
  for shard in range(len(made)):
    made.write(shard, iter([x[slice(*made.span(shard))]]))
  return flat.Flat(made)


@pytest.mark.parametrize("k", [1, 3, 10, 120])
def test_every_batch_has_the_rows_and_scores_of_float64(tmp_path, k):
  x = with_copies()
  index = opened(tmp_path, x)
  for batch in BATCHES:
    queries = queries_for(x, batch)
    scores, rows = oracle(queries, x, k)
    found = index.search(queries, k)
    assert [h.rows.tolist() for h in found] == rows.tolist()
    assert [h.scores.tolist() for h in found] == scores.tolist()


def test_scores_do_not_depend_on_the_batch_or_on_the_other_rows():
  x = units(2500)
  whole = row_scan.RowScan([(0, x)], DIM)
  queries = units(40, seed=1)
  expected = whole.search(queries, 5)
  for batch in (1, 3, 7):
    parts = [
      whole.search(queries[i : i + batch], 5) for i in range(0, 40, batch)
    ]
    for name in ("scores", "rows"):
      np.testing.assert_array_equal(
        np.concatenate([getattr(part, name) for part in parts]),
        getattr(expected, name),
      )
  cuts = (0, 1, 900, 2500)
  found = [
    row_scan.RowScan([(a, x[a:b])], DIM).search(queries, 5)
    for a, b in zip(cuts, cuts[1:], strict=False)
  ]
  for name in ("scores", "rows"):
    np.testing.assert_array_equal(
      getattr(row_scan.merged(found, 5), name), getattr(expected, name)
    )


def test_rows_within_the_rounding_of_float32_are_ranked_by_float64():
  rng = np.random.default_rng(0)
  x = np.repeat(units(1), 500, axis=0)
  x += rng.normal(size=x.shape).astype(np.float32) * np.float32(1e-7)
  scan = row_scan.RowScan([(0, x)], DIM)
  for batch in BATCHES:
    queries = units(batch, seed=2)
    scores, rows = oracle(queries, x, 4)
    found = scan.search(queries, 4)
    np.testing.assert_array_equal(found.rows, rows)
    np.testing.assert_array_equal(found.scores, scores)


def test_queries_that_are_no_numbers_find_nothing(tmp_path):
  index = opened(tmp_path, units(900))
  for batch in (1, 6):
    queries = units(batch, seed=1)
    queries[0] = np.nan
    found = index.search(queries, 3)
    assert [len(hits.rows) for hits in found] == [0] + [3] * (batch - 1)


def test_a_search_leaves_the_threads_of_faiss_as_they_were():
  before = faiss.omp_get_max_threads()
  faiss.omp_set_num_threads(3)
  try:
    row_scan.RowScan([(0, units(900))], DIM).search(units(9, seed=1), 3)
    assert faiss.omp_get_max_threads() == 3
  finally:
    faiss.omp_set_num_threads(before)


def test_an_error_on_a_thread_is_raised():
  scan = row_scan.RowScan([(0, units(9))], DIM)

  def fail(item):
    raise IndexError(f"no {item}")

  with pytest.raises(IndexError, match="no "):
    scan._map(fail, [1, 2, 3])
  assert scan._map(str, [1, 2, 3]) == ["1", "2", "3"]
