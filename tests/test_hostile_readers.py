"""Files that are not what they should be: read whole, or refused."""

from __future__ import annotations

import csv
import datetime
import decimal
import gzip
import io
import json
import operator

import hostile
import hypothesis
import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import question_rows
import safetensors.numpy
import study
from test_hostile_episode import episode_of, play

from anysearch_jax import config as config_lib
from anysearch_jax import json_files, records, tensor_files
from anysearch_jax.data import files, formats
from anysearch_jax.evaluation import episodes, journal

ROWS = [row for row, _, _ in question_rows.ROWS.values()]
# What a Parquet file has beside that.
OTHERS = (
  *(b"\xff", datetime.date(1, 1, 1), decimal.Decimal("NaN")),
  *([("a", 1)], {1: 2}, datetime.timedelta(1)),
)
QUESTIONS = [
  {"question": f"who wrote {name}?", "answer": name, "id": str(i)}
  for i, name in enumerate(("Emma", 'a "b", c', "two\nlines", "é\u202e"))
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  return tmp_path_factory.mktemp("hostile")


def changed(tape, value):
  """A value some part of which is another one."""
  if tape.below(4) == 0 or not isinstance(value, dict | list):
    return tape.pick((tape.value, lambda: tape.pick(OTHERS)))()
  if isinstance(value, list):
    place = tape.below(len(value) + 1)
    return [
      changed(tape, each) if i == place else each
      for i, each in enumerate(value)
    ]
  name = tape.pick([*value, "facts", "metadata", tape.text(1)])
  return {**value, name: changed(tape, value.get(name))}


@hostile.cases("any row is a question or malformed")
@hypothesis.given(hostile.tapes(100))
def test_any_row_is_a_question_or_malformed(tape):
  row = tape.pick(ROWS)
  for _ in range(1 + tape.below(3)):
    row = changed(tape, row)
  if not isinstance(row, dict):
    return
  name = tape.pick((formats.recognize(row), *formats.FORMATS))
  if name is None:
    return
  try:
    found = formats.read(row, name)
  except formats.MalformedError as error:
    assert 0 < len(str(error)) < 200 and str(error).isprintable()
    return
  assert isinstance(found.question, str)
  assert isinstance(found.answers, tuple)
  assert all(isinstance(answer, str) for answer in found.answers)
  assert all(isinstance(x, str) for x in (found.id, found.dataset, found.split))
  assert found.hops is None or 0 <= found.hops < 100
  json.dumps(found.metadata)
  # Where reports look for the facts of the generated world.
  assert "facts" not in found.metadata


def table(rows, delimiter):
  out = io.StringIO(newline="")
  writer = csv.writer(out, delimiter=delimiter)
  writer.writerows([["question", "answer"], *rows])
  return out.getvalue().encode("utf-8")


def parsed(line):
  """What a line of JSON should come to."""
  try:
    value = json.loads(line)
  except (ValueError, RecursionError):
    return None
  return value if isinstance(value, dict) else None


@hostile.cases("a file of questions")
@hypothesis.given(hostile.tapes(150))
def test_a_file_of_questions_is_read_as_it_was_written(folder, tape):
  suffix = tape.pick((".jsonl", ".json", ".csv", ".tsv"))
  zipped = tape.pick(("", ".gz"))
  path = folder / f"questions{suffix}{zipped}"
  if suffix in (".csv", ".tsv"):
    # A table has text in UTF-8 only; a row that has none of it is no row.
    cells = [
      [f"q{tape.text(4)}".encode(errors="replace").decode() for _ in range(2)]
      for _ in range(tape.below(4))
    ]
    data = table(cells, "\t" if suffix == ".tsv" else ",")
    expected = [{"question": q, "answer": a} for q, a in cells]
  else:
    values = tape.some(lambda: changed(tape, {"a": tape.value()}), 4)
    values = json.loads(json.dumps(values, default=str))
    lines = [hostile.as_json(value) for value in values]
    data = b"\n".join(lines) + b"\n"
    expected = list(map(parsed, lines))
    if suffix == ".json":
      data = b"[" + b",\n".join(lines) + b"]"
  path.write_bytes(gzip.compress(data, 1) if zipped else data)
  found = list(files.rows(path))
  assert [number for number, _ in found] == sorted({n for n, _ in found})
  assert [
    repr(None if isinstance(row, formats.MalformedError) else row)
    for _, row in found
  ] == list(map(repr, expected))


def written(rows, kind):
  """A right file of questions, as bytes."""
  if kind == ".parquet":
    out = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(rows), out)
    return out.getvalue().to_pybytes()
  if kind in (".csv", ".tsv"):
    cells = [[row["question"], row["answer"]] for row in rows]
    return table(cells, "\t" if kind == ".tsv" else ",")
  if kind == ".json":
    return json.dumps(rows).encode()
  data = b"".join(hostile.as_json(row) + b"\n" for row in rows)
  return gzip.compress(data, mtime=0) if kind.endswith(".gz") else data


