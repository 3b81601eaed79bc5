"""Cleaning, deduplicating and mixing: every row is kept or counted."""

from __future__ import annotations

import csv
import gzip
import json
import random
import tempfile
from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from anysearch_jax.data import files, formats, preparing


def write_lines(path, rows):
  opener = gzip.open if path.suffix == ".gz" else open
  with opener(path, "wt", encoding="utf-8") as file:
    file.writelines(json.dumps(row) + "\n" for row in rows)
  return path


def rows_of(*questions):
  return [
    {"id": f"q{i}", "question": question, "golden_answers": ["x"]}
    for i, question in enumerate(questions)
  ]


def prepare(*sources, **settings):
  inputs = [preparing.Input(*source) for source in sources]
  return preparing.prepare(inputs, preparing.Settings(**settings))[0]


@pytest.mark.parametrize(
  ("found", "read"),
  [
    ("who wrote emma", "who wrote emma?"),
    ("Who wrote Emma?", "Who wrote Emma?"),
    ("  who \t wrote\n Emma ?  ", "who wrote Emma ?"),
    ("Name the author.", "Name the author.?"),
    ('"Who said ""no""?"', 'Who said "no"?'),
    ('"Who said "no"?"', '"Who said "no"?"?'),
    ('"To be" is from what', '"To be" is from what?'),
    ("caf\u00e9 \ud83d of?", "caf\u00e9 \ufffd of?"),
  ],
)
def test_question_is_one_line_with_question_mark(found, read):
  assert formats.as_question(found) == read


def test_answers_that_normalise_to_nothing_are_removed():
  found = [
    *("*", " Jane  Austen ", "the", "---", "Jane Austen", "jane austen", ""),
  ]
  assert formats.accepted_answers(found) == ("Jane Austen", "jane austen")


def test_rows_are_counted_as_kept_or_dropped_by_reason(tmp_path):
  train = rows_of("who a", "Who A?", "in dev?", "unanswered")
  train[1]["golden_answers"] = ["y", "*"]
  train[3]["golden_answers"] = ["*", "the"]
  dev = rows_of("In DEV", "b")
  parts = prepare(
    (write_lines(tmp_path / "t.jsonl", train), "nq", "train"),
    (write_lines(tmp_path / "d.jsonl", dev), "hotpotqa", "dev"),
  )
  nq, hotpot = parts["nq_train"], parts["hotpotqa_dev"]
  assert nq.read == 4 and hotpot.read == 2
  (kept,) = nq.entries
  assert kept.id == "nq/q0" and kept.question == "who a?"
  assert kept.golden_answers == ("x", "y")
  assert nq.dropped == {
    "no answer": 1,
    "asked twice, answers merged": 1,
    "in an evaluation split": 1,
  }
  assert [e.question for e in hotpot.entries] == ["In DEV?", "b?"]


def test_evaluation_set_keeps_its_published_questions(tmp_path):
  rows = rows_of("What is Easy Living?", "What is easy living", "unmatched")
  rows[1]["golden_answers"] = ["y"]
  rows[2]["golden_answers"] = ["The", "*", " "]
  path = write_lines(tmp_path / "a.jsonl", rows)
  parts = prepare(
    (path, "popqa", "test"), (path, "popqa", "dev"), (path, "nq", "train")
  )
  for name in ("popqa_test", "popqa_dev"):
    part = parts[name]
    assert [(e.id, e.golden_answers) for e in part.entries] == [
      ("popqa/q0", ("x",)),
      ("popqa/q1", ("y",)),
      ("popqa/q2", ("The", "*")),
    ]
    assert (part.read, part.dropped, part.unmatched) == (3, {}, 1)
  # A training row whose answers all normalise to nothing is dropped.
  assert parts["nq_train"].dropped["no answer"] == 1
  assert parts["nq_train"].dropped["asked twice, answers merged"] == 1


