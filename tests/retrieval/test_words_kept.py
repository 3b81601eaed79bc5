"""Readers keep the words of every kind of document."""

from __future__ import annotations

import pathlib

import pytest

from anysearch_jax.retrieval.documents import reading
from bench import sample_documents, words_kept


@pytest.mark.parametrize(
  "sample", sample_documents.SAMPLES, ids=lambda sample: sample.name
)
def test_a_kind_keeps_its_words(tmp_path, sample):
  path = tmp_path / sample.name
  sample.make(path)
  kept = words_kept.measure(path, sample.words)
  assert kept.share >= words_kept.FLOOR, kept


def test_every_reader_of_a_format_has_a_sample():
  plain = {reading.READERS[".txt"]}
  readers = {*reading.READERS.values()} - plain
  sampled = {
    reading.READERS[pathlib.Path(sample.name).suffix]
    for sample in sample_documents.SAMPLES
  }
  assert readers <= sampled


def test_deleted_text_and_menus_are_not_read(tmp_path):
  for sample in sample_documents.SAMPLES:
    if sample.name.endswith((".docx", ".odt", ".html")):
      path = tmp_path / sample.name
      sample.make(path)
      text = "\n".join(part.text for part in reading.read(str(path)))
      assert "deleted" not in text and "Menu" not in text
