"""Exact search: every index finds the rows that a float64 product finds."""

from __future__ import annotations

import os

import faiss
import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retrieval.index import faiss_file, vectors
from retrieval.index import flat as flat_lib

COUNT, DIM = 1000, 24


def units(count, seed=0, dim=DIM):
  x = np.random.default_rng(seed).normal(size=(count, dim)).astype(np.float32)
  return x / np.linalg.norm(x, axis=1, keepdims=True)


def shards(folder, x, dtype="float32", each=300):
  made = vectors.Shards(
    folder, count=len(x), each=each, dim=x.shape[1], dtype=dtype
  )
  for shard in range(len(made)):
    start, end = made.span(shard)
    made.write(shard, (x[i : min(i + 77, end)] for i in range(start, end, 77)))
  return made


def best(queries, x, k):
  """Returns the best rows by float64; equal scores by ascending row."""
  scores = queries.astype(np.float64) @ x.astype(np.float64).T
  return np.argsort(-scores, axis=1, kind="stable")[:, :k]


def check(found, queries, x, k, *, atol=1e-6):
  for hits, query, rows in zip(
    found, queries, best(queries, x, k), strict=True
  ):
    assert hits.rows.tolist() == rows.tolist()
    assert hits.rows.dtype == np.int64 and hits.scores.dtype == np.float32
    np.testing.assert_allclose(hits.scores, x[rows] @ query, atol=atol)


@pytest.mark.parametrize("devices", [None, 1, 3, 8])
@pytest.mark.parametrize("dtype", vectors.DTYPES)
def test_jax_finds_the_best_of_what_is_stored(tmp_path, dtype, devices):
  made = shards(tmp_path, units(COUNT), dtype)
  stored = np.concatenate([made.rows(i).floats() for i in range(len(made))])
  np.testing.assert_allclose(
    stored,
    units(COUNT),
    atol={"float32": 0, "bfloat16": 2e-3, "int8": 5e-3}[dtype],
  )
  index = flat_lib.Flat(
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
  index = flat_lib.Flat(shards(tmp_path, x), devices=devices)
  check(index.search(q, 5), q, x, 5)
  check(index.search(q[:1], 5), q[:1], x, 5)


@pytest.mark.parametrize("kind", ["mapped", "held"])
def test_equal_rows_come_in_their_order(tmp_path, kind):
  x = np.repeat(units(40), 3, axis=0)
  devices = jax.devices()[:4] if kind == "held" else None
  index = flat_lib.Flat(shards(tmp_path, x, each=50), devices=devices, block=16)
  for number in (0, 17, 39):
    hits = index.search(x[3 * number][None], 3)[0]
    assert hits.rows.tolist() == [3 * number + i for i in range(3)]


@pytest.mark.parametrize("shape", [(3, DIM + 1), (DIM,), (1, 1, DIM)])
def test_vectors_of_another_width_are_refused(tmp_path, shape):
  index = flat_lib.Flat(shards(tmp_path, units(10)))
  with pytest.raises(ValueError, match=rf"expected \[Q, {DIM}\]"):
    index.search(np.zeros(shape, np.float32), 3)


def test_calls_of_any_number_of_queries_compile_a_handful_of_times(tmp_path):
  made = shards(tmp_path, units(600), "bfloat16")
  index = flat_lib.Flat(made, block=300)
  flat_lib._better.clear_cache()
  for count in (1, 2, 3, 5, 8, 9, 20, 31, 32, 33, 100, 128):
    index.search(units(count, seed=1), 3)
  assert flat_lib._better._cache_size() <= 4


# Any FAISS file.


def test_any_faiss_index_of_inner_products_is_searched(tmp_path):
  x = units(COUNT)
  index = faiss.IndexHNSWFlat(DIM, 16, faiss.METRIC_INNER_PRODUCT)
  index.add(x)
  faiss.write_index(index, str(tmp_path / "hnsw"))
  found = faiss_file.FaissFile(tmp_path / "hnsw").search(x[:20], 1)
  assert [h.rows.tolist() for h in found] == [[i] for i in range(20)]


def test_empty_slots_of_faiss_are_dropped(tmp_path):
  x = units(4)
  index = faiss.IndexIVFFlat(
    faiss.IndexFlatIP(DIM), DIM, 2, faiss.METRIC_INNER_PRODUCT
  )
  index.train(units(100))
  index.add(x)
  faiss.write_index(index, str(tmp_path / "ivf"))
  for hits in faiss_file.FaissFile(tmp_path / "ivf").search(
    units(9, seed=5), 4
  ):
    assert all(0 <= row < 4 for row in hits.rows)
    assert len(hits.rows) == len(hits.scores) == len(set(hits.rows.tolist()))


def test_distances_are_refused(tmp_path):
  index = faiss.IndexFlatL2(DIM)
  index.add(units(3))
  faiss.write_index(index, str(tmp_path / "l2"))
  with pytest.raises(ValueError, match="METRIC_INNER_PRODUCT"):
    faiss_file.FaissFile(tmp_path / "l2")


@pytest.mark.parametrize("kept", [0, 3, 40, 500])
def test_a_faiss_file_that_is_cut_short_is_damaged(tmp_path, kept):
  index = faiss.IndexFlatIP(DIM)
  index.add(units(100))
  faiss.write_index(index, str(tmp_path / "flat"))
  os.truncate(tmp_path / "flat", kept)
  with pytest.raises(vectors.DamagedError, match="copy the file again"):
    faiss_file.FaissFile(tmp_path / "flat")


# Shards.


def test_damage_of_a_shard_is_found(tmp_path):
  made = shards(tmp_path, units(100), "int8", each=40)
  assert all(map(made.finished, range(3)))
  file = tmp_path / "scales-00001.npy"
  content = bytearray(file.read_bytes())
  content[-3] ^= 1
  file.write_bytes(content)
  assert [made.finished(i) for i in range(3)] == [True, False, True]
  made.check(1, read=False)
  os.truncate(tmp_path / "vectors-00002.npy", 300)
  with pytest.raises(vectors.DamagedError, match="vectors-00002.npy"):
    made.check(2, read=False)
  (tmp_path / "vectors-00000.json").unlink()
  with pytest.raises(
    vectors.DamagedError, match="run launch.build_index again"
  ):
    flat_lib.Flat(made)


@pytest.mark.parametrize("rows", [39, 41])
def test_a_shard_has_all_of_its_rows(tmp_path, rows):
  made = vectors.Shards(tmp_path, count=40, each=40, dim=DIM, dtype="float32")
  with pytest.raises(ValueError, match="rows"):
    made.write(0, iter([units(rows)]))
  assert not made.finished(0)


@given(st.integers(0, 2**32 - 1), st.just(0.0) | st.floats(1e-30, 1e3))
@settings(max_examples=50, deadline=None)
def test_int8_error_is_at_most_half_a_step(seed, scale):
  x = np.float32(scale) * units(5, seed)
  values, scales = vectors.quantized(x)
  assert np.abs(values).max() <= 127
  step = np.abs(x).max(1) / 127
  error = np.abs(values * scales[:, None] - x)
  assert np.all(error <= 0.501 * step[:, None] + 1e-7 * scale)
