"""Indexes that others built: their vectors, ids and search parameters."""

from __future__ import annotations

import logging
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


def parts(folder, x, *, cut=None):
  """Writes an IndexFlatIP with FAISS, and cuts the file into two parts."""
  write(folder / "e5_Flat.index", "Flat", x)
  data = (folder / "e5_Flat.index").read_bytes()
  cut = len(data) // 2 if cut is None else cut
  (folder / "part_aa").write_bytes(data[:cut])
  (folder / "part_ab").write_bytes(data[cut:])
  return str(folder / "part_aa"), str(folder / "part_ab")


def of_passages(tmp_path, count):
  source = cases.write(tmp_path / "c.jsonl", count)
  corpus = passages.prepare(source, tmp_path / "prepared")
  return source, cases.Encoder().passages(list(corpus.contents(0, count)))


# Vectors in two parts.


# Within the header, within a value, and at the ends.
@pytest.mark.parametrize("cut", [0, 3, 44, 45, 47, 3000, None])
def test_rows_are_those_of_faiss_wherever_the_file_is_cut(tmp_path, cut):
  x = units(77)
  file = vectors.FlatFile(parts(tmp_path, x, cut=cut))
  whole = vectors.FlatFile([tmp_path / "e5_Flat.index"])
  assert (file.count, file.dim) == (77, 16)
  for start, end in ((0, 77), (0, 1), (30, 60), (76, 77), (5, 5)):
    found = [np.zeros((0, 16)), *file.rows(start, end)]
    np.testing.assert_array_equal(np.concatenate(found), x[start:end])
  assert file.identity() == whole.identity()


@pytest.mark.parametrize("dtype", vectors.DTYPES)
def test_vectors_of_a_file_are_not_encoded_again(tmp_path, dtype):
  source, x = of_passages(tmp_path, 200)
  how = {"dtype": dtype, "shard": 60}
  settings = building.Settings("flat", **how, vectors=parts(tmp_path, x))
  encoder = cases.Encoder()
  assert building.build(source, tmp_path / "i", settings, encoder=encoder)
  assert encoder.encoded == 64  # The sample.
  found = opening.open_index(tmp_path / "i", encoder=encoder)
  assert found.search([QUERY], 1)[0][0].id == "7"
  made = vectors.Shards(
    tmp_path / "i" / "vectors", count=200, each=60, dim=16, dtype=dtype
  )
  stored = np.concatenate([made.rows(i) for i in range(4)])
  error = {"float32": 0, "bfloat16": 4e-3}[dtype]
  np.testing.assert_allclose(stored.astype(np.float32), x, atol=error)
  # The same command again changes nothing; other vectors are another index.
  assert building.build(source, tmp_path / "i", settings, encoder=encoder)
  x[3] = x[4]
  (tmp_path / "other").mkdir()
  others = parts(tmp_path / "other", x)
  other = building.Settings("flat", **how, vectors=others)
  with pytest.raises(building.OtherIndexError, match="begun with vectors"):
    building.build(source, tmp_path / "i", other, encoder=encoder)


@pytest.mark.parametrize(
  ("change", "message"),
  [
    (lambda x: x[::-1], "the encoder's vector of that passage"),
    (lambda x: 2 * x, "of length 2.000 for row 0"),
    (lambda x: np.full_like(x, np.nan), "of length nan"),
    (lambda x: x[:-1], "found 199 rows of 16, expected 200 of 16"),
    (lambda x: x[:, :8], "found 200 rows of 8, expected 200 of 16"),
  ],
)
def test_vectors_of_other_passages_are_refused(tmp_path, change, message):
  source, x = of_passages(tmp_path, 200)
  changed = np.ascontiguousarray(change(x))
  settings = building.Settings("flat", vectors=parts(tmp_path, changed))
  with pytest.raises(ValueError, match=message):
    building.build(source, tmp_path / "i", settings, encoder=cases.Encoder())


def test_parts_that_are_missing_or_in_another_order_are_refused(tmp_path):
  first, second = parts(tmp_path, units(50))
  (tmp_path / "short").write_bytes(b"IxFI" + bytes(10))
  write(tmp_path / "l2", "Flat", units(3, 4), None, faiss.METRIC_L2)
  for names, sentence in (
    ([first], "name all parts"),
    ([second, first], "first part first"),
    ([first, tmp_path / "part_ac"], "part_ac"),
    ([tmp_path / "short"], "short: "),
    ([tmp_path / "l2"], "kind b'IxF2' and metric 1"),
  ):
    with pytest.raises(ValueError, match=sentence):
      vectors.FlatFile(names)


# How much a search reads.


LISTS = ("IVF64,Flat", "IVF64_HNSW8,Flat", "PCA12,IVF64,Flat")


@pytest.mark.parametrize("factory", [*LISTS, "IDMap,HNSW8", "PCA12,HNSW8"])
def test_a_search_finds_most_of_what_the_whole_file_has(factory):
  x = units(2000)
  queries = x[:64] + 0.2 * units(64, seed=1)
  ids = np.arange(2000) + 7 if factory.startswith("IDMap") else None
  index = index_of(factory, x, ids)
  found = faiss_file.tune(index, queries)
  assert faiss_file.parameter(index) == found["parameter"]
  assert found["parameter"] == ("nprobe" if factory in LISTS else "efSearch")
  assert found["recall"] >= 0.95
  if factory == "IVF64,Flat":
    # All lists are exact search; FAISS's default is one list.
    exact = np.argsort(-queries @ x.T, axis=1)[:, :10]
    rows = index.search(queries, 10)[1]
    shares = [len(set(a) & set(b)) / 10 for a, b in zip(rows, exact)]
    assert np.mean(shares) == pytest.approx(found["recall"])
    assert faiss_file.tune(index, queries, 1)["recall"] < 0.7
    half = found["value"] // 2
    fewer = faiss_file.tune(index, queries, half)
    assert fewer["recall"] < 0.95 and fewer["value"] == half


def built(folder, source, file, **values):
  """Builds an index from a file of FAISS, and opens it."""
  settings = building.Settings("faiss_file", faiss_file=file, **values)
  encoder = cases.Encoder()
  building.build(source, folder, settings, encoder=encoder)
  return opening.open_index(folder, encoder=encoder)


def test_an_index_is_opened_as_it_was_measured(tmp_path, caplog):
  source, x = of_passages(tmp_path, 1000)
  file = write(tmp_path / "theirs", "IVF32,Flat", x)
  caplog.set_level(logging.INFO, "anysearch_jax.retrieval")
  chosen = built(tmp_path / "chosen", source, file)
  one = built(tmp_path / "one", source, file, search=1)
  measured = chosen.identity["search"]
  assert measured["recall"] >= 0.95 and measured["value"] > 1
  assert one.identity["search"]["value"] == 1
  assert one.identity["sha256"] != chosen.identity["sha256"]
  levels = [r.levelname for r in caplog.records if "searched with" in r.message]
  assert levels == ["INFO", "WARNING"]  # One list finds too little.
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
  with pytest.raises(ValueError, match=r"faiss_file: found id \d+, expected"):
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
