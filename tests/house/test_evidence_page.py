"""docs/evidence.md shows what its outcomes say."""

from __future__ import annotations

import pathlib

from anysearch_jax.evaluation import outcomes
from anysearch_jax.report import evidence_tables, tables
from configs import ablations
from launch import flags as launch_flags

DOCS = pathlib.Path(__file__).resolve().parents[2] / "docs"


def test_the_tables_of_evidence_are_those_of_its_outcomes():
  base = launch_flags.load_config("configs/quickstart.py")
  labels = {row.name: row.label for row in ablations.rows(base)}
  found = outcomes.read(DOCS / "evidence" / "ablations.jsonl")
  rows = {
    name: [one for one in found if one.row == name]
    for name in labels
    if any(one.row == name for one in found)
  }
  made = [
    tables.to_markdown(evidence_tables.accuracy(rows, labels)),
    tables.to_markdown(evidence_tables.against("anysearch", rows, labels)),
    evidence_tables.claims_table(
      [
        one
        for one in evidence_tables.verdicts(ablations.CLAIMS, rows)
        if one.effect is not None
      ]
    ),
  ]
  page = (DOCS / "evidence.md").read_text().splitlines()
  lines = [line for text in made for line in text.splitlines() if "|" in line]
  assert len(lines) > 10
  assert [line for line in lines if line not in page] == []
