"""Documents are found by words, by meaning and by both."""

from __future__ import annotations

import asyncio
import pathlib
import signal

import embeddings_server
import numpy as np
import pytest
import retrieval_cases as cases
import source_tree

from anysearch_jax import types
from anysearch_jax.host import http_calls
from anysearch_jax.retrieval import fusion, pipeline
from anysearch_jax.retrieval import requests as requests_lib
from anysearch_jax.retrieval.documents import folder
from anysearch_jax.retrieval.encoder import installed, served
from anysearch_jax.retrieval.index import (
  building,
  hybrid,
  opening,
  row_scan,
  search,
)

CAT = "A young cat sleeps on the couch."
CAR = "The motor of the car was repaired in May."
LEASE = "The lease of the flat ends in June 2027."


@pytest.fixture
def notes(tmp_path):
  place = tmp_path / "notes"
  place.mkdir()
  for name, text in (("cat", CAT), ("car", CAR), ("lease", LEASE)):
    (place / f"{name}.txt").write_text(text)
  return place


def texts(index, query, k=3):
  return [passage.text for passage in index.search([query], k)[0]]


def stored_bytes(index: pathlib.Path) -> bytes:
  """Returns all that the newest build and what is beside the builds holds."""
  files = [*building.newest_build(index).rglob("*"), *index.glob("*")]
  return b"".join(path.read_bytes() for path in files if path.is_file())


class CountingEncoder(cases.Encoder):
  """Notes the passages that it is asked for."""

  def __init__(self, **settings):
    super().__init__(**settings)
    self.asked = []

  def passages(self, texts):
    self.asked.extend(texts)
    return super().passages(texts)


def test_installed_encoder_knows_paraphrases():
  encoder = installed.open_encoder()
  vectors = encoder.passages([CAT, CAR, LEASE])
  queries = encoder.queries(
    ["Where does the kitten take a nap?", "When did they fix the automobile?"]
  )
  np.testing.assert_array_equal((queries @ vectors.T).argmax(axis=1), [0, 1])
  # Of the model in float32, by the library of its authors.
  assert float(vectors[0] @ vectors[2]) == pytest.approx(0.0915, abs=0.01)


def test_installed_encoder_gives_a_text_one_vector():
  encoder = installed.open_encoder()
  together = encoder.passages([CAT, "word " * 3000, "\ud800", ""])
  assert together.shape == (4, encoder.dim)
  assert together.dtype == np.float32
  np.testing.assert_allclose(np.linalg.norm(together, axis=1), 1, rtol=1e-5)
  np.testing.assert_array_equal(encoder.passages([CAT])[0], together[0])
  before = encoder.cut
  encoder.passages(["word " * 3000, CAT])
  assert encoder.cut == before + 1


def test_an_index_is_searched_three_ways(tmp_path, notes):
  index = tmp_path / "index"
  made = folder.update(notes, index, encoder=installed.open_encoder())
  assert made.passages == 3
  query = "nap of the kitten"
  assert CAT not in texts(opening.open_index(index, ranking="bm25"), query, 1)
  for ranking in ("dense", "hybrid", ""):
    opened = opening.open_index(index, ranking=ranking)
    assert texts(opened, query, 1) == [CAT], ranking
  names = {
    opening.open_index(index, ranking=ranking).identity["searched"]
    for ranking in opening.RANKINGS
  }
  assert len(names) == 3


def test_an_index_of_words_refuses_a_search_by_meaning(tmp_path, notes):
  folder.update(notes, tmp_path / "index")
  with pytest.raises(ValueError, match="kind bm25, .* expected one for dense"):
    opening.open_index(tmp_path / "index", ranking="dense")


def test_fused_scores_by_hand():
  words = {"a": 9.0, "b": 5.0, "c": 1.0}
  dense = {"c": 0.9, "d": 0.7, "b": 0.5}
  rankings = [fusion.scaled(words), fusion.scaled(dense)]
  sums = fusion.added(rankings, (0.5, 0.5))
  assert list(sums) == ["a", "c", "b", "d"]
  assert sums == pytest.approx({"a": 0.5, "c": 0.5, "b": 0.25, "d": 0.25})
  assert fusion.scaled({"x": 0.1}) == {"x": 1.0}
  assert fusion.added([{}, {}], (0.5, 0.5)) == {}


