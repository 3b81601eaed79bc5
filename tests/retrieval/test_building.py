"""Building indexes: at once, resumed, by several processes, or refused."""

from __future__ import annotations

import fcntl
import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

import faiss
import numpy as np
import pytest
import retrieval_cases as cases

from retrieval import passages
from retrieval.index import building, opening, search, vectors

KINDS = ["bm25", "flat", "faiss_file"]
QUERIES = ['"Title 7"\nPassage number n7 is about fire.', "water n3"]


def settings(kind, tmp_path, **values):
  """Returns settings of a kind; makes a FAISS file if the kind needs one."""
  if kind == "faiss_file":
    corpus = passages.prepare(cases.write(tmp_path / "c.jsonl"), tmp_path / "x")
    index = faiss.IndexFlatIP(16)
    index.add(cases.Encoder().passages(list(corpus.contents(0, 20))))
    faiss.write_index(index, str(tmp_path / "user.index"))
    values["faiss_file"] = str(tmp_path / "user.index")
  return building.Settings(kind, shard=6, **values)


def make(tmp_path, kind="flat", count=20, *, name="index", **values):
  """Builds and opens an index; returns it with its encoder."""
  source = cases.write(tmp_path / "c.jsonl", count)
  encoder = None if kind == "bm25" else cases.Encoder()
  found = building.build(
    source,
    tmp_path / name,
    settings(kind, tmp_path, **values),
    encoder=encoder,
  )
  assert found
  return opening.open_index(tmp_path / name, encoder=encoder), encoder


@pytest.mark.parametrize("kind", KINDS)
def test_an_index_of_e5_passes_the_authors_health_check(tmp_path, kind):
  """As `retrieval/health.py` of their repository checks it."""
  index, encoder = make(tmp_path, kind)
  assert index.described["model"] == ""  # It has no folder.
  named = search.SearchIndex(
    index.corpus,
    index._index,
    identity=index.identity,
    model="intfloat/e5-base-v2" if encoder else "",
  )
  found = named.described
  assert found["index_size"] == found["corpus_size"] == 20
  canonical = {
    "backend": "e5-faiss-flat",
    "model": "intfloat/e5-base-v2",
    "index_metric": "inner_product",
  }
  passes = canonical.items() <= found.items()
  assert (passes and found["index_type"].startswith("IndexFlat")) == bool(
    encoder
  )


@pytest.mark.parametrize("kind", KINDS)
def test_built_index_answers(tmp_path, kind):
  index, _ = make(tmp_path, kind)
  (first, *_), found = index.search(QUERIES, 3)
  assert (first.id, first.title) == ("7", '"Title 7"')
  assert first.contents == QUERIES[0]
  assert len(found) == 3 and found[0].score >= found[1].score >= found[2].score
  assert index.search([], 3) == []
  assert len(index) == 20
  with pytest.raises(ValueError, match="expected 1 or more"):
    index.search(QUERIES, 0)


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_command_again_changes_nothing(tmp_path, kind):
  first, _ = make(tmp_path, kind)
  folder = tmp_path / "index"
  before = {p: p.stat().st_mtime_ns for p in folder.rglob("*") if p.is_file()}
  again, encoder = make(tmp_path, kind)
  assert again.identity == first.identity
  assert encoder is None or encoder.encoded == 0
  before.pop(folder / ".lock")
  assert before == {p: p.stat().st_mtime_ns for p in before}


@pytest.mark.parametrize(
  ("changes", "count", "name"),
  [
    ({"kind": "bm25"}, 20, "kind"),
    ({"dtype": "int8"}, 20, "dtype"),
    ({}, 21, "corpus"),
  ],
)
def test_folder_resumes_only_with_the_same_settings(
  tmp_path, changes, count, name
):
  make(tmp_path)
  with pytest.raises(building.OtherIndexError, match=f"begun with {name}"):
    make(tmp_path, **({"kind": "flat", "count": count} | changes))


@pytest.mark.parametrize(
  ("kind", "values", "message"),
  [
    ("faiss", {}, "expected one of bm25, flat"),
    ("flat", {"dtype": "float64"}, "expected one of float32, bfloat16"),
    ("flat", {"faiss_file": "x"}, "for that one only"),
    ("bm25", {"language": "klingon"}, "found 'klingon', expected one of"),
  ],
)
def test_invalid_settings_are_refused(tmp_path, kind, values, message):
  with pytest.raises(ValueError, match=message):
    make(tmp_path, kind, **values)


def test_words_need_no_encoder_and_vectors_need_one(tmp_path):
  source = cases.write(tmp_path / "c.jsonl")
  for kind, encoder in (("bm25", cases.Encoder()), ("flat", None)):
    with pytest.raises(ValueError, match="encoder: found"):
      building.build(
        source, tmp_path / "i", building.Settings(kind), encoder=encoder
      )


