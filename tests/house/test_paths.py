"""Names in untrusted files never lead outside their folder."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
import retrieval_cases
import safetensors.numpy

from anysearch_jax.data import formats, prepared, preparing
from anysearch_jax.host import disk
from anysearch_jax.policy import tensor_files
from anysearch_jax.retrieval import passages
from anysearch_jax.retrieval.encoder import encoder_settings
from anysearch_jax.retrieval.index import vectors, word_index
from anysearch_jax.training import checkpoint

# Each leads from `folder/own` to `folder/secret...`.
ESCAPES = ["x/../../secret", "{outside}/secret"]


@pytest.fixture(params=ESCAPES)
def name(request, tmp_path):
  return request.param.format(outside=tmp_path)


@pytest.fixture
def own(tmp_path):
  """Returns a folder with somebody else's files beside it."""
  (tmp_path / "own" / "x").mkdir(parents=True)
  return tmp_path / "own"


def _edit(path, **values):
  path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_an_index_of_weights_names_files_beside_it(own, name):
  secret = own.parent / "secret.safetensors"
  safetensors.numpy.save_file({"w": np.zeros(2, np.float32)}, secret)
  index = {"weight_map": {"w": f"{name}.safetensors"}}
  (own / tensor_files.INDEX_NAME).write_text(json.dumps(index))
  for read in (tensor_files.headers, tensor_files.digest):
    with pytest.raises(ValueError, match="expected names of files beside it"):
      read(own)


def test_a_manifest_lists_files_of_its_folder(own, name):
  (own.parent / "secret").write_text("s")
  entry = checkpoint.write_manifest(own.parent)["secret"]
  checkpoint.write_manifest(own)
  assert not checkpoint.find_damage(own)
  _edit(own / checkpoint.MANIFEST, **{name: entry})
  assert f"lacks {name}" in checkpoint.find_damage(own)


@pytest.mark.parametrize("ending", ["", ".parquet/"])
def test_prepared_questions_are_files_of_their_folder(own, name, ending):
  entries = [preparing.Entry("nq_dev/0", "a", ["b"], "nq", "dev", None, "{}")]
  prepared.write(own.parent / "qa", {"nq_dev": preparing.Part(entries)}, [], {})
  assert len(prepared.Prepared(own.parent / "qa").rows("nq_dev")) == 1
  path = own.parent / "qa" / prepared.MANIFEST
  files = json.loads(path.read_text())["files"]
  _edit(path, files=files | {name + ending: files["nq_dev.parquet"]})
  with pytest.raises(formats.DataError, match="expected Parquet files of"):
    prepared.Prepared(own.parent / "qa")


@pytest.mark.parametrize("entry", [None, "a", {"bytes": 3}])
def test_prepared_questions_have_their_hashes(own, entry):
  files = {"version": 1, "files": {"nq_dev.parquet": entry}}
  (own / prepared.MANIFEST).write_text(json.dumps(files))
  with pytest.raises(formats.DataError, match="with their SHA-256"):
    prepared.Prepared(own)


def test_a_dataset_that_a_question_names_is_a_plain_name(name):
  with pytest.raises(ValueError, match="expected a plain name"):
    preparing.dataset_name(name)


def test_an_encoders_modules_are_in_its_folder(own, name):
  secret = own.parent / "secret"
  secret.mkdir()
  (secret / "config.json").write_text('{"pooling_mode": "secret"}')
  (own / "config.json").write_text("{}")
  modules = [{"type": "sentence_transformers.models.Pooling", "path": name}]
  (own / "modules.json").write_text(json.dumps(modules))
  given = {
    "query_prefix": "",
    "passage_prefix": "",
    "max_tokens": 64,
    "model_tokens": 64,
  }
  with pytest.raises(ValueError, match="expected one inside this folder"):
    encoder_settings.settle(own, pooling=None, **given)
  # A symbolic link counts like a path.
  (own / "1_Pooling").symlink_to(secret)
  modules[0]["path"] = "1_Pooling"
  (own / "modules.json").write_text(json.dumps(modules))
  with pytest.raises(ValueError, match="expected one inside this folder"):
    encoder_settings.settle(own, pooling=None, **given)


def test_an_index_of_words_is_made_of_its_own_files(own, name):
  (own.parent / "secret").write_text("s")
  sums = {name: disk.fingerprint(own.parent / "secret")["sha256"]}
  (own / word_index._INFO).write_text(
    json.dumps({"tantivy": "", "sha256": sums})
  )
  with pytest.raises(vectors.DamagedError, match=re.escape(repr(name))):
    word_index.WordIndex(own)


def test_a_corpus_is_in_its_folder_or_where_it_was_prepared(own, name):
  source = retrieval_cases.write(own.parent / "secret")
  # Plain files stay where they are, named by their whole path.
  assert passages.prepare(source, own).path == source
  if not name.startswith("/"):
    _edit(own / passages._INFO, lines=name)
    with pytest.raises(passages.CorpusError, match="lines at '.*secret'"):
      passages.Corpus(own)
