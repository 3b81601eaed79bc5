"""A folder of prepared questions: written atomically, verified when read."""

from __future__ import annotations

import hashlib
import json
import pathlib

import pyarrow.parquet as pq
import pytest

from anysearch_jax import config as config_lib
from anysearch_jax import types
from anysearch_jax.data import formats, prepared, preparing
from anysearch_jax.launch import parts


def _entry(dataset, split, number, **values):
  entry = preparing.Entry(
    id=f"{dataset}/{split}_{number}",
    question=f"{dataset} {split} {number}?",
    golden_answers=("x", f"{number}"),
    dataset=dataset,
    split=split,
    hops=None,
    metadata="{}",
  )
  return entry._replace(**values)


def _parts(**sizes):
  return {
    name: preparing.Part(
      [_entry(*name.rsplit("_", 1), i) for i in range(size)], read=size
    )
    for name, size in sizes.items()
  }


def _write(folder, mix=(), **sizes):
  made = _parts(**sizes)
  mixed = preparing.mix(made, preparing.Settings(mix=mix))
  prepared.write(folder, made, mixed, {"settings": {"mix": list(mix)}})
  return prepared.Prepared(folder)


def test_written_questions_are_read_back(tmp_path):
  known = {"gold_doc_ids": ["7"], "supporting": [{"title": "caf\u00e9"}]}
  entry = _entry("nq", "dev", 0, hops=3, metadata=json.dumps(known))
  made = {"nq_dev": preparing.Part([entry, _entry("nq", "dev", 1)], read=2)}
  prepared.write(tmp_path / "qa", made, [], {})
  rows = prepared.Prepared(tmp_path / "qa").rows("nq_dev")
  of = {"dataset": "nq", "split": "dev"}
  assert list(rows) == [
    types.Question(f"nq/dev_{i}", f"nq dev {i}?", ("x", f"{i}"), metadata=more)
    for i, more in enumerate(({**known, **of, "hops": 3}, of))
  ]
  assert rows[-1] == rows[1]
  with pytest.raises(IndexError):
    rows[2]


def test_manifest_lists_contents(tmp_path):
  made = _parts(nq_train=2, popqa_test=0)
  part = made["nq_train"]
  part.read, part.unmatched = 5, 1
  part.dropped.update({"no answer": 2, "asked twice": 1})
  settings = {"settings": {"seed": 3}}
  prepared.write(tmp_path / "qa", made, part.entries[::-1], settings)
  manifest = json.loads((tmp_path / "qa" / "manifest.json").read_text())
  listed = manifest.pop("files")
  nothing = {"read": 0, "kept": 0, "dropped": {}, "unmatched": 0}
  assert manifest == {
    "version": 1,
    **settings,
    "mixed": {"nq": 2},
    "splits": {
      "nq_train": {
        "read": 5,
        "kept": 2,
        "dropped": {"asked twice": 1, "no answer": 2},
        "unmatched": 1,
      },
      "popqa_test": nothing,
    },
  }
  assert list(listed) == ["nq_train.parquet", "train.parquet"]
  content = (tmp_path / "qa" / "train.parquet").read_bytes()
  assert listed["train.parquet"] == {
    "bytes": len(content),
    "sha256": hashlib.sha256(content).hexdigest(),
  }
  # Other programs can read the files.
  table = pq.read_table(tmp_path / "qa" / "train.parquet").to_pylist()
  assert [row["id"] for row in table] == ["nq/train_1", "nq/train_0"]


def test_rewriting_repairs_and_other_contents_are_rejected(tmp_path):
  folder = tmp_path / "qa"
  _write(folder, nq_test=3)
  path = folder / "nq_test.parquet"
  content = path.read_bytes()
  path.write_bytes(content[:-9])
  _write(folder, nq_test=3)
  assert path.read_bytes() == content
  with pytest.raises(ValueError, match="name another --output"):
    _write(folder, nq_test=4)
  assert path.read_bytes() == content
  (tmp_path / "mine").mkdir()
  (tmp_path / "mine" / "thesis.txt").write_text("words")
  with pytest.raises(ValueError, match="name another --output"):
    _write(tmp_path / "mine", nq_test=3)
  assert (tmp_path / "mine" / "thesis.txt").read_text() == "words"