class Killed(BaseException):
  pass


class Dying(cases.Encoder):
  """Dies instead of encoding further passages after a given number."""

  def __init__(self, left):
    super().__init__()
    self.left = left

  def passages(self, texts):
    if self.encoded + len(texts) > self.left:
      raise Killed
    return super().passages(texts)


@pytest.mark.parametrize("left", [0, 6, 12, 18])
def test_killed_builder_resumes_with_the_first_unfinished_shard(tmp_path, left):
  source = cases.write(tmp_path / "c.jsonl")
  with pytest.raises(Killed):
    building.build(
      source,
      tmp_path / "index",
      settings("flat", tmp_path),
      encoder=Dying(left),
    )
  with pytest.raises(ValueError, match="no finished index"):
    opening.open_index(tmp_path / "index", encoder=cases.Encoder())
  found, encoder = make(tmp_path, "flat")
  assert encoder.encoded == 20 - left
  whole, _ = make(tmp_path, "flat", name="whole")
  assert found.identity == whole.identity
  assert found.search(QUERIES, 5) == whole.search(QUERIES, 5)


def test_a_damaged_shard_is_encoded_again(tmp_path):
  source = cases.write(tmp_path / "c.jsonl")
  with pytest.raises(Killed):
    building.build(
      source,
      tmp_path / "index",
      settings("flat", tmp_path),
      encoder=Dying(12),
    )
  file = tmp_path / "index" / "vectors" / "vectors-00000.npy"
  content = bytearray(file.read_bytes())
  content[-1] ^= 1
  file.write_bytes(content)
  found, encoder = make(tmp_path)
  assert encoder.encoded == 6 + 8
  whole, _ = make(tmp_path, name="whole")
  assert found.search(QUERIES, 5) == whole.search(QUERIES, 5)


def test_several_processes_build_one_index(tmp_path):
  source = cases.write(tmp_path / "c.jsonl", 100)
  encoders = [cases.Encoder() for _ in range(3)]
  ended = []

  def work(process):
    ended.append(
      building.build(
        source,
        tmp_path / "index",
        settings("flat", tmp_path),
        encoder=encoders[process],
        process=process,
        processes=3,
      )
    )

  threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join(60)
  assert any(ended) and len(ended) == 3
  assert sum(e.encoded for e in encoders) == 100
  assert all(e.encoded for e in encoders)
  found = opening.open_index(tmp_path / "index", encoder=cases.Encoder())
  whole, _ = make(tmp_path, "flat", 100, name="whole")
  assert found.identity == whole.identity
  assert found.search(QUERIES, 5) == whole.search(QUERIES, 5)


def test_one_process_of_two_does_not_finish(tmp_path):
  source = cases.write(tmp_path / "c.jsonl")
  kwargs = {"encoder": cases.Encoder(), "processes": 2}
  how = settings("flat", tmp_path)
  assert not building.build(source, tmp_path / "i", how, process=1, **kwargs)
  assert building.build(source, tmp_path / "i", how, process=0, **kwargs)
  # Rows 6 to 11 and 18 to 19 are of process 1.
  assert kwargs["encoder"].encoded == 20


_SLOW = """
import sys, time
sys.path[:0] = [{root!r}, {tests!r}]
import retrieval_cases
from retrieval.index import building
class Slow(retrieval_cases.Encoder):
  def passages(self, texts):
    found = super().passages(texts)
    print("shard", flush=True)
    time.sleep(0.2)
    return found
building.build({source!r}, {folder!r}, building.Settings("flat", shard=6),
               encoder=Slow())
"""


def test_a_builder_may_be_killed_at_any_moment(tmp_path):
  source = cases.write(tmp_path / "c.jsonl", 40)
  tests = pathlib.Path(__file__).parents[1] / "support"
  code = _SLOW.format(
    root=str(tests.parents[1]),
    tests=str(tests),
    source=str(source),
    folder=str(tmp_path / "index"),
  )
  for seconds in (0.0, 0.1, 0.25):
    with subprocess.Popen(
      [sys.executable, "-c", code], stdout=subprocess.PIPE
    ) as process:
      process.stdout.readline()
      time.sleep(seconds)
      process.send_signal(signal.SIGKILL)
  found, encoder = make(tmp_path, count=40)
  assert 0 < encoder.encoded < 40
  whole, _ = make(tmp_path, count=40, name="whole")
  assert found.search(QUERIES, 5) == whole.search(QUERIES, 5)


# Opening.


