"""The pages of docs/evidence show what the outcomes beside them say."""

from __future__ import annotations

import pathlib

import pytest

from configs import ablations
from configs.methods import study as methods
from launch import flags as launch_flags
from launch import study_outcomes

DOCS = pathlib.Path(__file__).resolve().parents[2] / "docs"
VERDICTS = ("reproduced |", "refuted |")
QUICKSTART = "configs/quickstart.py"
# The rows and the configuration of each file of outcomes.
STUDIES = {
  "ablations": (ablations, QUICKSTART),
  "methods": (methods, QUICKSTART),
  "world_1": (ablations, "configs/other_worlds.py:1"),
  "world_2": (ablations, "configs/other_worlds.py:2"),
}


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
  """The page of each study, made again from its outcomes."""
  made = {}
  for name, (study, config) in STUDIES.items():
    rows = study.rows(launch_flags.load_config(config))
    named = {row.name: row for row in rows}
    store = study_outcomes.Store(
      tmp_path_factory.mktemp(name) / "outcomes.jsonl",
      [DOCS / "evidence" / f"{name}.jsonl"],
      {
        row.name: study_outcomes.settings(
          row, named.get(row.policy_of, row), config=config
        )
        for row in rows
      },
    )
    made[name] = store.page(study.TITLE, rows, study.CLAIMS)
  return made


@pytest.mark.parametrize("name", ["ablations", "methods"])
def test_the_page_of_a_study_is_that_of_its_outcomes(pages, name):
  assert (DOCS / "evidence" / f"{name}.md").read_text() == pages[name]


def test_what_evidence_quotes_stands_in_these_pages(pages):
  made = {line for page in pages.values() for line in page.splitlines()}
  quoted = [
    line
    for line in (DOCS / "evidence.md").read_text().splitlines()
    if line.startswith("|")
    and (
      line.count("|") > 10 or line.endswith(VERDICTS) or "detectable:" in line
    )
  ]
  assert len(quoted) > 20
  assert [line for line in quoted if line not in made] == []
