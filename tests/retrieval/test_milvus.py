"""Milvus as a retriever, with Milvus Lite in this process."""

from __future__ import annotations

import dataclasses

import database_cases
import pytest
import retrieval_cases as cases
from database_cases import ask, search

from anysearch_jax import config, types
from launch import retrievers
from retrieval import passages

pytest.importorskip("milvus_lite", reason="needs the extra [milvus]")
milvus = pytest.importorskip("retrieval.milvus")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
  folder = tmp_path_factory.mktemp("corpus")
  source = cases.write(folder / "c.jsonl", 1200)
  return passages.prepare(source, folder / "prepared")


@pytest.fixture(scope="module")
def client(tmp_path_factory):
  made = milvus.connect(str(tmp_path_factory.mktemp("milvus") / "test.db"))
  yield made
  made.close()


@pytest.fixture(scope="module")
def built(client, corpus):
  milvus.build(client, "dense", corpus, encoder=cases.Encoder())
  return "dense"


def test_dense_search_finds_the_rows_of_a_float64_product(
  client, built, corpus
):
  retriever = milvus.MilvusRetriever(
    client, built, ranking="dense", encoder=cases.Encoder()
  )
  database_cases.finds_the_rows_of_a_float64_product(retriever, corpus)


def test_words_find_the_passage_that_has_them(client, built, corpus):
  retriever = milvus.MilvusRetriever(client, built)
  (first, *_), blank, odd = search(
    retriever,
    ask("which passage is number n77", 3),
    ask(" \n"),
    ask("\ud800 n5"),
  )
  assert first == types.Passage(
    "77", corpus[77].title, corpus[77].text, first.score
  )
  assert first.score > 0
  assert blank == ()
  assert odd[0].id == "5"


def test_hybrid_search_has_the_first_of_both(client, built, corpus):
  retriever = milvus.MilvusRetriever(
    client, built, ranking="hybrid", encoder=cases.Encoder()
  )
  database_cases.finds_the_first_of_both(retriever, corpus)


def test_a_build_that_stopped_resumes(client, corpus):
  class Dying(cases.Encoder):
    def passages(self, texts):
      if self.encoded >= 1024:
        raise KeyboardInterrupt
      return super().passages(texts)

  with pytest.raises(KeyboardInterrupt):
    milvus.build(client, "resumed", corpus, encoder=Dying())
  with pytest.raises(ValueError, match="found 1024 of 1200 passages"):
    milvus.MilvusRetriever(client, "resumed")
  encoder = cases.Encoder()
  milvus.build(client, "resumed", corpus, encoder=encoder)
  assert encoder.encoded == 1200 - 1024
  assert milvus.rows(client, "resumed") == 1200
  # Once more changes nothing.
  milvus.build(client, "resumed", corpus, encoder=encoder)
  assert milvus.rows(client, "resumed") == 1200


def test_an_identity_names_corpus_encoder_and_ranking(client, built, corpus):
  encoder = cases.Encoder()
  retrievers = [
    milvus.MilvusRetriever(client, built, ranking=ranking, encoder=encoder)
    for ranking in milvus.RANKINGS
  ]
  found = [retriever.identity() for retriever in retrievers]
  assert len({each["sha256"] for each in found}) == 3
  assert found[0]["corpus"]["sha256"] == corpus.sha256
  assert found[1]["encoder"] == {"dim": 16, "name": "hash"}


def test_another_corpus_or_encoder_is_refused(client, built, corpus, tmp_path):
  other = passages.prepare(cases.write(tmp_path / "o.jsonl"), tmp_path / "o")
  with pytest.raises(ValueError, match="name another collection"):
    milvus.build(client, built, other, encoder=cases.Encoder())
  for encoder in (None, cases.Encoder(name="other")):
    with pytest.raises(ValueError, match="expected the one of collection"):
      milvus.MilvusRetriever(client, built, ranking="dense", encoder=encoder)


@pytest.mark.parametrize(
  ("collection", "ranking", "sentence"),
  [
    ("missing", "bm25", "launch.build_index --kind=milvus"),
    ("dense", "best", "expected one of bm25, dense, hybrid"),
  ],
)
def test_invalid_settings_are_refused(
  client, built, collection, ranking, sentence
):
  with pytest.raises(ValueError, match=sentence):
    milvus.MilvusRetriever(client, collection, ranking=ranking)


def test_invalid_addresses_and_names_are_refused(client, corpus):
  for address in ("", "h:19530", "http://me:secret@h"):
    with pytest.raises(ValueError, match="expected the address") as caught:
      milvus.connect(address)
    assert "secret" not in str(caught.value)
  with pytest.raises(ValueError, match="expected letters"):
    milvus.build(client, "a b", corpus)


def test_a_search_that_fails_is_a_value(corpus, tmp_path):
  client = milvus.connect(str(tmp_path / "gone.db"))
  milvus.build(client, "gone", corpus)
  retriever = milvus.MilvusRetriever(client, "gone")
  client.drop_collection("gone")
  found = search(retriever, ask("a"), ask("b"))
  assert all(isinstance(each, types.RetrievalError) for each in found)
  assert retriever.counters == {"queries": 2, "failures": 1}
  with pytest.raises(ValueError, match="expected 1 or more"):
    search(retriever, ask("a", 0))
  client.close()


def test_the_command_builds_what_a_run_searches(tmp_path, corpus):
  source = cases.write(tmp_path / "c.jsonl", 50)
  address = str(tmp_path / "passages.db")
  said = database_cases.built_by_the_command(
    *("--kind=milvus", f"--corpus={source}", f"--address={address}"),
    f"--output={tmp_path / 'offsets'}",
  )
  assert "passages of 50 passages" in said
  c = config.RetrievalConfig(kind="milvus", milvus=address)
  found = retrievers.make(config.ExperimentConfig(retrieval=c), None)
  (answer,) = search(found, ask("number n7", 1))
  assert answer[0].id == "7"
  assert found.identity()["identity"]["ranking"] == "bm25"
  dense = dataclasses.replace(c, ranking="dense")
  with pytest.raises(ValueError, match="of no vectors"):
    retrievers.make(config.ExperimentConfig(retrieval=dense), None)
