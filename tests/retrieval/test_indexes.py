"""Exact search: every index finds the rows that a float64 product finds."""

from __future__ import annotations

import json
import os

import bm25s
import faiss
import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retrieval import bm25
from retrieval.index import faiss_flat, jax_flat, vectors, word_index

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


def flat(folder, x):
  faiss_flat.write(folder, lambda: iter([x]), count=len(x), dim=x.shape[1])
  return faiss_flat.FaissFlat(folder)


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
  index = jax_flat.JaxFlat(
    made, devices=devices and jax.devices()[:devices], block=128
  )
  # More queries than one call takes, and a number that no call has.
  queries = units(530, seed=1)
  check(index.search(queries, 7), queries, stored, 7)
  assert index.search(queries[:0], 7) == []


@pytest.mark.parametrize("queries", [1, 4, 5, 40])
def test_faiss_finds_the_best(tmp_path, queries):
  x, q = units(COUNT), units(queries, seed=1)
  check(flat(tmp_path, x).search(q, 5), q, x, 5)


def test_faiss_and_jax_agree(tmp_path):
  x, q = units(3000, seed=2), units(64, seed=3)
  made = jax_flat.JaxFlat(shards(tmp_path / "jax", x))
  (tmp_path / "faiss").mkdir()
  ours, theirs = made.search(q, 10), flat(tmp_path / "faiss", x).search(q, 10)
  for mine, other in zip(ours, theirs, strict=True):
    assert mine.rows.tolist() == other.rows.tolist()
    np.testing.assert_allclose(mine.scores, other.scores, atol=1e-6)


def test_rows_equal_in_float16_are_ranked_correctly(tmp_path):
  """Hundreds of rows round to the same values; the last ones are best."""
  x = np.repeat(units(1), 400, axis=0)
  x[:, 0] += np.arange(400, dtype=np.float32) * 1e-7
  x /= np.linalg.norm(x, axis=1, keepdims=True)
  half = x.astype(np.float16)
  assert len({row.tobytes() for row in half}) < 10
  query = units(1)
  query[0, 0] += 5
  scores = flat(tmp_path, x).search(query, 3)[0].scores
  exact = np.sort(x.astype(np.float64) @ query[0].astype(np.float64))[::-1]
  np.testing.assert_allclose(scores, exact[:3], rtol=3e-7)


@pytest.mark.parametrize("kind", ["mapped", "held", "faiss"])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_there_are_no_more_hits_than_rows(tmp_path, kind, count):
  x, q = units(count), units(6, seed=1)
  if kind == "faiss":
    index = flat(tmp_path, x)
  else:
    devices = jax.devices() if kind == "held" else None
    index = jax_flat.JaxFlat(shards(tmp_path, x), devices=devices)
  check(index.search(q, 5), q, x, 5)
  check(index.search(q[:1], 5), q[:1], x, 5)


@pytest.mark.parametrize("kind", ["mapped", "held", "faiss"])
def test_equal_rows_come_in_their_order(tmp_path, kind):
  x = np.repeat(units(40), 3, axis=0)
  if kind == "faiss":
    index = flat(tmp_path, x)
  else:
    devices = jax.devices()[:4] if kind == "held" else None
    index = jax_flat.JaxFlat(
      shards(tmp_path, x, each=50), devices=devices, block=16
    )
  for number in (0, 17, 39):
    hits = index.search(x[3 * number][None], 3)[0]
    assert hits.rows.tolist() == [3 * number + i for i in range(3)]


@pytest.mark.parametrize("shape", [(3, DIM + 1), (DIM,), (1, 1, DIM)])
def test_vectors_of_another_width_are_refused(tmp_path, shape):
  (tmp_path / "faiss").mkdir()
  for index in (
    jax_flat.JaxFlat(shards(tmp_path / "jax", units(10))),
    flat(tmp_path / "faiss", units(10)),
  ):
    with pytest.raises(ValueError, match=rf"expected \[Q, {DIM}\]"):
      index.search(np.zeros(shape, np.float32), 3)


def test_calls_of_any_number_of_queries_compile_a_handful_of_times(tmp_path):
  made = shards(tmp_path, units(600), "bfloat16")
  index = jax_flat.JaxFlat(made, block=300)
  jax_flat._better.clear_cache()
  for count in (1, 2, 3, 5, 8, 9, 20, 31, 32, 33, 100, 128):
    index.search(units(count, seed=1), 3)
  assert jax_flat._better._cache_size() <= 4


# Any FAISS file.


def test_any_faiss_index_of_inner_products_is_searched(tmp_path):
  x = units(COUNT)
  index = faiss.IndexHNSWFlat(DIM, 16, faiss.METRIC_INNER_PRODUCT)
  index.add(x)
  faiss.write_index(index, str(tmp_path / "hnsw"))
  found = faiss_flat.FaissFile(tmp_path / "hnsw").search(x[:20], 1)
  assert [h.rows.tolist() for h in found] == [[i] for i in range(20)]


def test_empty_slots_of_faiss_are_dropped(tmp_path):
  x = units(4)
  index = faiss.IndexIVFFlat(
    faiss.IndexFlatIP(DIM), DIM, 2, faiss.METRIC_INNER_PRODUCT
  )
  index.train(units(100))
  index.add(x)
  faiss.write_index(index, str(tmp_path / "ivf"))
  for hits in faiss_flat.FaissFile(tmp_path / "ivf").search(
    units(9, seed=5), 4
  ):
    assert all(0 <= row < 4 for row in hits.rows)
    assert len(hits.rows) == len(hits.scores) == len(set(hits.rows.tolist()))