def test_equal_sums_keep_the_order_of_words():
  class Fixed:
    count = 3

    def __init__(self, rows):
      self.hits = search.Hits(
        np.array(rows), np.array([1.0, 0.0][: len(rows)], np.float32)
      )

    def search(self, queries, k):
      return [self.hits for _ in queries]

  index = hybrid.HybridIndex(Fixed([2, 0]), Fixed([1, 0]), cases.Encoder())
  (hits,) = index.search(["any"], 3)
  weight = fusion.DENSE_WEIGHT
  first = [2, 1] if weight <= 0.5 else [1, 2]
  np.testing.assert_array_equal(hits.rows, [*first, 0])
  np.testing.assert_allclose(
    hits.scores, sorted([1 - weight, weight], reverse=True) + [0], atol=1e-6
  )


class Scored(requests_lib.OneByBatch):
  """A retriever that finds passages with given scores."""

  def __init__(self, scores):
    self.scores = scores

  async def search_many(self, requests):
    return [
      tuple(
        types.Passage(name, name, name, score=score)
        for name, score in self.scores.items()
      )
      for _ in requests
    ]


def test_pipelines_are_fused_by_weights():
  words = Scored({"a": 20.0, "b": 10.0, "c": 0.0})
  dense = Scored({"c": 0.9, "b": 0.8, "a": 0.4})

  def found(weights):
    made = pipeline.fuse(words, dense, weights=weights)
    (answer,) = asyncio.run(made.search_many([types.SearchRequest("q", 3)]))
    return [p.id for p in answer], made.identity()["weights"]

  assert found((1.0, 0.0)) == (["a", "b", "c"], [1.0, 0.0])
  assert found((0.5, 0.5))[0] == ["b", "a", "c"]
  assert found((0.1, 0.9))[0] == ["c", "b", "a"]
  with pytest.raises(ValueError, match="found 1 weights for 2 retrievers"):
    pipeline.fuse(words, dense, weights=(1.0,))


@pytest.mark.parametrize("count", [1, 7, 500])
def test_rows_are_found_alike_without_faiss(monkeypatch, count):
  rows = cases.units(count)
  rows[count // 2] = rows[0]
  queries = cases.units(5, seed=1)
  scan = row_scan.RowScan([(0, rows[:3]), (len(rows[:3]), rows[3:])], 16)
  expected = scan.search(queries, 4)
  monkeypatch.setattr(row_scan, "faiss", None)
  for hits, wanted in zip(scan.search(queries, 4), expected, strict=True):
    np.testing.assert_array_equal(hits.rows, wanted.rows)
    np.testing.assert_array_equal(hits.scores, wanted.scores)


_KILLED = """
import os, signal, sys
sys.path.insert(0, "tests/support")
import retrieval_cases as cases
from anysearch_jax.retrieval.documents import folder, kept_vectors
kept_vectors._BATCH = 2
def kill(done, total):
  if done >= 4:
    os.kill(os.getpid(), signal.SIGKILL)
folder.update(sys.argv[1], sys.argv[2], encoder=cases.Encoder(), on_rows=kill)
"""


def test_an_update_that_is_killed_keeps_the_vectors_it_made(tmp_path):
  notes = tmp_path / "notes"
  notes.mkdir()
  for number in range(9):
    (notes / f"{number}.txt").write_text(f"Note number {number}.")
  index = tmp_path / "index"
  done = source_tree.python("-c", _KILLED, notes, index)
  assert done.returncode == -signal.SIGKILL, done.stderr
  (kept,) = index.glob("kept-*")
  with kept.open("ab") as file:
    file.write(b"a record that was begun")
  encoder = CountingEncoder()
  assert folder.update(notes, index, encoder=encoder).passages == 9
  assert len(encoder.asked) == 5
  assert not [*index.glob("kept-*")]
  opened = opening.open_index(index, encoder=encoder, ranking="dense")
  for number in range(9):
    text = f"Note number {number}."
    assert texts(opened, f'"{number}.txt"\n{text}', 1) == [text]


def test_a_search_by_words_keeps_vectors_for_later(tmp_path, notes):
  index = tmp_path / "index"
  encoder = CountingEncoder()
  folder.update(notes, index, encoder=encoder)
  build = building.newest_build(index)
  folder.update(notes, index)
  assert building.newest_build(index) == build  # It has an index of words.
  (notes / "car.txt").unlink()
  (notes / "new.txt").write_text("A new note.")
  folder.update(notes, index)
  assert opening.open_index(index).identity["kind"] == "bm25"
  encoder.asked.clear()
  folder.update(notes, index, encoder=encoder)
  assert encoder.asked == ['"new.txt"\nA new note.']


def test_a_deleted_file_takes_its_vectors_with_it(tmp_path, notes):
  index = tmp_path / "index"
  encoder = CountingEncoder()
  folder.update(notes, index, encoder=encoder)
  (asked,) = [text for text in encoder.asked if CAR in text]
  vector = encoder.passages([asked])[0].tobytes()
  assert vector in stored_bytes(index)
  (notes / "car.txt").unlink()
  folder.update(notes, index)
  assert [*index.glob("kept-*")]
  assert vector not in stored_bytes(index)
  folder.update(notes, index, encoder=encoder)
  assert vector not in stored_bytes(index)


def test_another_encoder_embeds_all_passages_again(tmp_path, notes):
  index = tmp_path / "index"
  folder.update(notes, index, encoder=cases.Encoder())
  other = CountingEncoder(name="other")
  folder.update(notes, index, encoder=other)
  assert len(other.asked) == 3
  with pytest.raises(ValueError, match="expected the same encoder"):
    opening.open_index(index, encoder=cases.Encoder())


def test_served_embeddings_are_asked_in_batches(monkeypatch):
  monkeypatch.setenv("EMBED_KEY", "secret")
  with embeddings_server.served() as server:
    encoder = served.ServedEncoder(server.url, key_variable="EMBED_KEY")
    vectors = encoder.passages([f"text {number}" for number in range(40)])
  assert encoder.dim == 32 and vectors.shape == (40, 32)
  np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, rtol=1e-5)
  assert max(map(len, server.texts)) <= 16
  assert sorted(server.asked) == sorted(f"text {n}" for n in range(40))
  expected = np.array(embeddings_server.vector("text 3", 32))
  np.testing.assert_allclose(
    vectors[3], expected / np.linalg.norm(expected), rtol=1e-5
  )
  assert {*server.keys} == {"Bearer secret"}
  assert encoder.identity()["model"] == "tiny-embed"


