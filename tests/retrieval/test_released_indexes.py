"""Indexes that others built: their vectors, ids and search parameters."""

from __future__ import annotations

import os

import faiss
import numpy as np
import pytest
import retrieval_cases as cases

from anysearch_jax.retrieval import passages
from anysearch_jax.retrieval.index import building, faiss_file, opening, vectors

units = cases.units
QUERY = '"Title 7"\nPassage number n7 is about fire.'


def index_of(factory, x, ids=None, metric=faiss.METRIC_INNER_PRODUCT):
  index = faiss.index_factory(x.shape[1], factory, metric)
  index.train(x)
  if ids is None:
    index.add(x)
  else:
    index.add_with_ids(x, ids)
  return index


def write(path, *args):
  faiss.write_index(index_of(*args), str(path))
  return str(path)


def of_passages(tmp_path, count):
  source = cases.write(tmp_path / "c.jsonl", count)
  corpus = passages.prepare(source, tmp_path / "prepared")
  return source, cases.Encoder().passages(list(corpus.contents(0, count)))


# Vectors of a file.


@pytest.mark.parametrize("dtype", vectors.DTYPES)
def test_vectors_of_a_file_are_not_encoded_again(tmp_path, dtype):
  source, x = of_passages(tmp_path, 200)
  how = {"dtype": dtype, "shard": 60}
  settings = building.Settings(
    "flat", **how, vectors=write(tmp_path / "theirs", "Flat", x)
  )
  encoder = cases.Encoder()
  assert building.build(source, tmp_path / "i", settings, encoder=encoder)
  assert encoder.encoded == 64  # The sample.
  found = opening.open_index(tmp_path / "i", encoder=encoder)
  assert found.search([QUERY], 1)[0][0].id == "7"
  made = vectors.Shards(
    tmp_path / "i" / "vectors",
    count=200,
    rows_per_shard=60,
    dim=16,
    dtype=dtype,
  )
  stored = np.concatenate([made.rows(i) for i in range(4)])
  error = {"float32": 0, "bfloat16": 4e-3}[dtype]
  np.testing.assert_allclose(stored.astype(np.float32), x, atol=error)
  # The same command again changes nothing; other vectors are another index.
  assert building.build(source, tmp_path / "i", settings, encoder=encoder)
  x[3] = x[4]
  others = write(tmp_path / "other", "Flat", x)
  other = building.Settings("flat", **how, vectors=others)
  with pytest.raises(building.OtherIndexError, match="begun with vectors"):
    building.build(source, tmp_path / "i", other, encoder=encoder)


@pytest.mark.parametrize(
  ("change", "message"),
  [
    (lambda x: np.concatenate([x[1:2], x[1:]]), "in 9[0-9]% of 64"),
    (lambda x: x[::-1], "in 0% of 64 sampled rows"),
    (lambda x: 2 * x, "in 0% of 64 sampled rows"),
    (lambda x: np.full_like(x, np.nan), "in 0% of 64 sampled rows"),
    (lambda x: x[:-1], "found 199 rows of 16, expected 200 of 16"),
    (lambda x: x[:, :8], "found 200 rows of 8, expected 200 of 16"),
  ],
)
def test_vectors_of_other_passages_are_refused(tmp_path, change, message):
  source, x = of_passages(tmp_path, 200)
  changed = np.ascontiguousarray(change(x))
  settings = building.Settings(
    "flat", vectors=write(tmp_path / "theirs", "Flat", changed)
  )
  with pytest.raises(ValueError, match=message):
    building.build(source, tmp_path / "i", settings, encoder=cases.Encoder())


def test_a_file_of_another_kind_has_no_vectors_to_read(tmp_path):
  source, x = of_passages(tmp_path, 100)
  file = write(tmp_path / "theirs", "HNSW8", x)
  settings = building.Settings("flat", vectors=file)
  with pytest.raises(ValueError, match="IndexHNSWFlat, expected IndexFlatIP"):
    building.build(source, tmp_path / "i", settings, encoder=cases.Encoder())


# How much a search reads.


LISTS = ("IVF64,Flat", "IVF64_HNSW8,Flat", "PCA12,IVF64,Flat")


