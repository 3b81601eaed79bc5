"""Building indexes: at once, resumed, by several processes, or refused."""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import os
import signal
import threading
import types

import commands
import faiss
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import retrieval_cases as cases
import source_tree

from anysearch_jax.launch import build_index
from anysearch_jax.launch import flags as launch_flags
from anysearch_jax.retrieval import passages
from anysearch_jax.retrieval.index import building, opening, search, vectors

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
    source, tmp_path / name, settings(kind, tmp_path, **values), encoder=encoder
  )
  assert found
  return opening.open_index(tmp_path / name, encoder=encoder), encoder


@pytest.mark.parametrize("kind", KINDS)
def test_an_index_of_e5_passes_the_authors_health_check(tmp_path, kind):
  """As `retrieval/health.py` of their repository checks it."""
  index, encoder = make(tmp_path, kind)
  assert index.health_fields["model"] == ""  # It has no folder.
  model = "intfloat/e5-base-v2"
  how = {"encoder": encoder, "model": model if encoder else ""}
  found = search.SearchIndex(
    index.corpus, index._index, identity=index.identity, **how
  ).health_fields
  assert found["index_size"] == found["corpus_size"] == 20
  canonical = {"backend": "e5-faiss-flat", "index_metric": "inner_product"}
  passes = (canonical | {"model": model}).items() <= found.items()
  passes = passes and found["index_type"].startswith("IndexFlat")
  assert passes == bool(encoder)


@pytest.mark.parametrize("kind", KINDS)
def test_built_index_answers_and_is_built_once(tmp_path, kind):
  index, _ = make(tmp_path, kind)
  (first, *_), found = index.search(QUERIES, 3)
  assert (first.id, first.title) == ("7", '"Title 7"')
  assert first.contents == QUERIES[0]
  assert len(found) == 3 and found[0].score >= found[1].score >= found[2].score
  assert index.search([], 3) == []
  assert len(index) == 20
  with pytest.raises(ValueError, match="expected 1 or more"):
    index.search(QUERIES, 0)
  files = [p for p in (tmp_path / "index").rglob("*") if p.is_file()]
  before = {p: p.stat().st_mtime_ns for p in files if p.name != ".lock"}
  again, encoder = make(tmp_path, kind)
  assert again.identity == index.identity
  assert encoder is None or encoder.encoded == 0
  assert before == {p: p.stat().st_mtime_ns for p in before}


@pytest.mark.parametrize(
  ("changes", "count", "name"),
  [
    ({"kind": "bm25"}, 20, "kind"),
    ({"dtype": "bfloat16"}, 20, "dtype"),
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
    ("flat", {"faiss_file": "x"}, "for kind faiss_file only"),
    ("flat", {"encoder": None}, "encoder: found none"),
    ("bm25", {"encoder": cases.Encoder()}, "encoder: found one"),
    ("bm25", {"language": "klingon"}, "found 'klingon', expected one of"),
    ("bm25", {"vectors": ("x",)}, "for kind flat only"),
    ("flat", {"search": 8}, "for kind faiss_file only"),
    ("flat", {"shard": 0}, "expected at least 1"),
  ],
)
def test_invalid_settings_are_refused(tmp_path, kind, values, message):
  source = cases.write(tmp_path / "c.jsonl")
  encoder = None if kind == "bm25" else cases.Encoder()
  encoder = values.pop("encoder", encoder)
  how = building.Settings(kind, **values)
  with pytest.raises(ValueError, match=message):
    building.build(source, tmp_path / "i", how, encoder=encoder)


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


@pytest.mark.parametrize("is_damaged", [False, True])
def test_killed_builder_encodes_what_is_unfinished_or_damaged(
  tmp_path, is_damaged
):
  source = cases.write(tmp_path / "c.jsonl")
  folder, how = tmp_path / "index", settings("flat", tmp_path)
  with pytest.raises(Killed):
    building.build(source, folder, how, encoder=Dying(12))
  with pytest.raises(ValueError, match="no finished index"):
    opening.open_index(folder, encoder=cases.Encoder())
  file = folder / "vectors" / "vectors-00000.npy"
  if is_damaged:
    cases.damage(file)
  found, encoder = make(tmp_path)
  assert encoder.encoded == (14 if is_damaged else 8)
  whole, _ = make(tmp_path, name="whole")
  assert found.identity == whole.identity
  assert found.search(QUERIES, 5) == whole.search(QUERIES, 5)