@pytest.mark.parametrize(
  ("asked", "held"),
  [
    ("What's the Tower\u2019s height", "what\u2019s the Tower's height?"),
    ("who is Beyonce\u0301", "Who is Beyonc\u00e9?"),
    ("who is Beyonce", "Who is Beyonc\u00e9?"),
    ("the 2003\u20132004 season", "2003-2004 season?"),
    ("the 2003\u22122004 season", "The 2003\u20142004 season?"),
    ("a well-known song", "well known song?"),
    ("\u201cHalo\u201d by", '"Halo" by?'),
    ("\u00abHalo\u00bb by", "`Halo\u00b4 by?"),
    ("\uff37\uff48\uff4f wrote\u00a0it\uff1f", "who wrote it"),
    ("zero\u200bwidth\u00ad", "zerowidth?"),
    ("stra\u00dfe", "STRASSE?"),
  ],
)
def test_leak_is_found_despite_spelling(tmp_path, asked, held):
  train = write_lines(tmp_path / "t.jsonl", rows_of(asked, "another"))
  test = write_lines(tmp_path / "e.jsonl", rows_of(held))
  part = prepare((train, "nq", "train"), (test, "nq", "test"))["nq_train"]
  assert [e.question for e in part.entries] == ["another?"]
  assert part.dropped == {"in an evaluation split": 1}


def test_control_characters_are_spaces(tmp_path):
  rows = rows_of("who\x07wrote \x1bEmma", "fine")
  rows[1]["golden_answers"] = ["Jane\x7fAusten"]
  path = write_lines(tmp_path / "a.jsonl", rows)
  part = prepare((path, "nq", "dev"))["nq_dev"]
  assert [e.question for e in part.entries] == ["who wrote Emma?", "fine?"]
  assert part.entries[1].golden_answers == ("Jane Austen",)


def test_official_scorer_accepts_entity_aliases(tmp_path):
  rows = rows_of("b", "c", "d")
  for row, id_ in zip(rows, ("Q30", "Q1", None)):
    row["metadata"] = {"answer_id": id_}
  path = write_lines(tmp_path / "a.jsonl", rows)
  names = write_lines(
    tmp_path / "id_aliases.json",
    [{"Q_id": "Q30", "aliases": ["USA", "x"], "demonyms": ["American"]}],
  )
  inputs = [preparing.Input(path, "2wikimultihopqa", "dev")]
  parts, _ = preparing.prepare(
    inputs, preparing.Settings(), aliases=preparing.read_aliases(names)
  )
  entries = parts["2wikimultihopqa_dev"].entries
  found = [json.loads(e.metadata).get("official_answers") for e in entries]
  assert found == [["x", "USA", "American"], None, None]
  assert {e.golden_answers for e in entries} == {("x",)}
  with pytest.raises(ValueError, match="a.jsonl, row 1: found no Q_id"):
    preparing.read_aliases(path)


_QUESTION = st.sampled_from("who|Who?|the who|where|a||when?".split("|"))
_ANSWERS = st.lists(st.sampled_from(["x", "y", "*", "the"]), max_size=3)


@hypothesis.settings(max_examples=40)
@hypothesis.given(
  rows=st.lists(
    st.tuples(
      st.sampled_from(["nq", "popqa"]),
      st.sampled_from(["train", "dev", "test"]),
      _QUESTION,
      _ANSWERS,
    ),
    max_size=12,
  ),
)
def test_every_row_is_kept_or_dropped_for_a_reason(rows):
  values = [
    {
      "id": str(i),
      "question": question,
      "golden_answers": answers,
      "metadata": {"dataset": dataset, "split": split},
    }
    for i, (dataset, split, question, answers) in enumerate(rows)
  ]
  with tempfile.TemporaryDirectory() as folder:
    path = write_lines(Path(folder) / "a.jsonl", values)
    parts = prepare((path,), skip_malformed=True)
  assert sum(part.read for part in parts.values()) == len(rows)
  seen = {}
  for name, part in parts.items():
    assert part.read == len(part.entries) + part.dropped.total()
    assert len({e.id for e in part.entries}) == len(part.entries)
    seen[name] = {e.question.lower().strip("?") for e in part.entries}
    if name.endswith("_train"):
      assert len(seen[name]) == len(part.entries)
    for entry in part.entries:
      accepted = set(entry.golden_answers)
      assert accepted and (accepted <= {"x", "y"} or accepted <= {"*", "the"})
  trained = set().union(*(q for n, q in seen.items() if n.endswith("_train")))
  held_out = {
    question.lower().removeprefix("the ").strip("?")
    for _, split, question, answers in rows
    if split != "train" and answers
  }
  assert not {q.removeprefix("the ") for q in trained} & held_out


