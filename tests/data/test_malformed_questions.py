"""Tests that rows and files that hold no questions are refused or counted."""

from __future__ import annotations

import gzip

import pytest
import question_files


@pytest.mark.parametrize(
  ("name", "content", "row", "reason"),
  [
    ("a.jsonl", '{"question": "b", "answer": "x"}\n{"quest\n', 2, "not JSON"),
    ("a.jsonl", '\n["question"]\n', 2, "not a JSON object"),
    (
      "a.json",
      '[{"question": "b", "answer": "x"}, {"question": "c"}]',
      2,
      "no answer",
    ),
    (
      "a.csv",
      "Question,Answer\nb?,x\nc?,x,y\n",
      3,
      "another number of columns",
    ),
    ("a.csv", "Question,Answer\n ,x\n", 2, "an empty question"),
    ("a.jsonl", '{"question": "The?", "answer": "x"}', 1, "an empty question"),
    (
      "a.jsonl",
      '{"question": "\u2019 \u2026\uff1f", "answer": "x"}',
      1,
      "an empty question",
    ),
    (
      "a.jsonl",
      '{"question": "b", "answer": "x"}\n{"question": "b\\u0000"'
      ', "answer": "x"}',
      2,
      "a question with the character NUL",
    ),
    (
      "a.jsonl",
      '{"question": "b", "answer": ["x\\u0000"]}',
      1,
      "an answer with the character NUL",
    ),
    (
      "a.jsonl",
      f'{{"question": "{"b" * 1_000_000}", "answer": "x"}}',
      1,
      "a question of more than 10000 characters",
    ),
    (
      "a.jsonl",
      f'{{"question": "b", "answer": "{"x" * 1_000_000}"}}',
      1,
      "an answer of more than 10000 characters",
    ),
    (
      "a.jsonl",
      '{"question": "b", "answer": [NaN]}',
      1,
      "an answer that is nan",
    ),
  ],
)
def test_malformed_row_is_rejected_with_its_number_or_counted(
  tmp_path, name, content, row, reason
):
  path = tmp_path / name
  path.write_text(content)
  with pytest.raises(ValueError, match=f"{name}, row {row}: {reason}"):
    question_files.prepare((path, "nq", "dev"))
  part = question_files.prepare((path, "nq", "dev"), skip_malformed=True)[
    "nq_dev"
  ]
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
    question_files.prepare((path, "nq", "dev"), skip_malformed=skip)


def test_rows_without_dataset_are_rejected(tmp_path):
  path = question_files.write_lines(
    tmp_path / "a.jsonl", question_files.rows_of("b")
  )
  with pytest.raises(ValueError, match="a.jsonl.*dataset"):
    question_files.prepare((path,))