def test_prefixes_follow_from_the_name_of_a_model():
  with embeddings_server.served(models=("nomic-embed-text:latest",)) as server:
    encoder = served.ServedEncoder(server.url)
    encoder.queries(["when"])
    encoder.passages(["then"])
  assert server.asked == ["search_query: when", "search_document: then"]


def test_texts_too_long_for_a_server_lose_their_end_and_are_counted():
  long_text = "word " * 200
  with embeddings_server.served(longest=300) as server:
    encoder = served.ServedEncoder(server.url)
    vectors = encoder.passages(["short", long_text, "other"])
  assert encoder.cut == 2
  assert long_text[:250] in server.asked
  np.testing.assert_array_equal(vectors.shape, (3, 32))


def test_a_server_that_fails_is_reported(tmp_path):
  with embeddings_server.served(longest=3) as server:
    with pytest.raises(types.RetrievalError, match="input is too large"):
      served.ServedEncoder(server.url)
  with embeddings_server.served(models=("a", "b")) as server:
    with pytest.raises(ValueError, match="found the models a, b; expected the"):
      served.ServedEncoder(server.url)
    assert served.ServedEncoder(server.url, "b").dim == 32
    with pytest.raises(types.RetrievalError, match="no model c"):
      served.ServedEncoder(server.url, "c")
    encoder = served.ServedEncoder(server.url, "a")
    server.dim = 16
    with pytest.raises(http_calls.AnswerError, match="16 numbers, expected 32"):
      encoder.queries(["text"])


def test_a_served_index_refuses_another_model(tmp_path, notes):
  index = tmp_path / "index"
  with embeddings_server.served() as server:
    encoder = served.ServedEncoder(server.url)
    folder.update(notes, index, encoder=encoder)
    opened = opening.open_index(index, encoder=server.url)
    assert texts(opened, "kitten on a sofa", 1) == [CAT]
    with pytest.raises(ValueError, match="expected its address: --embeddings"):
      opening.open_index(index)
    folder.update(notes, index, encoder=served.ServedEncoder(server.url))
    assert len(server.asked) < 9  # Passages are embedded once.
  with embeddings_server.served(dim=16) as server:
    with pytest.raises(ValueError, match="found dim 16, .* built with 32"):
      opening.open_index(index, encoder=server.url)
  with embeddings_server.served() as server:
    encoder = served.ServedEncoder(server.url)
    encoder.passages = lambda texts: cases.units(len(texts), 32)
    with pytest.raises(ValueError, match="another model under the name tiny"):
      opening.open_index(index, encoder=encoder)


def test_the_address_of_a_server_is_not_stored(tmp_path, notes):
  with embeddings_server.served() as server:
    folder.update(
      notes, tmp_path / "index", encoder=served.ServedEncoder(server.url)
    )
    assert server.url.encode() not in stored_bytes(tmp_path / "index")