def test_a_mix_is_a_fixed_shuffle(tmp_path):
  a = write_lines(tmp_path / "a.jsonl", rows_of(*(f"a{i}" for i in range(30))))
  b = write_lines(tmp_path / "b.jsonl", rows_of(*(f"b{i}" for i in range(10))))
  sources = ((a, "nq", "train"), (b, "hotpotqa", "train"), (b, "popqa", "test"))
  parts = prepare(*sources[:2])

  def mixed():
    settings = preparing.Settings(mix=("nq", "hotpotqa"))
    return [e.id for e in preparing.mix(parts, settings)]

  assert mixed() == mixed()
  both = [e.id for part in parts.values() for e in part.entries]
  assert sorted(mixed()) == sorted(both) != mixed()
  datasets = "".join(id_[0] for id_ in mixed())
  assert "h" in datasets[:20] and "h" in datasets[20:]
  # All questions of popqa are held out, so none of hotpotqa remains.
  parts = prepare(*sources)
  with pytest.raises(ValueError, match=r"mix.*hotpotqa.*nq"):
    preparing.mix(parts, preparing.Settings(mix=("nq", "hotpotqa")))


def test_rows_may_name_dataset_and_split_by_aliases(tmp_path):
  path = tmp_path / "train.parquet"
  rows = [
    {
      "data_source": name,
      "question": f"q{i}",
      "reward_model": {"ground_truth": {"target": ["x"]}},
      "extra_info": {"split": split, "index": i},
    }
    for i, (name, split) in enumerate(
      [("NQ", "train"), ("2wiki", "validation"), ("trivia_qa", "test")]
    )
  ]
  pq.write_table(pa.Table.from_pylist(rows), path)
  parts = prepare((path,))
  assert list(parts) == ["2wikimultihopqa_dev", "nq_train", "triviaqa_test"]
  assert parts["nq_train"].entries[0].id == "nq/train_0"


def test_a_file_of_another_dataset_is_refused(tmp_path):
  rows = rows_of("b")
  rows[0]["metadata"] = {"dataset": "hotpotqa", "split": "test"}
  path = write_lines(tmp_path / "a.jsonl", rows)
  with pytest.raises(ValueError, match="question of hotpotqa in a file of nq"):
    prepare((path, "nq", "dev"))
  # The file's split wins: Search-R1 calls every evaluation set test.
  assert list(prepare((path, "hotpotqa", "dev"))) == ["hotpotqa_dev"]


def test_rows_without_ids_are_numbered_over_all_files(tmp_path):
  rows = [{"question": q, "answer": "x"} for q in "bcd"]
  one = write_lines(tmp_path / "one.jsonl", rows[:2])
  two = write_lines(tmp_path / "two.jsonl.gz", rows[2:])
  parts = prepare((one, "nq", "dev"), (two, "nq", "dev"))
  ids = [e.id for e in parts["nq_dev"].entries]
  assert ids == ["nq/dev_0", "nq/dev_1", "nq/dev_2"]


def test_two_questions_with_one_id_are_rejected(tmp_path):
  one = write_lines(tmp_path / "one.jsonl", rows_of("b"))
  two = write_lines(tmp_path / "two.jsonl", rows_of("c"))
  with pytest.raises(ValueError, match="id 'nq/q0' in nq dev: 'b.' and 'c.'"):
    prepare((one, "nq", "dev"), (two, "nq", "dev"))


def test_all_file_types_give_the_same_rows(tmp_path):
  rows = [{"question": f"q {i}", "answer": f"a {i}"} for i in range(5)]
  text = "".join(f"{row['question']},{row['answer']}\n" for row in rows)
  write_lines(tmp_path / "a.jsonl", rows)
  write_lines(tmp_path / "b.jsonl.gz", rows)
  write_lines(tmp_path / "lines.json", rows)
  (tmp_path / "array.json").write_text(json.dumps(rows, indent=1))
  (tmp_path / "data.json").write_text(json.dumps({"Data": rows, "Version": 1}))
  # With a byte order mark, as spreadsheets write it.
  (tmp_path / "c.csv").write_text("\ufeffquestion,answer\r\n" + text)
  (tmp_path / "d.tsv").write_text(f"question,answer\n{text}".replace(",", "\t"))
  pq.write_table(pa.Table.from_pylist(rows), tmp_path / "e.parquet")
  paths = sorted(tmp_path.iterdir())
  random.Random(0).shuffle(paths)
  for path in paths:
    assert [row for _, row in files.rows(path)] == rows, path.name
  assert len(paths) == 8