def test_distances_are_refused(tmp_path):
  index = faiss.IndexFlatL2(DIM)
  index.add(units(3))
  faiss.write_index(index, str(tmp_path / "l2"))
  with pytest.raises(ValueError, match="METRIC_INNER_PRODUCT"):
    faiss_flat.FaissFile(tmp_path / "l2")


@pytest.mark.parametrize("kept", [0, 3, 40, 500, 4000])
def test_a_faiss_file_that_is_cut_short_is_damaged(tmp_path, kept):
  flat(tmp_path, units(100))
  os.truncate(tmp_path / "flat.faiss", kept)
  with pytest.raises(vectors.DamagedError, match="copy the file again"):
    faiss_flat.FaissFlat(tmp_path)


def test_files_of_two_indexes_are_refused(tmp_path):
  for name, count in (("a", 10), ("b", 11)):
    (tmp_path / name).mkdir()
    flat(tmp_path / name, units(count))
  (tmp_path / "b" / "half.faiss").replace(tmp_path / "a" / "half.faiss")
  with pytest.raises(vectors.DamagedError, match="of 11 rows"):
    faiss_flat.FaissFlat(tmp_path / "a")


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
    jax_flat.JaxFlat(made)


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


# Words.

TEXTS = [
  '"Iron"\nIron is a metal; iron rusts.',
  '"Gold"\nGold does not rust.',
  '"Tea"\nTea is a drink.',
  '"Tea"\nTea is a drink.',
]


@pytest.fixture
def words(tmp_path):
  word_index.write(tmp_path / "words", TEXTS, k1=0.9, b=0.4, language="plain")
  return word_index.WordIndex(tmp_path / "words")


def scores_by_formula(query, *, k1=0.9, b=0.4):
  """Computes Lucene's BM25 in float64 from its formula."""
  documents = [bm25.words(text) for text in TEXTS]
  mean = np.mean([len(d) for d in documents])
  scores = np.zeros(len(documents))
  for word in bm25.words(query):
    having = sum(word in d for d in documents)
    if not having:
      continue
    idf = np.log(1 + (len(documents) - having + 0.5) / (having + 0.5))
    for i, d in enumerate(documents):
      n = d.count(word)
      scores[i] += idf * n / (n + k1 * (1 - b + b * len(d) / mean))
  return scores


@pytest.mark.parametrize(
  "query", ["iron", "Does GOLD rust?", "tea", "a drink of iron", "is is tea"]
)
def test_words_rank_as_bm25_does(words, query):
  expected = scores_by_formula(query)
  rows = [i for i in np.argsort(-expected, kind="stable") if expected[i] > 0]
  for k in (1, 2, 3, 10):
    (hits,) = words.search([query], k)
    assert hits.rows.tolist() == rows[:k]
    np.testing.assert_allclose(hits.scores, expected[rows[:k]], rtol=1e-5)


@pytest.mark.parametrize("at_once", [1, 30, 1 << 20])
def test_words_are_counted_in_blocks_as_bm25s_counts_them(
  tmp_path, monkeypatch, at_once
):
  rng = np.random.default_rng(0)
  texts = [
    " ".join(f"w{n}" for n in rng.zipf(1.5, rng.integers(0, 40)))
    for _ in range(50)
  ]
  monkeypatch.setattr(word_index, "_WORDS_AT_ONCE", at_once)
  (tmp_path / "spool").mkdir()  # A killed builder's.
  word_index.write(tmp_path, texts, k1=1.2, b=0.75, language="plain")
  ours = bm25s.BM25.load(tmp_path)
  theirs = bm25s.BM25(k1=1.2, b=0.75, method="lucene", backend="numpy")
  theirs.index([bm25.words(t) for t in texts], show_progress=False)
  for word, number in theirs.vocab_dict.items():
    if not word:  # Theirs alone has one for texts without words.
      continue
    parts = []
    for index, n in ((ours, ours.vocab_dict[word]), (theirs, number)):
      part = slice(*index.scores["indptr"][n : n + 2])
      parts.append([index.scores[key][part] for key in ("indices", "data")])
    np.testing.assert_array_equal(*parts)
  assert len(ours.vocab_dict) == len(theirs.vocab_dict) - 1
  assert word_index.WordIndex(tmp_path).count == 50


@pytest.mark.parametrize("query", ["", "   ", "silver", "?!", "\ud800", "\0"])
def test_query_without_a_common_word_has_no_hit(words, query):
  assert words.search([query], 3)[0].rows.tolist() == []


def test_damaged_words_are_refused(words, tmp_path):
  file = next((tmp_path / "words").glob("data*"))
  content = bytearray(file.read_bytes())
  content[-1] ^= 1
  file.write_bytes(content)
  with pytest.raises(vectors.DamagedError, match=file.name):
    word_index.WordIndex(tmp_path / "words")
  with pytest.raises(vectors.DamagedError, match="build_index"):
    word_index.WordIndex(tmp_path)


def test_passages_without_a_word_are_refused(tmp_path):
  with pytest.raises(ValueError, match="Found no word"):
    word_index.write(tmp_path, ["?", "!"], k1=0.9, b=0.4)
  assert json.loads("[]") == list(tmp_path.iterdir())
