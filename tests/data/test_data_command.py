"""launch.prepare_data: flags, folders and real questions."""

from __future__ import annotations

import json

import pytest
from absl import flags

from anysearch_jax.data import prepared
from anysearch_jax.environment import official_scoring
from anysearch_jax.launch import prepare_data


@pytest.fixture
def run():
  """Returns a function that runs the command and returns its output."""

  def run(*args):
    values = flags.FlagValues()
    with pytest.MonkeyPatch.context() as patch:
      for name in ("string", "multi_string", "list", "float", "bool"):
        define = getattr(flags, f"DEFINE_{name}")
        patch.setattr(
          flags,
          f"DEFINE_{name}",
          lambda *a, define=define, **k: define(*a, **k, flag_values=values),
        )
      prepare_data.define_flags()
    values(["prepare_data", *map(str, args)])
    return prepare_data.run(values)

  return run


def _write(path, *questions):
  path.parent.mkdir(parents=True, exist_ok=True)
  rows = [
    {"id": f"{path.stem}_{i}", "question": q, "golden_answers": ["x"]}
    for i, q in enumerate(questions)
  ]
  path.write_text("".join(json.dumps(row) + "\n" for row in rows))
  return path


def test_dataset_and_split_come_from_flags_or_rows(run, tmp_path):
  nq = tmp_path / "odd:name=1.jsonl"
  nq.write_text('{"question": "who b", "answer": ["x"]}\n')
  table = tmp_path / "table.csv"
  table.write_text("Question,Answer\nwho c?,y\n")
  said = run(
    f"--input=nq:train={nq}",
    f"--input=bamboogle:test:bamboogle={table}",
    f"--output={tmp_path / 'qa'}",
    "--mix=nq",
  )
  assert "nq_train" in said and "train (mixed)" in said
  opened = prepared.Prepared(tmp_path / "qa")
  assert opened.names == ("bamboogle_test", "nq_train", "train")
  assert [(i["dataset"], i["format"]) for i in opened.manifest["inputs"]] == [
    ("nq", "plain"),
    ("bamboogle", "bamboogle"),
  ]


def _own(path, numbers):
  lines = [
    json.dumps({"question": f"Who owns house {n}?", "answer": "Ann"})
    for n in numbers
  ]
  path.write_text("\n".join(lines))
  return path


def test_own_questions_need_no_name_and_stay_in_their_split(run, tmp_path):
  mine = _own(tmp_path / "My notes.jsonl", range(100))
  run(f"--input={mine}", "--split=0.8", f"--output={tmp_path / 'a'}")
  first = prepared.Prepared(tmp_path / "a")
  assert first.names == ("my-notes_test", "my-notes_train", "train")
  train = set(first.rows("train").column("question"))
  test = set(first.rows("my-notes_test").column("question"))
  assert len(train) + len(test) == 100 and not train & test
  assert 70 <= len(train) <= 90
  # The same command again, another order, and more questions.
  run(f"--input={mine}", "--split=0.8", f"--output={tmp_path / 'a'}")
  _own(mine, reversed(range(150)))
  run(f"--input={mine}", "--split=0.8", f"--output={tmp_path / 'b'}")
  more = prepared.Prepared(tmp_path / "b")
  assert train <= set(more.rows("train").column("question"))
  assert test <= set(more.rows("my-notes_test").column("question"))
  assert len(more.rows("train")) + len(more.rows("my-notes_test")) == 150
  # A split that a file names stays.
  run(
    f"--input=mine:test={mine}",
    *(
      "--split=0.5",
      f"--input={_own(tmp_path / 'rest.jsonl', range(200, 220))}",
    ),
    f"--output={tmp_path / 'c'}",
  )
  assert len(prepared.Prepared(tmp_path / "c").rows("mine_test")) == 150


@pytest.mark.parametrize(
  ("flag", "message"),
  [("--mix=", "have 80 % of the rows"), ("--split=1.0", "for test among 3")],
)
def test_own_questions_that_cannot_be_split_are_refused(
  run, tmp_path, flag, message
):
  mine = _own(tmp_path / "mine.jsonl", range(3))
  with pytest.raises(ValueError, match=message):
    run(f"--input={mine}", flag, f"--output={tmp_path / 'a'}")
  assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("layout", ["{}/{}.jsonl", "{}_{}.jsonl"])