@pytest.mark.parametrize(
  ("name", "content", "row", "reason"),
  [
    ("a.jsonl", '{"question": "b", "answer": "x"}\n{"quest\n', 2, "not JSON"),
    ("a.jsonl", '\n["question"]\n', 2, "not a JSON object"),
    ("a.csv", "Question,Answer\nc?,x,y\n", 2, "another number of columns"),
    ("a.csv", "Question,Answer\n ,x\n", 2, "an empty question"),
    ("a.jsonl", '{"question": "The?", "answer": "x"}', 1, "an empty question"),
    (
      "a.jsonl",
      '{"question": "b\\u0000", "answer": "x"}',
      1,
      "a question with the character NUL",
    ),
    (
      "a.jsonl",
      f'{{"question": "b", "answer": "{"x" * 1_000_000}"}}',
      1,
      "an answer of more than 10000 characters",
    ),
  ],
)
def test_malformed_row_is_rejected_with_its_number_or_counted(
  tmp_path, name, content, row, reason
):
  path = tmp_path / name
  path.write_text(content)
  with pytest.raises(ValueError, match=f"{name}, row {row}: {reason}"):
    prepare((path, "nq", "dev"))
  part = prepare((path, "nq", "dev"), skip_malformed=True)["nq_dev"]
  assert part.dropped == {f"malformed: {reason}": 1}
  assert part.read == len(part.entries) + 1


@pytest.mark.parametrize(
  ("name", "content", "message"),
  [
    ("a.jsonl", b'{"text": "b"}', "found columns text; expected those of"),
    ("a.jsonl", b'{"question": "b", "answer": "\xff"}', "not UTF-8"),
    ("a.json", b"[1, ", "not JSON"),
    ("a.txt", b"b", "a name that ends in"),
    ("a.parquet", b"PAR1 and no more", "copy it again"),
    ("a.jsonl.gz", gzip.compress(b"x" * 9999, mtime=0)[:30], "copy it again"),
    ("a.jsonl.gz", b"plain", "copy it again"),
    ("missing.jsonl", None, "found no file"),
  ],
)
@pytest.mark.parametrize("skip", [False, True])
def test_truncated_file_is_never_skipped(
  tmp_path, name, content, message, skip
):
  path = tmp_path / name
  if content is not None:
    path.write_bytes(content)
  with pytest.raises(ValueError, match=f"{name}.*{message}"):
    prepare((path, "nq", "dev"), skip_malformed=skip)


def test_rows_without_dataset_are_rejected(tmp_path):
  path = write_lines(tmp_path / "a.jsonl", rows_of("b"))
  with pytest.raises(ValueError, match="a.jsonl.*dataset"):
    prepare((path,))


DPR = (
  "who got the first nobel prize in physics\t['Wilhelm Conrad R\u00f6ntgen']\n"
  'who said ha\t"[\'Nelson\', ""Muntz\'s""]"\n'
)


def test_dprs_questions_need_no_header(tmp_path):
  path = tmp_path / "nq-test.qa.csv"
  path.write_text(DPR)
  first, second = prepare((path, "nq", "test"))["nq_test"].entries
  assert first.question == "who got the first nobel prize in physics?"
  assert first.golden_answers == ("Wilhelm Conrad R\u00f6ntgen",)
  assert second.golden_answers == ("Nelson", "Muntz's")


@pytest.mark.parametrize("name", ["a.csv", "a.tsv", "a.csv.gz", "a.tsv.gz"])
def test_a_cell_may_hold_a_long_text(tmp_path, name):
  delimiter = "\t" if ".tsv" in name else ","
  text = "x" * 200_000
  csv.field_size_limit(131_072)  # Python's.
  lines = [("question", "answer", "notes"), ("who?", "Ann", text)]
  content = "\n".join(map(delimiter.join, lines))
  opener = gzip.open if name.endswith(".gz") else open
  with opener(tmp_path / name, "wt") as file:
    file.write(content)
  (entry,) = prepare((tmp_path / name, "nq", "dev"))["nq_dev"].entries
  assert json.loads(entry.metadata)["notes"] == text


