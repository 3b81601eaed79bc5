"""Rows that survive a kill, and the check of their folder."""

from __future__ import annotations

import pytest

from anysearch_jax.evaluation import journal


def test_damaged_line_or_missing_row_is_rejected(tmp_path):
  path = tmp_path / "rows.jsonl"
  (tmp_path / "rows.partial.jsonl").write_text('{"i": 0}\n{"i": \n{"i": 1}\n')
  with pytest.raises(ValueError, match="line 2: .*not a row"):
    journal.Journal(path, 2, lambda row: row["i"])
  (tmp_path / "rows.partial.jsonl").write_text('{"i": 1}\n')
  with journal.Journal(path, 2, lambda row: row["i"]) as rows:
    with pytest.raises(ValueError, match="lacks 1 of 2 rows"):
      rows.finish()
    rows.add({"i": 0})
    rows.finish()
  assert path.read_text() == '{"i": 0}\n{"i": 1}\n'


def test_a_folder_belongs_to_one_evaluation(tmp_path):
  files = {"config.json": {"a": {"b": (1, 2)}, "c": 1}}
  journal.claim(tmp_path, files)
  journal.claim(tmp_path, files)
  with pytest.raises(ValueError, match=r"a.b is \[1, 2\] there and \[1, 3\]"):
    journal.claim(tmp_path, {"config.json": {"a": {"b": (1, 3)}, "c": 1}})