WRITTEN = {
  kind: written(QUESTIONS, kind) for kind in (*files.SUFFIXES, ".jsonl.gz")
}


@hostile.cases("a damaged file of questions")
@hypothesis.given(hostile.tapes(100))
def test_a_damaged_file_of_questions_is_read_or_refused(folder, tape):
  kind = tape.pick([*WRITTEN])
  path = folder / f"damaged{kind}"
  path.write_bytes(tape.damage(WRITTEN[kind]))
  last = 0
  try:
    for number, row in files.rows(path):
      assert number > last
      last = number
      if not isinstance(row, formats.MalformedError):
        assert all(isinstance(name, str) for name in row)
        try:
          formats.read(row, "plain")
        except formats.MalformedError as error:
          assert len(str(error)) < 200
  except files.UnreadableError as error:
    assert str(path) in str(error)


@hostile.cases("a file of questions that was cut")
@hypothesis.given(hostile.tapes(20))
def test_what_is_left_of_a_cut_file_is_read_as_it_was(folder, tape):
  kind = tape.pick([*WRITTEN])
  path = folder / f"cut{kind}"
  data = WRITTEN[kind]
  path.write_bytes(data[: 1 + tape.place(len(data) - 1)])
  found = []
  try:
    for _, row in files.rows(path):
      found.append(row)
  except files.UnreadableError as error:
    assert str(path) in str(error)
  else:
    assert kind in (".jsonl", ".csv", ".tsv")
  if found and (kind in (".csv", ".tsv") or not isinstance(found[-1], dict)):
    # Nothing tells that a word of a table was longer.
    found.pop()
  names = (
    {"question", "answer"} if kind in (".csv", ".tsv") else {*QUESTIONS[0]}
  )
  assert found == [
    {name: row[name] for name in row if name in names}
    for row in QUESTIONS[: len(found)]
  ]


@pytest.mark.parametrize(
  ("text", "expected"),
  [
    # A quote inside a cell of a table that has none is not taken away.
    ('q,a\n"Emma" by,x\nb,y\n', [(2, None), (3, {"q": "b", "a": "y"})]),
    (
      f'q,a\n"{"x" * 200_000}",x\nb,y\n',
      [(2, None), (3, {"q": "b", "a": "y"})],
    ),
    ("q,a\n\n\nb,y\n", [(4, {"q": "b", "a": "y"})]),
    # Rows behind a quote that stays open are part of a cell.
    ('q,a\nb,y\nc,"z\nd,w\n', [(2, {"q": "b", "a": "y"}), "unexpected end"]),
    (f'q,a\nc,"z\n{"x" * 200_000}\nd,w\n', ["larger than field limit"]),
    ('q,"a\nb,y\n', ["unexpected end"]),
    ("", []),
  ],
)
def test_no_row_of_a_table_is_lost_in_silence(folder, text, expected):
  path = folder / "table.csv"
  path.write_text(text)
  found = []
  try:
    for number, row in files.rows(path):
      found.append((number, row if isinstance(row, dict) else None))
  except files.UnreadableError as error:
    found.append(str(error))
  assert len(found) == len(expected)
  for ours, theirs in zip(found, expected):
    assert theirs in ours if isinstance(theirs, str) else ours == theirs


EPISODE = study.row("a", questions=1, budgets=(2,)).episodes[0]


@hostile.cases("a line of episodes")
@hypothesis.given(hostile.tapes(100))
def test_a_line_is_an_episode_or_refused(tape):
  value = tape.pick((EPISODE, EPISODE, EPISODE, tape.value()))
  if tape.below(4):
    value = changed(tape, value)
  line = json.dumps(value, default=str).encode()
  line = tape.pick((line, line, tape.damage(line), tape.raw()))
  lines = line.splitlines() or [line]
  try:
    found = list(episodes.read(lines, source="rows"))
    parsed_ = episodes.parse(lines, source="rows")
  except ValueError as error:
    assert str(error).startswith("rows") and len(str(error)) < 600
    return
  assert [*parsed_] == found
  sample = episodes.Sample(2)
  for each in found:
    assert isinstance(each["spans"], list)
    assert isinstance(episodes.dataset_of(each), str)
    sample.add(each)
  assert len(sample.episodes()) == min(2, len(found))
  assert len(episodes.scored(found)) <= len(found)


