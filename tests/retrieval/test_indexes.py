"""Exact search: every index finds the rows that a float64 product finds."""

from __future__ import annotations

import functools
import os

import jax
import numpy as np
import pytest
import retrieval_cases as cases

from anysearch_jax.retrieval.index import device_scan, row_scan, vectors
from anysearch_jax.retrieval.index import flat as flat_lib

COUNT, DIM = 1000, 24
BATCHES = (1, 2, 3, 5, 8, 130)


units = functools.partial(cases.units, dim=DIM)


def shards(folder, x, dtype="float32", each=300):
  made = vectors.Shards(
    folder, count=len(x), rows_per_shard=each, dim=x.shape[1], dtype=dtype
  )
  for shard in range(len(made)):
    start, end = made.span(shard)
    made.write(shard, (x[i : min(i + 77, end)] for i in range(start, end, 77)))
  return made


def oracle(queries, x, k):
  """Returns scores and rows of a float64 product; ties by ascending row."""
  scores = queries.astype(np.float64) @ x.astype(np.float64).T
  scores = scores.astype(np.float32)
  rows = np.argsort(-scores, axis=1, kind="stable")[:, :k]
  return np.take_along_axis(scores, rows, 1), rows


def check(found, queries, x, k, *, atol=1e-6):
  _, expected = oracle(queries, x, k)
  for hits, query, rows in zip(found, queries, expected, strict=True):
    assert hits.rows.tolist() == rows.tolist()
    assert hits.rows.dtype == np.int64 and hits.scores.dtype == np.float32
    np.testing.assert_allclose(hits.scores, x[rows] @ query, atol=atol)


@pytest.mark.parametrize("devices", [None, 3, 8])
@pytest.mark.parametrize("dtype", vectors.DTYPES)
def test_jax_finds_the_best_of_what_is_stored(tmp_path, dtype, devices):
  made = shards(tmp_path, units(COUNT), dtype)
  stored = np.concatenate([made.rows(i) for i in range(len(made))])
  stored = stored.astype(np.float32)
  atol = {"float32": 0, "bfloat16": 2e-3}[dtype]
  np.testing.assert_allclose(stored, units(COUNT), atol=atol)
  index = flat_lib.open_flat(
    made, devices=devices and jax.devices()[:devices], block=128
  )
  # More queries than one call takes, and a number that no call has.
  queries = units(530, seed=1)
  check(index.search(queries, 7), queries, stored, 7)
  assert index.search(queries[:0], 7) == []


@pytest.mark.parametrize("kind", ["mapped", "held"])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_there_are_no_more_hits_than_rows(tmp_path, kind, count):
  x, q = units(count), units(6, seed=1)
  devices = jax.devices() if kind == "held" else None
  index = flat_lib.open_flat(shards(tmp_path, x), devices=devices)
  check(index.search(q, 5), q, x, 5)
  check(index.search(q[:1], 5), q[:1], x, 5)


@pytest.mark.parametrize("kind", ["mapped", "held"])
def test_equal_rows_come_in_their_order(tmp_path, kind):
  x = np.repeat(units(40), 3, axis=0)
  devices = jax.devices()[:4] if kind == "held" else None
  index = flat_lib.open_flat(
    shards(tmp_path, x, each=50), devices=devices, block=16
  )
  for number in (0, 17, 39):
    hits = index.search(x[3 * number][None], 3)[0]
    assert hits.rows.tolist() == [3 * number + i for i in range(3)]


@pytest.mark.parametrize("shape", [(3, DIM + 1), (DIM,), (1, 1, DIM)])
def test_vectors_of_another_width_are_refused(tmp_path, shape):
  index = flat_lib.open_flat(shards(tmp_path, units(10)))
  with pytest.raises(ValueError, match=rf"expected \[Q, {DIM}\]"):
    index.search(np.zeros(shape, np.float32), 3)


