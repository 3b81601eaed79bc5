"""The report of budgets in two units: heat maps and tables."""

from __future__ import annotations

import json

import pytest
import study

from anysearch_jax.evaluation import columns
from anysearch_jax.report import build as report
from anysearch_jax.report import loading

SIZE = {"questions": 20, "budgets": (1, 4)}


def paired(label, *, skill):
  return [
    episode | {"caps": {"tokens": tokens}}
    for tokens in (40, 90)
    for episode in study.row(f"{label}{tokens}", skill=skill, **SIZE).episodes
  ]


@pytest.fixture(scope="module")
def written(tmp_path_factory):
  folder = tmp_path_factory.mktemp("surfaces")
  data = report.write(
    folder / "report.html",
    [study.row("A", **SIZE), study.row("B", **SIZE)],
    surfaces={
      "A": columns.of(paired("A", skill=0.9)),
      "C": columns.of(paired("C", skill=0.1)),
    },
    draws=100,
  )
  return folder, data


def test_page_has_a_heat_map_and_tables_of_each_surface(written):
  folder, data = written
  page = (folder / "report.html").read_text()
  assert 'id="surfaces"' in page
  assert page.count("generated tokens, at most") >= 2
  lines = data["tables"]["surface"]["lines"]
  assert len(lines) == 8
  header = (folder / "surface.csv").read_text().splitlines()[0]
  assert header.startswith("searches,tokens,row,EM")
  areas = (folder / "surface_area.csv").read_text().splitlines()
  assert [line.split(",")[0] for line in areas[1:]] == ["A", "C"]


def test_report_without_surfaces_has_no_section(tmp_path):
  report.write(tmp_path / "report.html", [study.row("A", **SIZE)], draws=100)
  assert 'id="surfaces"' not in (tmp_path / "report.html").read_text()
  assert not (tmp_path / "surface.csv").exists()


def test_row_of_pairs_is_refused_where_searches_are_expected(tmp_path):
  lines = [json.dumps(episode) for episode in paired("A", skill=0.9)]
  (tmp_path / "episodes.jsonl").write_text("\n".join(lines) + "\n")
  with pytest.raises(ValueError, match="Name this evaluation in --surfaces"):
    loading.load_row("A", tmp_path)
  assert len(loading.load_row("A", tmp_path, paired=True).columns) == 80