@pytest.mark.parametrize(
  "damage",
  [
    lambda content: content[:-1],
    lambda content: content[:50] + bytes([content[50] ^ 1]) + content[51:],
    lambda content: b"",
  ],
)
def test_damaged_file_is_rejected(tmp_path, damage):
  _write(tmp_path / "qa", nq_test=3, popqa_test=2)
  path = tmp_path / "qa" / "nq_test.parquet"
  path.write_bytes(damage(path.read_bytes()))
  opened = prepared.Prepared(tmp_path / "qa")
  with pytest.raises(ValueError, match="nq_test.parquet: found SHA-256"):
    opened.evaluation_questions(("nq",))
  assert len(opened.evaluation_questions(("popqa",))) == 2


def test_folder_that_is_not_prepared_is_rejected(tmp_path):
  with pytest.raises(ValueError, match="a folder of anysearch prepare"):
    prepared.Prepared(tmp_path)
  (tmp_path / "manifest.json").write_text('{"version": 0}')
  with pytest.raises(ValueError, match="found version 0 of prepared data"):
    prepared.Prepared(tmp_path)
  (tmp_path / "manifest.json").write_text('{"versi')
  with pytest.raises(ValueError, match="not a whole JSON file"):
    prepared.Prepared(tmp_path)
  opened = _write(tmp_path / "qa", nq_test=3)
  with pytest.raises(ValueError, match="no 'train', expected one of nq_test"):
    opened.questions("train", 5, 0)
  (tmp_path / "qa" / "nq_test.parquet").unlink()
  with pytest.raises(ValueError, match="No such file"):
    opened.rows("nq_test")


def test_training_goes_through_the_mix_epoch_by_epoch(tmp_path):
  sizes = {"nq_train": 4, "hotpotqa_train": 3}
  opened = _write(tmp_path / "qa", ("nq", "hotpotqa"), **sizes)
  stream = opened.questions("train", 20, 42)
  assert len(stream) == 20
  ids = [question.id for question in stream]
  assert set(ids[:7]) == set(ids[7:14]) and len(set(ids[:7])) == 7
  assert ids[:7] != ids[7:14]
  alone = opened.questions("nq_train", 4, 42)
  assert {q.metadata["dataset"] for q in alone} == {"nq"}


def test_smaller_evaluation_is_a_subset_of_a_larger_one(tmp_path):
  sizes = {"nq_train": 9, "nq_dev": 5, "nq_test": 40, "zebra_test": 1}
  opened = _write(tmp_path / "qa", musique_dev=30, hotpotqa_train=3, **sizes)
  few, more = (opened.evaluation_questions(per_dataset=n) for n in (10, 20))
  names = [q.metadata["dataset"] for q in few]
  # The paper's datasets come first; test if there is one, otherwise dev.
  assert names == ["nq"] * 10 + ["musique"] * 10 + ["zebra"]
  assert {q.metadata["split"] for q in few} == {"test", "dev"}
  assert [q.id for q in few[:10]] == [q.id for q in more[:10]]
  assert [q.id for q in few[10:20]] == [q.id for q in more[20:30]]
  every = opened.evaluation_questions(("nq",))
  assert len(every) == 40 and every[:10] == few[:10]
  assert [q.id for q in every] != sorted(q.id for q in every)
  # The selection does not depend on other datasets in the folder.
  fewer = _write(tmp_path / "fewer", nq_test=30)
  kept = [q for q in every if int(q.id.rpartition("_")[2]) < 30]
  assert fewer.evaluation_questions(("nq",)) == kept
  assert len(opened.evaluation_questions(("nq",), split="dev")) == 5
  with pytest.raises(ValueError, match="no evaluation split of hotpotqa"):
    opened.evaluation_questions(("hotpotqa",))