def test_several_processes_build_one_index(tmp_path):
  source = cases.write(tmp_path / "c.jsonl", 100)
  encoders = [cases.Encoder() for _ in range(3)]
  ended = []

  def work(process):
    how = {"encoder": encoders[process], "process": process, "processes": 3}
    flat = settings("flat", tmp_path)
    ended.append(building.build(source, tmp_path / "index", flat, **how))

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


_SLOW = """
import sys, time
sys.path.insert(0, "tests/support")
import retrieval_cases
from anysearch_jax.retrieval.index import building
class Slow(retrieval_cases.Encoder):
  def passages(self, texts):
    found = super().passages(texts)
    print("shard", flush=True)
    time.sleep(0.5)
    return found
flat = building.Settings("flat", shard=6)
building.build(sys.argv[1], sys.argv[2], flat, encoder=Slow())
"""


def test_a_builder_may_be_killed_at_any_moment(tmp_path):
  source = cases.write(tmp_path / "c.jsonl", 40)
  for shards in (1, 3):
    started = source_tree.started("-c", _SLOW, source, tmp_path / "index")
    with started as process:
      for _ in range(shards):
        process.stdout.readline()
      process.send_signal(signal.SIGKILL)
  found, encoder = make(tmp_path, count=40)
  assert 0 < encoder.encoded < 40
  whole, _ = make(tmp_path, count=40, name="whole")
  assert found.search(QUERIES, 5) == whole.search(QUERIES, 5)


# Opening.


@pytest.mark.parametrize(
  ("encoder", "sentence"),
  [
    (cases.Encoder(name="other"), "expected the same encoder"),
    (cases.Encoder(dim=8), "expected the same encoder"),
    (None, "pass that encoder"),
    ("here", "pass that encoder"),
  ],
)
def test_another_encoder_is_refused(tmp_path, encoder, sentence):
  make(tmp_path)
  with pytest.raises(ValueError, match=sentence):
    opening.open_index(tmp_path / "index", encoder=encoder)


def test_damage_of_an_index_is_refused(tmp_path):
  make(tmp_path)
  folder, encoder = tmp_path / "index", cases.Encoder()
  file = folder / "vectors" / "vectors-00001.npy"
  cases.damage(file)
  opening.open_index(folder, encoder=encoder)
  with pytest.raises(vectors.DamagedError, match=file.name):
    opening.open_index(folder, encoder=encoder, verify=True)
  os.truncate(tmp_path / "c.jsonl", 300)
  with pytest.raises(passages.CorpusError, match="not the one that was"):
    opening.open_index(folder, encoder=encoder)


def test_a_disk_without_the_space_is_refused_before_encoding(
  tmp_path, monkeypatch
):
  source, encoder, told = cases.write(tmp_path / "c"), cases.Encoder(), []
  of = building.Settings("flat", dtype="bfloat16", shard=8)

  def build(free):
    usage = lambda path: types.SimpleNamespace(free=free)  # noqa: E731
    monkeypatch.setattr(building.shutil, "disk_usage", usage)
    return building.build(
      source, tmp_path / "i", of, encoder=encoder, on_plan=told.append
    )

  needed = 20 * 16 * 2
  with pytest.raises(ValueError, match="found 0.0 GB free; expected more"):
    build(needed - 1)
  assert not told and encoder.encoded == 0
  assert build(needed) and len(told) == 1
  (tmp_path / "i" / "index.json").unlink()
  (tmp_path / "i" / "vectors" / "vectors-00000.json").unlink()
  assert build(8 * 16 * 2)  # What is there needs no more.
  files = (tmp_path / "i" / "vectors").glob("*.npy")
  assert sum(np.load(file).nbytes for file in files) == needed


def test_a_faiss_file_of_another_corpus_or_none_is_refused(tmp_path):
  make(tmp_path, "faiss_file")
  source = cases.write(tmp_path / "d.jsonl", 21)
  with pytest.raises(ValueError, match="20 rows of 16, expected 21 of"):
    building.build(
      *(source, tmp_path / "i", settings("faiss_file", tmp_path)),
      encoder=cases.Encoder(),
    )
  (tmp_path / "user.index").unlink()
  with pytest.raises(vectors.DamagedError, match=r"user\.index"):
    opening.open_index(tmp_path / "index", encoder=cases.Encoder())


