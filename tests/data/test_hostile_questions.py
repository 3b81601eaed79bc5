"""Damaged and unusual question files are either read or rejected."""

from __future__ import annotations

import csv
import datetime
import decimal
import gzip
import io
import json

import hostile
import hypothesis
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import question_rows

from anysearch_jax.data import files, formats

ROWS = [row for row, _, _ in question_rows.ROWS.values()]
# Types of values that Parquet has and JSON lacks.
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


@hostile.cases(6_000)
@hypothesis.given(hostile.tapes(100))
def test_any_row_is_a_question_or_malformed(tape):
  row = tape.pick(ROWS)
  for _ in range(1 + tape.below(3)):
    row = tape.change(row, OTHERS)
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
  # Reports expect the facts of the generated world under this key.
  assert "facts" not in found.metadata


def table(rows, delimiter):
  out = io.StringIO(newline="")
  writer = csv.writer(out, delimiter=delimiter)
  writer.writerows([["question", "answer"], *rows])
  return out.getvalue().encode("utf-8")


def parsed(line):
  """Returns the expected result of a line of JSON."""
  try:
    value = json.loads(line)
  except (ValueError, RecursionError):
    return None
  return value if isinstance(value, dict) else None


@hostile.cases(2_500)
@hypothesis.given(hostile.tapes(150))
def test_question_file_round_trips(folder, tape):
  suffix = tape.pick((".jsonl", ".json", ".csv", ".tsv"))
  zipped = tape.pick(("", ".gz"))
  path = folder / f"questions{suffix}{zipped}"
  if suffix in (".csv", ".tsv"):
    # A table holds UTF-8 text only; a row without any text is not a row.
    cells = [
      [f"q{tape.text(4)}".encode(errors="replace").decode() for _ in range(2)]
      for _ in range(tape.below(4))
    ]
    data = table(cells, "\t" if suffix == ".tsv" else ",")
    expected = [{"question": q, "answer": a} for q, a in cells]
  else:
    values = tape.some(lambda: tape.change({"a": tape.value()}), 4)
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
  """Returns a valid question file as bytes."""
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


@hostile.cases(1_500)
@hypothesis.given(hostile.tapes(100))
def test_damaged_question_file_is_read_or_rejected(folder, tape):
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
  except formats.DataError as error:
    assert str(path) in str(error)


@pytest.mark.parametrize(
  ("text", "expected"),
  [
    # Text after a closing quote makes the row malformed.
    ('q,a\n"Emma" by,x\nb,y\n', [(2, None), (3, {"q": "b", "a": "y"})]),
    (
      f'q,a\n"{"x" * 200_000}",x\nb,y\n',
      [(2, {"q": "x" * 200_000, "a": "x"}), (3, {"q": "b", "a": "y"})],
    ),
    ("q,a\n\n\nb,y\n", [(4, {"q": "b", "a": "y"})]),
    # An unterminated quote swallows the following rows, so reading fails.
    ('q,a\nb,y\nc,"z\nd,w\n', [(2, {"q": "b", "a": "y"}), "unexpected end"]),
    (f'q,a\nc,"z\n{"x" * 200_000}\nd,w\n', ["unexpected end"]),
    ('q,"a\nb,y\n', ["unexpected end"]),
    ("", []),
  ],
)
def test_no_table_row_is_lost_silently(folder, text, expected):
  path = folder / "table.csv"
  path.write_text(text)
  found = []
  try:
    for number, row in files.rows(path):
      found.append((number, row if isinstance(row, dict) else None))
  except formats.DataError as error:
    found.append(str(error))
  assert len(found) == len(expected)
  for ours, theirs in zip(found, expected):
    assert theirs in ours if isinstance(theirs, str) else ours == theirs
