"""Every kind of file that is opened says so if git-lfs left a pointer."""

from __future__ import annotations

import re

import numpy as np
import pytest

from anysearch_jax.data import files
from anysearch_jax.host import json_files
from anysearch_jax.report import loading
from anysearch_jax.retrieval import passages
from anysearch_jax.retrieval.documents import reading
from anysearch_jax.retrieval.index import faiss_file, vectors

POINTER = (
  "version https://git-lfs.github.com/spec/v1\n"
  "oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393"
  "\nsize 12345\n"
)


def _prepare(folder, path):
  return passages.prepare(path, folder / "corpus")


def _rows(path):
  shards = vectors.Shards(
    path.parent, count=2, rows_per_shard=2, dim=3, dtype="float32"
  )
  shards.write(0, iter([np.eye(2, 3, dtype=np.float32)]))
  path.write_text(POINTER)
  return shards.rows(0)


def _decoder(path):
  json_files.write(path.parent / "config.json", {"policy": str(path.parent)})
  return loading.decoder(path.parent)


@pytest.mark.parametrize(
  ("name", "read"),
  [
    ("tokenizer.json", json_files.read),
    ("tokenizer.json", _decoder),
    ("q.jsonl", lambda path: [*files.rows(path)]),
    ("q.json", lambda path: [*files.rows(path)]),
    ("q.csv", lambda path: [*files.rows(path)]),
    ("q.tsv.gz", lambda path: [*files.rows(path)]),
    ("q.parquet", lambda path: [*files.rows(path)]),
    ("c.jsonl", lambda path: _prepare(path.parent, path)),
    ("c.jsonl.gz", lambda path: _prepare(path.parent, path)),
    ("c.parquet", lambda path: _prepare(path.parent, path.parent)),
    ("vectors-00000.npy", _rows),
    ("wiki.index", faiss_file.FaissFile),
  ],
)
def test_a_pointer_is_named_and_what_to_type(tmp_path, name, read):
  path = tmp_path / name
  path.write_text(POINTER)
  sentence = rf"{name}: is a pointer of git-lfs, not .* type `git lfs pull`"
  with pytest.raises(ValueError, match=sentence):
    read(path)


@pytest.mark.parametrize("name", ["corpus.json", "offsets.npy"])
def test_a_pointer_in_a_prepared_corpus_is_named(tmp_path, name):
  source = tmp_path / "c.jsonl"
  source.write_text('{"id": "1", "contents": "a\\nb"}\n')
  passages.prepare(source, tmp_path / "corpus")
  (tmp_path / "corpus" / name).write_text(POINTER)
  with pytest.raises(passages.CorpusError, match="is a pointer of git-lfs"):
    passages.Corpus(tmp_path / "corpus")


@pytest.mark.parametrize(
  "ending", [".md", ".txt", ".pdf", ".docx", ".csv", ".png"]
)
def test_a_document_that_is_a_pointer_is_no_passage(tmp_path, ending):
  path = tmp_path / f"a{ending}"
  path.write_text(POINTER)
  with pytest.raises(reading.ReadError, match="is a pointer of git-lfs"):
    [*reading.read(str(path), recognizer=lambda picture: "text")]


def test_a_text_about_pointers_is_read(tmp_path):
  path = tmp_path / "a.md"
  path.write_text("A pointer begins with " + POINTER)
  (part,) = reading.read(str(path))
  assert re.search("git-lfs", part.text)