def test_folder_input_gives_the_papers_setup(run, tmp_path, layout):
  folder = tmp_path / "flashrag"
  for name in (*prepare_data.PAPER, "squad_dev", "nq_dev"):
    dataset, split = name.split("_")
    _write(folder / layout.format(dataset, split), f"{name} 1", f"{name} 2")
  (folder / "README.md").write_text("words")
  run(f"--folder={folder}", f"--output={tmp_path / 'qa'}")
  opened = prepared.Prepared(tmp_path / "qa")
  assert set(opened.names) == {*prepare_data.PAPER, "train"}
  assert opened.manifest["mixed"] == {"hotpotqa": 2, "nq": 2}
  asked = [q.metadata["dataset"] for q in opened.evaluation_questions()]
  assert list(dict.fromkeys(asked)) == list(official_scoring.DATASETS)
  assert len(asked) == 14
  run(f"--folder={folder}", f"--output={tmp_path / 'all'}", "--sets=all")
  assert {"squad_dev", "nq_dev"} < set(
    prepared.Prepared(tmp_path / "all").names
  )
  run(f"--folder={folder}", f"--output={tmp_path / 'one'}", "--sets=nq_dev")
  assert prepared.Prepared(tmp_path / "one").names == ("nq_dev",)


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    ((), "name --folder or --input"),
    (("--input=nq:later=a.jsonl",), "found split 'later'"),
    (("--input=nq:dev:csv=a.jsonl",), "format: found 'csv'"),
    (("--folder={}/empty",), "found no <dataset>/<split>.jsonl"),
    (("--folder={}", "--sets=nq_train,nq_dev"), "found no file of nq_dev"),
    (("--folder={}",), "The mix asks for hotpotqa"),
    (("--folder={}", "--mix=../x"), "expected a plain name"),
  ],
)
def test_invalid_flags_are_rejected(run, tmp_path, arguments, message):
  _write(tmp_path / "nq_train.jsonl", "who")
  filled = [text.format(tmp_path) for text in arguments]
  with pytest.raises(ValueError, match=f"(?i){message}"):
    run(f"--output={tmp_path / 'qa'}", *filled)
  assert not (tmp_path / "qa").exists()


def test_training_excludes_evaluation_questions_of_a_prepared_folder(
  run, tmp_path
):
  _write(tmp_path / "b" / "nq_test.jsonl", "who wrote \u201cEmma\u201d", "b")
  run(f"--folder={tmp_path / 'b'}", f"--output={tmp_path / 'eval'}")
  train = _write(tmp_path / "nq_train.jsonl", "Who wrote Emma?", "c")
  run(
    f"--input=nq:train={train}",
    f"--input=nq:test={tmp_path / 'eval' / 'nq_test.parquet'}",
    "--mix=nq",
    f"--output={tmp_path / 'train'}",
  )
  opened = prepared.Prepared(tmp_path / "train")
  assert opened.rows("train").column("question") == ["c?"]
  assert opened.names == ("nq_test", "nq_train", "train")


def test_summary_counts_answers_that_match_nothing(run, tmp_path):
  path = _write(tmp_path / "popqa_test.jsonl", "b", "c")
  rows = list(map(json.loads, path.read_text().splitlines()))
  rows[0]["golden_answers"] = "['x', 'y']"
  rows[1]["golden_answers"] = ["*"]
  path.write_text("".join(json.dumps(row) + "\n" for row in rows))
  said = run(f"--folder={tmp_path}", f"--output={tmp_path / 'qa'}")
  assert "kept 1 that exact match accepts no answer to" in said
  asked = prepared.Prepared(tmp_path / "qa").rows("popqa_test")
  assert [q.golden_answers for q in asked] == [("x", "y"), ("*",)]


def _hotpot_row(title, text):
  return {
    "_id": title,
    "question": f"who made {title}?",
    "answer": "x",
    "supporting_facts": [[title, 0]],
    "context": [[title, [text]], ["Noise", ["a b c d."]]],
  }


def test_completed_corpus_appears_beside_the_questions_or_not_at_all(
  run, tmp_path
):
  rows = [
    _hotpot_row(name, f"{name} was made by hand in {year}.")
    for name, year in (("Emma", 1815), ("Bath", 60))
  ]
  questions = tmp_path / "hotpotqa_dev.json"
  questions.write_text(json.dumps([*rows, {"question": "no answer"}]))
  corpus = tmp_path / "c.jsonl"
  corpus.write_text(
    '{"id": "0", "contents": "Emma\\nEmma was made by hand in"}'
  )
  output = tmp_path / "qa"
  flags_ = (
    f"--input=hotpotqa:dev={questions}",
    "--mix=",
    "--skip_malformed",
    f"--output={output}",
  )
  with pytest.raises(ValueError, match="c.jsonl.gz: found no file"):
    run(*flags_, f"--complete_corpus={corpus}.gz")
  assert not output.exists()
  said = run(*flags_, f"--complete_corpus={corpus}")
  header, line, total, _ = said.splitlines()[-4:]
  assert header.split() == (
    ["gold", "documents", "questions", "named", "in", "corpus", "added"]
  )
  note = "1 added to other text of their title"
  assert line.split(maxsplit=5) == ["hotpotqa_dev", "2", "2", "0", "2", note]
  assert total == f"corpus: {output / 'corpus.jsonl'} has 2 more passages"
  lines = (output / "corpus.jsonl").read_text().splitlines()
  added = [json.loads(line) for line in lines[1:]]
  assert added[1]["contents"] == '"Bath"\nBath was made by hand in 60.'
  opened = prepared.Prepared(output)
  named = [q.metadata["gold_doc_ids"] for q in opened.evaluation_questions()]
  assert sorted(named) == sorted([row["id"]] for row in added)
  assert opened.manifest["corpus"]["added"] == 2
  run(*flags_, f"--complete_corpus={corpus}")
  assert (output / "corpus.jsonl").read_text().splitlines() == lines
  corpus.write_text(corpus.read_text() + "\n")
  with pytest.raises(ValueError, match="holds other data"):
    run(*flags_, f"--complete_corpus={corpus}")