@pytest.mark.parametrize(
  ("name", "content"),
  [
    ("a.csv", "question,answer,answer\nwho?,a,b\n"),
    ("a.tsv", "question\tanswer\tanswer\nwho?\ta\tb\n"),
    ("a.json", '[{"question": "who?", "answer": "a", "answer": "b"}]'),
  ],
)
def test_two_columns_of_one_name_are_refused(tmp_path, name, content):
  (tmp_path / name).write_text(content)
  with pytest.raises(formats.DataError, match="found 'answer' twice.*rename"):
    prepare((tmp_path / name, "nq", "dev"))


def test_columns_without_a_name_may_be_several(tmp_path):
  (tmp_path / "a.csv").write_text("question,answer,,\nwho?,a,,\n")
  part = prepare((tmp_path / "a.csv", "nq", "dev"))["nq_dev"]
  assert len(part.entries) == 1


def test_two_parquet_columns_of_one_name_are_refused(tmp_path):
  names = pa.array(["a"])
  pair = pa.StructArray.from_arrays([names, names], names=["x", "x"])
  tables = {
    "flat": pa.table([names, names], names=["answer", "answer"]),
    "inner": pa.table([pair], names=["answer"]),
  }
  for name, table in tables.items():
    path = tmp_path / f"{name}.parquet"
    pq.write_table(table, path)
    with pytest.raises(formats.DataError, match="found 'answer.*' twice"):
      list(files.rows(path))


def test_a_key_that_a_line_has_twice_is_refused_or_counted(tmp_path):
  path = tmp_path / "a.jsonl"
  path.write_text(
    '{"question": "who?", "answer": "a", "answer": "b"}\n'
    '{"question": "when?", "answer": "c"}\n'
  )
  with pytest.raises(formats.DataError, match="row 1: the key 'answer' twice"):
    prepare((path, "nq", "dev"))
  part = prepare((path, "nq", "dev"), skip_malformed=True)["nq_dev"]
  assert part.dropped == {"malformed: the key 'answer' twice": 1}
  assert [entry.golden_answers for entry in part.entries] == [("c",)]


def test_a_message_about_many_columns_is_short(tmp_path):
  path = tmp_path / "a.csv"
  path.write_text(",".join(f"column{i}" for i in range(20_000)) + "\n" * 2)
  with path.open("a") as file:
    file.write(",".join("x" * 20_000) + "\n")
  with pytest.raises(formats.DataError, match="and 19,992 more") as refusal:
    prepare((path, "nq", "dev"))
  assert len(str(refusal.value)) < 500


def test_verls_data_source_names_the_dataset(tmp_path):
  row = {
    "data_source": "searchR1_nq",
    "prompt": [{"role": "user", "content": "Answer. Question: who wrote emma"}],
    "reward_model": {"ground_truth": {"target": ["Jane Austen"]}},
    "extra_info": {"index": 3, "split": "test"},
  }
  pq.write_table(pa.Table.from_pylist([row]), tmp_path / "test.parquet")
  (entry,) = prepare((tmp_path / "test.parquet",))["nq_test"].entries
  assert (entry.dataset, entry.golden_answers) == ("nq", ("Jane Austen",))


def test_a_mix_without_questions_says_why_they_are_left_out(tmp_path):
  rows = rows_of("who?", "when?")
  train = write_lines(tmp_path / "train.jsonl", rows)
  test = write_lines(tmp_path / "test.jsonl", rows)
  parts = prepare((train, "nq", "train"), (test, "nq", "test"))
  message = "no training questions.*left out: 2 in an evaluation split.*--mix="
  with pytest.raises(formats.DataError, match=message):
    preparing.mix(parts, preparing.Settings(mix=("nq",)))


def test_aliases_of_an_entity_that_is_there_twice_are_united(tmp_path):
  rows = [
    {"Q_id": "Q1", "aliases": ["a"], "demonyms": []},
    {"Q_id": "Q1", "aliases": ["b"], "demonyms": ["c"]},
  ]
  path = write_lines(tmp_path / "id_aliases.json", rows)
  assert preparing.read_aliases(path) == {"Q1": ["a", "b", "c"]}