@hostile.cases("an episode is read as it was written")
@hypothesis.given(hostile.tapes(120))
def test_an_episode_is_read_as_it_was_written(folder, tape):
  budget = tape.below(3)
  trajectory = play(*episode_of(tape), budget=budget, scaffold=True).trajectory
  row = records.episode(
    trajectory, seed=3, prices=config_lib.EvaluationConfig()
  )
  path = folder / "rows.jsonl"
  with journal.Journal(path, 1, lambda row: row["seed"] - 3) as rows:
    rows.add(row)
    rows.finish()
  (found,) = journal.read(path)
  assert episodes.parse(path.open("rb"), source="rows") == (found,)
  assert found.keys() == row.keys()
  assert found["tokens"] == row["tokens"]
  assert [(each["author"], each["text"]) for each in found["spans"]] == [
    (span.author.name.lower(), hostile.whole(span.text))
    for span in trajectory.spans
  ]


@hostile.cases("a journal that was damaged")
@hypothesis.given(hostile.tapes(80))
def test_a_damaged_journal_has_rows_that_were_written_or_is_refused(
  folder, tape
):
  path = folder / "journal.jsonl"
  partial = folder / "journal.partial.jsonl"
  rows = [{"i": i, "text": tape.text(3)} for i in range(3)]
  lines = [hostile.as_json(row) + b"\n" for row in rows]
  foreign = {"i": tape.value(), "text": ""}
  lines.append(tape.pick((b"", hostile.as_json(foreign) + b"\n")))
  partial.write_bytes(tape.damage(b"".join(lines)))
  try:
    with journal.Journal(path, 3, operator.itemgetter("i")) as opened:
      for i, row in enumerate(rows):
        if i not in opened:
          opened.add(row)
      opened.finish()
  except ValueError as error:
    assert str(partial) in str(error)
    partial.unlink()
    return
  found = list(journal.read(path))
  assert [row["i"] for row in found] == [0, 1, 2]
  path.write_bytes(tape.damage(path.read_bytes()))
  try:
    assert all(isinstance(row, dict) for row in journal.read(path))
  except ValueError as error:
    assert str(path) in str(error)


@hostile.cases("a JSON file")
@hypothesis.given(hostile.tapes(80))
def test_a_json_file_is_an_object_or_refused(folder, tape):
  path = folder / "object.json"
  data = hostile.as_json(tape.pick(({"a": tape.value()}, tape.value())))
  path.write_bytes(tape.pick((data, tape.damage(data), tape.raw())))
  try:
    found = json_files.read(path)
  except ValueError as error:
    assert str(error).startswith(f"{path}: ")
    assert not isinstance(orjson_value(path.read_bytes()), dict)
  else:
    assert isinstance(found, dict)


def orjson_value(data):
  """By a reader that is stricter than Python's."""
  try:
    return orjson.loads(data)
  except ValueError:
    return None


TENSORS = safetensors.numpy.save(
  {"a": np.ones((2, 3), np.float32), "b": np.zeros(4, np.float16)}
)
INDEX = json.dumps({"weight_map": {"a": "x.safetensors"}}).encode()


@hostile.cases("headers of tensors")
@hypothesis.given(hostile.tapes(60))
def test_headers_of_tensors_are_read_or_refused(tmp_path_factory, tape):
  folder = tmp_path_factory.getbasetemp()
  data, index = TENSORS, INDEX
  if tape.below(3):
    name, data = tensor_files.SINGLE_NAME, tape.damage(data)
  else:
    index = hostile.as_json({"weight_map": tape.value()})
    index, name = tape.pick((index, INDEX)), "x.safetensors"
  (folder / tensor_files.SINGLE_NAME).unlink(missing_ok=True)
  (folder / tensor_files.INDEX_NAME).write_bytes(index)
  (folder / name).write_bytes(data)
  try:
    found = tensor_files.headers(folder)
  except ValueError as error:
    assert str(folder) in str(error)
  else:
    assert all(each.path.parent == folder for each in found.values())