def test_calls_of_any_number_of_queries_compile_a_handful_of_times(tmp_path):
  index = flat_lib.open_flat(shards(tmp_path, units(600), "bfloat16"))
  device_scan.search_devices.clear_cache()
  for count in (1, 2, 3, 5, 8, 9, 20, 31, 32, 33, 100, 128):
    index.search(units(count, seed=1), 3)
  assert device_scan.search_devices._cache_size() <= 4


# Float32 on a CPU, to the bit.


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


def check_bits(index, queries, x, k):
  scores, rows = oracle(queries, x, k)
  found = index.search(queries, k)
  assert [h.rows.tolist() for h in found] == rows.tolist()
  assert [h.scores.tolist() for h in found] == scores.tolist()


@pytest.mark.parametrize("k", [1, 3, 10, 120])
def test_every_batch_has_the_rows_and_scores_of_float64(tmp_path, k):
  x = with_copies()
  index = flat_lib.open_flat(shards(tmp_path, x, each=700))
  for batch in BATCHES:
    check_bits(index, queries_for(x, batch), x, k)


def test_scores_do_not_depend_on_the_batch_or_on_the_other_rows():
  x, queries = units(2500), units(40, seed=1)
  expected = row_scan.RowScan([(0, x)], DIM).search(queries, 5)
  for cuts in ((0, 2500), (0, 1, 900, 2500)):
    parts = [
      row_scan.RowScan([(a, x[a:b])], DIM)
      for a, b in zip(cuts, cuts[1:], strict=False)
    ]
    for batch in (1, 3, 7):
      for i in range(0, 40, batch):
        found = [part.search(queries[i : i + batch], 5) for part in parts]
        for whole, some in zip(expected[i:], zip(*found, strict=True)):
          scores = np.concatenate([hits.scores for hits in some])
          rows = np.concatenate([hits.rows for hits in some])
          best = np.lexsort((rows, -scores))[:5]
          assert rows[best].tolist() == whole.rows.tolist()
          assert scores[best].tolist() == whole.scores.tolist()


def test_rows_within_the_rounding_of_float32_are_ranked_by_float64():
  rng = np.random.default_rng(0)
  x = np.repeat(units(1), 500, axis=0)
  x += rng.normal(size=x.shape).astype(np.float32) * np.float32(1e-7)
  scan = row_scan.RowScan([(0, x)], DIM)
  for batch in BATCHES:
    check_bits(scan, units(batch, seed=2), x, 4)


def test_queries_that_are_no_numbers_find_nothing(tmp_path):
  index = flat_lib.open_flat(shards(tmp_path, units(900)))
  for batch in (1, 6):
    queries = units(batch, seed=1)
    queries[0] = np.nan
    found = index.search(queries, 3)
    assert [len(hits.rows) for hits in found] == [0] + [3] * (batch - 1)


# Shards.


def test_damage_of_a_shard_is_found(tmp_path):
  made = shards(tmp_path, units(100), "bfloat16", each=40)
  assert all(map(made.finished, range(3)))
  cases.damage(tmp_path / "vectors-00001.npy", -3)
  assert [made.finished(i) for i in range(3)] == [True, False, True]
  made.rows(1)
  os.truncate(tmp_path / "vectors-00002.npy", 300)
  with pytest.raises(vectors.DamagedError, match="vectors-00002.npy"):
    flat_lib.open_flat(made)
  with open(tmp_path / "vectors-00002.npy", "wb") as file:
    np.savez(file, x=units(20))  # A zip file, which `np.load` would open.
  with pytest.raises(vectors.DamagedError, match="vectors-00002.npy"):
    made.rows(2)
  (tmp_path / "vectors-00000.json").unlink()
  with pytest.raises(vectors.DamagedError, match="anysearch build_index again"):
    made.check(0)


@pytest.mark.parametrize("rows", [39, 41])
def test_a_shard_has_all_of_its_rows(tmp_path, rows):
  made = vectors.Shards(
    tmp_path, count=40, rows_per_shard=40, dim=DIM, dtype="float32"
  )
  with pytest.raises(ValueError, match="rows"):
    made.write(0, iter([units(rows)]))
  assert not made.finished(0)
