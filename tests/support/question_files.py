"""Writes files of questions and prepares them, for the tests of data/."""

from __future__ import annotations

import gzip
import json

from anysearch_jax.data import preparing


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