def test_the_command_builds_and_says_what_is_wrong(tmp_path, capsys):
  source = cases.write(tmp_path / "c.jsonl.gz", 50)
  asked = tmp_path / "asked.jsonl"
  rows = [("number n7", ["7"]), ("number n8", ["8", "9"]), ("none", [])]
  lines = [{"question": q, "metadata": {"gold_doc_ids": g}} for q, g in rows]
  asked.write_text("".join(json.dumps(line) + "\n" for line in lines))
  command = (build_index, f"--corpus={source}", "--cache=")
  with contextlib.redirect_stdout(io.StringIO()) as said:
    with commands.defined(build_index):
      found = launch_flags._parse_argv(
        ["x", *command[1:], f"--output={tmp_path / 'i'}"]
        + [f"--questions={asked}", "--topk=1"]
      )
      build_index.main(found)
  assert "bm25 over 50 passages" in said.getvalue()
  assert "n     2  any 1.000  all 0.500" in said.getvalue()
  identity = json.loads((tmp_path / "i" / "index.json").read_text())
  assert identity["corpus"]["passages"] == 50
  cases.write(source, 5, extra=cases.lines(2))
  ended, said = commands.printed(*command, f"--output={tmp_path / 'twice'}")
  assert ended == 0
  assert "2 of 7 passages have the id of an earlier one" in said
  twice = opening.open_index(tmp_path / "twice")
  (answer,) = twice.search(["number n1"], 7)
  ids = [passage.id for passage in answer]
  assert sorted(ids) == ["0", "1", "2", "3", "4"]
  cases.write(source, 5, extra=["nothing"])
  ended = commands.run(*command, f"--output={tmp_path / 'j'}")
  assert "anysearch build_index: " in ended and "line 6" in ended


@pytest.mark.parametrize("source_flag", ["corpus", "documents"])
def test_questions_without_gold_passages_are_said_and_no_error(
  tmp_path, source_flag
):
  source = cases.write(tmp_path / "c.jsonl", 5)
  if source_flag == "documents":
    source = tmp_path / "notes"
    source.mkdir()
    (source / "a.md").write_text("The lease ends in 2027.")
  mine = tmp_path / "mine.jsonl"
  mine.write_text('{"question": "who?", "answer": "Ann"}\n')
  gold = tmp_path / "gold.jsonl"
  row = {"question": "lease", "metadata": {"gold_doc_ids": ["a.md#1"]}}
  gold.write_text(json.dumps(row))
  ended, said = commands.printed(
    *(
      build_index,
      f"--{source_flag}={source}",
      "--cache=",
      f"--questions={mine},{gold}",
    ),
    f"--output={tmp_path / 'i'}",
  )
  assert ended == 0, ended
  assert "mine.jsonl: found 1 questions without metadata.gold_doc_ids" in said
  share = "1.000" if source_flag == "documents" else "0.000"
  assert f"n     1  any {share}" in said


def test_recall_is_measured_on_prepared_questions(tmp_path):
  source = cases.write(tmp_path / "c.jsonl", 5)
  asked = tmp_path / "hotpotqa_dev.parquet"
  row = {"question": "number n3", "metadata": '{"gold_doc_ids": ["3"]}'}
  pq.write_table(pa.Table.from_pylist([row]), asked)
  ended, said = commands.printed(
    *(build_index, f"--corpus={source}", "--cache=", f"--questions={asked}"),
    f"--output={tmp_path / 'i'}",
  )
  assert ended == 0, ended
  assert "n     1  any 1.000  all 1.000" in said


def test_who_builds_an_index_beside_another_waits_and_then_says_so(
  tmp_path, monkeypatch, caplog
):
  monkeypatch.setattr(building, "_PATIENCE", 0.3)
  source = cases.write(tmp_path / "c.jsonl")
  folder = tmp_path / "index"
  folder.mkdir()
  with (folder / ".lock").open("w") as file:
    fcntl.flock(file, fcntl.LOCK_EX)
    with pytest.raises(ValueError, match="held by another process"):
      building.build(source, folder, building.Settings("bm25"))
    assert f"Waiting: {folder / '.lock'}: found it held" in caplog.text
  assert building.build(source, folder, building.Settings("bm25"))


def test_an_index_of_another_kind_is_refused(tmp_path):
  make(tmp_path)
  path = tmp_path / "index" / "index.json"
  other = {"kind": "faiss_flat"}
  path.write_text(json.dumps(json.loads(path.read_text()) | other))
  with pytest.raises(ValueError, match="'faiss_flat' is unknown.*build it"):
    opening.open_index(tmp_path / "index", encoder=cases.Encoder())