def test_another_encoder_is_refused(tmp_path):
  make(tmp_path)
  for other in (cases.Encoder(name="other"), cases.Encoder(dim=8)):
    with pytest.raises(ValueError, match="expected the same encoder"):
      opening.open_index(tmp_path / "index", encoder=other)


def test_an_encoder_of_no_folder_must_be_given(tmp_path):
  make(tmp_path)
  for given in (None, tmp_path):
    with pytest.raises(ValueError, match="pass that encoder"):
      opening.open_index(tmp_path / "index", encoder=given)


def test_a_corpus_that_is_cut_short_is_refused(tmp_path):
  make(tmp_path)
  os.truncate(tmp_path / "c.jsonl", 300)
  with pytest.raises(passages.CorpusError, match="not the one that was"):
    opening.open_index(tmp_path / "index", encoder=cases.Encoder())


def test_changed_bytes_are_found_by_verify(tmp_path):
  make(tmp_path)
  file = tmp_path / "index" / "vectors" / "vectors-00001.npy"
  content = bytearray(file.read_bytes())
  content[-1] ^= 1
  file.write_bytes(content)
  opening.open_index(tmp_path / "index", encoder=cases.Encoder())
  with pytest.raises(vectors.DamagedError, match=file.name):
    opening.open_index(tmp_path / "index", encoder=cases.Encoder(), verify=True)


def test_a_faiss_file_of_another_corpus_is_refused(tmp_path):
  how = settings("faiss_file", tmp_path)
  source = cases.write(tmp_path / "d.jsonl", 21)
  with pytest.raises(ValueError, match="20 rows of 16, expected 21 of"):
    building.build(source, tmp_path / "i", how, encoder=cases.Encoder())


def test_missing_faiss_file_is_named(tmp_path):
  make(tmp_path, "faiss_file")
  (tmp_path / "user.index").unlink()
  with pytest.raises(vectors.DamagedError, match=r"user\.index"):
    opening.open_index(tmp_path / "index", encoder=cases.Encoder())


def test_mismatched_parts_are_refused(tmp_path):
  index, _ = make(tmp_path)
  other = passages.prepare(
    cases.write(tmp_path / "o.jsonl", 19), tmp_path / "o"
  )
  with pytest.raises(ValueError, match="20 rows, the corpus 19 passages"):
    search.SearchIndex(other, index._index, identity={})


def test_the_command_builds_and_says_what_is_wrong(tmp_path):
  source = cases.write(tmp_path / "c.jsonl.gz", 50)
  command = [sys.executable, "-m", "launch.build_index", f"--corpus={source}"]
  root = pathlib.Path(__file__).parents[2]
  done = subprocess.run(
    [*command, f"--output={tmp_path / 'i'}", "--cache="],
    cwd=root,
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stderr
  assert "bm25 over 50 passages" in done.stdout
  identity = json.loads((tmp_path / "i" / "index.json").read_text())
  assert identity["corpus"]["passages"] == 50
  index = opening.open_index(tmp_path / "i")
  assert index.search(["number n7"], 1)[0][0].id == "7"
  cases.write(source, 5, extra=["nothing"])
  done = subprocess.run(
    [*command, f"--output={tmp_path / 'j'}", "--cache="],
    cwd=root,
    capture_output=True,
    text=True,
  )
  assert done.returncode == 1
  assert "launch.build_index: " in done.stderr and "line 6" in done.stderr


def test_hits_are_of_float32(tmp_path):
  index, _ = make(tmp_path)
  assert index.hits(QUERIES, 2)[0].scores.dtype == np.float32


def test_who_builds_an_index_beside_another_waits_and_then_says_so(
  tmp_path, monkeypatch, caplog
):
  monkeypatch.setattr(building, "_PATIENCE", 0.3)
  source = cases.write(tmp_path / "c.jsonl")
  folder = tmp_path / "index"
  folder.mkdir()
  with (folder / ".lock").open("w") as file:
    fcntl.flock(file, fcntl.LOCK_EX)
    with pytest.raises(ValueError, match="another process has worked on it"):
      building.build(source, folder, building.Settings("bm25"))
    assert f"{folder}: another process is building it" in caplog.text
  assert building.build(source, folder, building.Settings("bm25"))


def test_an_index_of_an_earlier_kind_is_refused(tmp_path):
  make(tmp_path)
  path = tmp_path / "index" / "index.json"
  identity = json.loads(path.read_text())
  path.write_text(json.dumps(identity | {"kind": "faiss_flat"}))
  with pytest.raises(ValueError, match=r"'faiss_flat' is an earlier.*build it"):
    opening.open_index(tmp_path / "index", encoder=cases.Encoder())
