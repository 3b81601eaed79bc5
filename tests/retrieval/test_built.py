"""What collections of Milvus and tables of PostgreSQL note of themselves."""

from __future__ import annotations

import pytest
import retrieval_cases as cases

from retrieval import built, passages

VECTORS = {"encoder": {"dim": 16, "name": "hash"}, "vectors": "flat"}


@pytest.fixture
def corpus(tmp_path):
  source = cases.write(tmp_path / "c.jsonl", 3)
  return passages.prepare(source, tmp_path / "prepared")


def description(corpus, encoder=None, **changes):
  values = {"k1": 0.9, "b": 0.4, "language": "english", "vectors": "flat"}
  values |= {"fields": ()} | changes
  return built.description(corpus, encoder=encoder, **values)


def test_a_description_names_vectors_only_if_there_are_any(corpus):
  words = {
    "corpus": {"sha256": corpus.sha256, "passages": 3},
    "language": "english",
    "k1": 0.9,
    "b": 0.4,
  }
  assert description(corpus) == words
  assert description(corpus, cases.Encoder()) == words | VECTORS


@pytest.mark.parametrize(
  "changes, words",
  [({"k1": -1.0}, "k1"), ({"b": 2.0}, "b"), ({"fields": ["year"]}, "year")],
)
def test_values_that_cannot_be_built_are_refused(corpus, changes, words):
  with pytest.raises(ValueError, match=words):
    description(corpus, **changes)


def test_the_folder_of_an_encoder_does_not_identify_it():
  encoder = cases.Encoder()
  encoder.identity = lambda: {"name": "hash", "folder": "/models/hash"}
  assert built.named(encoder) == {"dim": 16, "name": "hash"}


@pytest.mark.parametrize("ranking", ["dense", "hybrid"])
def test_vectors_need_the_encoder_that_made_them(ranking):
  encoder = cases.Encoder()
  built.check_encoder(ranking, encoder, VECTORS, "table t")
  built.check_encoder("bm25", None, VECTORS, "table t")
  for other, made in (
    (None, VECTORS),
    (cases.Encoder(name="other"), VECTORS),
    (encoder, {}),
  ):
    with pytest.raises(ValueError, match=f"{ranking}: found .* of table t"):
      built.check_encoder(ranking, other, made, "table t")


def test_an_identity_hashes_everything_the_answers_depend_on():
  plain = built.identity("postgres", "bm25", VECTORS, {})
  assert plain.items() >= {"kind": "postgres", "ranking": "bm25"}.items()
  others = [
    built.identity("milvus", "bm25", VECTORS, {}),
    built.identity("postgres", "dense", VECTORS, {}),
    built.identity("postgres", "bm25", {}, {}),
    built.identity("postgres", "bm25", VECTORS, {"year": ("2018",)}),
    built.identity("postgres", "bm25", VECTORS, {}, table="t"),
  ]
  assert len({each["sha256"] for each in (plain, *others)}) == 6