def test_an_interrupted_writer_leaves_no_folder(tmp_path, monkeypatch):
  write = pathlib.Path.write_bytes

  def interrupted(path, content):
    if path.name.startswith("popqa"):
      raise KeyboardInterrupt
    return write(path, content)

  monkeypatch.setattr(pathlib.Path, "write_bytes", interrupted)
  with pytest.raises(KeyboardInterrupt):
    _write(tmp_path / "qa", nq_test=3, popqa_test=1)
  assert not list(tmp_path.iterdir())


def _config(**values):
  retrieval = values.pop("retrieval", {"kind": "http", "url": "http://x"})
  return config_lib.ExperimentConfig(
    data=config_lib.DataConfig(**values),
    retrieval=config_lib.RetrievalConfig(**retrieval),
  )


def test_a_configuration_names_its_source(tmp_path):
  _write(tmp_path / "qa", ("nq",), nq_train=4, nq_test=2)
  path = str(tmp_path / "qa")
  source = parts.source(_config(source="prepared", path=path))
  assert len(source.questions("train", 9, 0)) == 9
  assert len(source.evaluation_questions()) == 2
  for config, message in (
    (_config(source="prepared"), "data.path: found nothing"),
    (_config(source="web"), "found 'web', expected 'world', 'prepared'"),
    (
      _config(source="prepared", path=path, retrieval={}),
      "'lexical', .* Build an index",
    ),
  ):
    with pytest.raises(ValueError, match=message):
      parts.source(config)


def test_a_file_of_questions_says_what_it_leaves_out(tmp_path, caplog):
  path, row = tmp_path / "mine.jsonl", {"question": "Who?", "answer": "Ana"}

  def read(*rows):
    path.write_text("".join(json.dumps(each) + "\n" for each in rows))
    return prepared.QuestionFile(str(path)).evaluation_questions()

  assert len(read(row, {"question": "When?", "answer": ""})) == 1
  assert "mine.jsonl: 1 of 2 rows are left out: no answer." in caplog.text
  named = row | {"dataset": "nq"}
  for rows in ((named, row), (row, named)):
    with pytest.raises(formats.DataError) as refused:
      read(*rows)
    assert "its rows do not name their dataset" in str(refused.value)


def test_the_world_is_one_dataset():
  source = parts.source(config_lib.ExperimentConfig())
  few, more = (source.evaluation_questions(("world",), n) for n in (7, 20))
  assert few == more[:7] and few == source.evaluation_questions(per_dataset=7)
  ids = [q.id for q in source.evaluation_questions()]
  assert len(set(ids)) == 1000
  # The same questions as in earlier evaluations, so that they can be paired.
  digest = hashlib.sha256("\n".join(ids).encode()).hexdigest()
  assert digest.startswith("9640de47c800468f")
  assert all(q.id.startswith("held-out/") for q in more)
  (first,) = source.evaluation_questions(per_dataset=1, split="dev")
  assert first.id.startswith("dev/")
  with pytest.raises(ValueError, match="'nq': data.source 'world' has only"):
    source.evaluation_questions(("nq", "world"))
  with pytest.raises(ValueError, match="Found split 'test'; expected train"):
    source.evaluation_questions(split="test")


@pytest.mark.parametrize(
  "row",
  [
    {"question": "Who?", "answer": "Ann", "dataset": "nq"},
    {
      "question": "Who?",
      "golden_answers": ["Ann"],
      "metadata": {"dataset": "nq"},
    },
    {
      "question": "Who?",
      "data_source": "searchR1_nq",
      "reward_model": {"ground_truth": {"target": ["Ann"]}},
    },
  ],
)
def test_a_question_file_may_name_its_dataset(tmp_path, row):
  path = tmp_path / "my-test.jsonl"
  path.write_text(json.dumps(row) + "\n")
  (question,) = prepared.QuestionFile(str(path)).evaluation_questions()
  assert question.metadata["dataset"] == "nq"