@pytest.mark.parametrize("factory", [*LISTS, "IDMap,HNSW8", "PCA12,HNSW8"])
def test_a_search_reads_more_than_by_default_of_faiss(factory):
  x = units(2000)
  ids = np.arange(2000) + 7 if factory.startswith("IDMap") else None
  index = index_of(factory, x, ids)
  queries = x[:64] + 0.2 * units(64, seed=1)
  exact = np.argsort(-queries @ x.T, axis=1)[:, :10] + (
    7 if ids is not None else 0
  )

  def recall(value):
    parameter = faiss_file.set_search_depth(index, value)
    rows = index.search(queries, 10)[1]
    shares = [len(set(a) & set(b)) / 10 for a, b in zip(rows, exact)]
    return parameter, np.mean(shares)

  name = "nprobe" if factory in LISTS else "efSearch"
  parameter, share = recall(0)
  assert parameter == {"parameter": name, "value": faiss_file.DEFAULTS[name]}
  parameter, fewer = recall(1)
  assert parameter == {"parameter": name, "value": 1}
  assert fewer < share
  if not factory.startswith("PCA"):
    assert share >= 0.95


def built(folder, source, file, **values):
  """Builds an index from a file of FAISS, and opens it."""
  settings = building.Settings("faiss_file", faiss_file=file, **values)
  encoder = cases.Encoder()
  building.build(source, folder, settings, encoder=encoder)
  return opening.open_index(folder, encoder=encoder)


def test_an_index_is_opened_as_it_was_built(tmp_path):
  source, x = of_passages(tmp_path, 1000)
  file = write(tmp_path / "theirs", "IVF32,Flat", x)
  chosen = built(tmp_path / "chosen", source, file)
  one = built(tmp_path / "one", source, file, search=1)
  assert chosen.identity["search"]["value"] == faiss_file.DEFAULTS["nprobe"]
  assert one.identity["search"]["value"] == 1
  assert one.identity["sha256"] != chosen.identity["sha256"]
  # Every passage's own words are found where all lists that matter are read.
  asked = [chosen.corpus[i].contents for i in range(0, 1000, 20)]
  found = [a[0].contents == q for a, q in zip(chosen.search(asked, 1), asked)]
  assert np.mean(found) > 0.95


def test_a_setting_that_an_index_does_not_have_is_refused(tmp_path):
  source, x = of_passages(tmp_path, 100)
  file = write(tmp_path / "theirs", "Flat", x)
  with pytest.raises(ValueError, match="found 8 for a IndexFlat"):
    built(tmp_path / "i", source, file, search=8)


def test_ids_are_rows_in_any_order_and_no_others(tmp_path):
  source, x = of_passages(tmp_path, 50)
  order = np.random.default_rng(0).permutation(50)
  for factory in ("IDMap,Flat", "IVF4,Flat", "IDMap,HNSW8"):
    file = write(tmp_path / "theirs", factory, x[order], order)
    index = built(tmp_path / factory, source, file)
    for row in (0, 7, 49):
      (found, *_) = index.search([index.corpus[row].contents], 3)[0]
      assert found.id == str(row)
  file = write(tmp_path / "theirs", "IDMap,Flat", x, order + 30)
  with pytest.raises(ValueError, match="sampled rows"):
    built(tmp_path / "i", source, file)


# The last two give no vectors back, so they are searched.
@pytest.mark.parametrize(
  "factory",
  ["Flat", "IVF8,Flat", "HNSW8", "PQ4x4", "IVF8,PQ4x4fs", "PCA12,HNSW8"],
)
def test_rows_of_another_order_or_encoder_are_refused(tmp_path, factory):
  source, x = of_passages(tmp_path, 300)

  def build(name, rows):
    file = write(tmp_path / "theirs", factory, rows)
    return built(tmp_path / name, source, file)

  # An encoder in bfloat16 makes slightly other vectors.
  assert build("right", x + 0.002 * units(300, seed=3))
  for name, wrong in (("reversed", x[::-1].copy()), ("other", units(300))):
    with pytest.raises(ValueError, match="in [0-9]+% of 64 sampled rows, exp"):
      build(name, wrong)


def test_empty_slots_of_faiss_are_dropped(tmp_path):
  index = index_of("IVF2,Flat", units(100))
  index.reset()
  index.add(units(4))
  faiss.write_index(index, str(tmp_path / "ivf"))
  found = faiss_file.FaissFile(tmp_path / "ivf").search(units(9, seed=5), 4)
  for hits in found:
    assert all(0 <= row < 4 for row in hits.rows)
    assert len(hits.rows) == len(hits.scores) == len(set(hits.rows.tolist()))


def test_distances_and_files_that_are_cut_short_are_refused(tmp_path):
  write(tmp_path / "l2", "Flat", units(30), None, faiss.METRIC_L2)
  with pytest.raises(ValueError, match="METRIC_INNER_PRODUCT"):
    faiss_file.FaissFile(tmp_path / "l2")
  for kept in (1000, 40, 3, 0):
    os.truncate(tmp_path / "l2", kept)
    with pytest.raises(vectors.DamagedError, match="copy the file again"):
      faiss_file.FaissFile(tmp_path / "l2")
