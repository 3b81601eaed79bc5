"""Corpora and logs of answers with arbitrary or damaged contents."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import pathlib
import shutil

import hostile
import hypothesis
import numpy as np
import pytest

from anysearch_jax import types
from anysearch_jax.retrieval import passages, recording

CORPUS = b"".join(
  hostile.as_json({"id": str(i), "contents": f'"T{i}"\n{"word " * i}{i}'})
  + b"\n"
  for i in range(6)
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  return tmp_path_factory.mktemp("hostile")


def line(tape):
  """Draws a line that is nearly a passage."""
  contents = tape.pick((tape.text(), f"{tape.text(3)}\n{tape.text()}"))
  values = {"id": tape.pick(("7", 7, tape.value())), "contents": contents}
  if tape.below(6) == 0:
    values[tape.pick(("id", "contents"))] = tape.value()
  return hostile.as_json(tape.pick((values, values, values, tape.value())))


def passage_of(line, row):
  """Returns the passage that a row must yield, as text; None if invalid."""
  try:
    values = json.loads(line)
  except (ValueError, RecursionError):
    return None
  if not isinstance(values, dict):
    return None
  contents, name = values.get("contents"), values.get("id")
  name = row if name is None else name
  if type(contents) is not str or type(name) not in (str, int):
    return None
  title, end, text = hostile.halved(contents).partition("\n")
  titled = end and title.strip().strip('"') and text.strip()
  return (
    types.Passage(hostile.halved(str(name)), title, text) if titled else None
  )


@hostile.cases(1_200)
@hypothesis.given(hostile.tapes(80))
def test_a_corpus_has_the_lines_that_are_passages(folder, tape):
  zipped, skip = tape.pick(("", ".gz")), tape.pick((True, False))
  source = folder / f"corpus.jsonl{zipped}"
  lines = tape.some(lambda: line(tape), 5)
  data = b"\n".join(lines) + b"\n" if lines else b""
  packed = gzip.compress(data, 1) if zipped else data
  whole = tape.below(4) > 0
  source.write_bytes(packed if whole else tape.damage(packed))
  expected = []
  for each in lines:
    expected.append(passage_of(each, len([*filter(None, expected)])))
  # Files written in quick succession may have the same time.
  (folder / "made" / "corpus.json").unlink(missing_ok=True)
  try:
    corpus = passages.prepare(source, folder / "made", skip_malformed=skip)
  except passages.CorpusError as error:
    assert str(source) in str(error) and len(str(error)) < 800
    if whole:
      kept = [each for each in expected if each is not None]
      assert not kept or (not skip and None in expected)
    return
  found = [corpus[row] for row in range(len(corpus))]
  assert list(corpus.contents(0, len(corpus))) == [p.contents for p in found]
  if whole:
    assert found == [each for each in expected if each is not None]


@hostile.cases(700)
@hypothesis.given(hostile.tapes(40))
def test_a_damaged_corpus_gives_its_own_passages_or_none(folder, tape):
  source, made = folder / "plain.jsonl", folder / "plain"
  source.write_bytes(CORPUS)
  shutil.rmtree(made, ignore_errors=True)
  corpus = passages.prepare(source, made)
  expected = [corpus[row] for row in range(len(corpus))]
  path = made / tape.pick(("corpus.json", "offsets.npy"))
  if tape.below(4):
    path.write_bytes(tape.damage(path.read_bytes()))
  elif path.suffix == ".json":
    info = json.loads(path.read_bytes())
    info[tape.pick([*info])] = tape.value()
    path.write_bytes(hostile.as_json(info))
  else:
    shape = tape.pick(((7,), (7, 1), (), (0,), (3,)))
    kind = tape.pick(("<i8", "<f8", "<i4", "S3", "O"))
    np.save(path, np.zeros(shape, kind), allow_pickle=True)
  try:
    found = passages.Corpus(made)
    for row in range(len(found)):
      assert found[row] in expected
  except passages.CorpusError as error:
    assert str(error)
  # Another `prepare` makes again what cannot be opened.
  again = passages.prepare(source, made)
  assert len(again) == len(expected)
  if path.suffix == ".json":
    assert [again[row] for row in range(len(again))] == expected


@pytest.fixture(scope="module")
def small(folder):
  """The bytes of a log of some answers, and the requests for them."""
  path = folder / "small.sqlite"

  class Source:
    async def search(self, request):
      return [types.Passage(request.query, "title", "text " * 40, 0.5)]

  requests = [types.SearchRequest(f"query {i}", 2) for i in range(20)]
  log = recording.Recorder(Source(), path, mode="record", identity="who")
  for request in requests:
    asyncio.run(log.search(request))
  return path.read_bytes(), requests


@hostile.cases(200)
@hypothesis.given(hostile.tapes(40))
def test_a_damaged_log_gives_answers_or_sentences(folder, small, tape):
  data, requests = small
  for left in folder.glob("damaged.sqlite*"):
    left.unlink(missing_ok=True)
  path = folder / "damaged.sqlite"
  path.write_bytes(tape.damage(data))
  try:
    log = recording.Recorder(None, path, mode="strict", identity="who")
    for answer in asyncio.run(log.search_many(requests)):
      assert isinstance(answer, tuple | recording.MissError)
  except types.RetrievalError as error:
    assert str(path) in str(error)
  opened = pathlib.Path("/proc/self/fd").glob("*")
  assert str(path) not in map(os.path.realpath, opened)
