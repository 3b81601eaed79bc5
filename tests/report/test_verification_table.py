"""Checks of what passages say, in the report's tables and figures."""

from __future__ import annotations

import dataclasses

import pytest
import study

from anysearch_jax.evaluation import verification
from anysearch_jax.report import build as report
from anysearch_jax.report import page


@pytest.fixture(scope="module")
def rows():
  return [
    study.row("A", budgets=(0, 2, 5), questions=40),
    study.row("B", budgets=(0, 2, 5), questions=40, thrift=0.9),
  ]


@pytest.fixture(scope="module")
def built(rows):
  return report.build(rows)


def test_the_table_has_the_shares_of_each_row(rows, built):
  table = {t.name: t for t in built.study.tables}["verification"]
  assert [c.name for c in table.columns] == ["B = 2", "B = 5"]
  lines = {line.keys: line.cells for line in table.lines}
  for row in rows:
    shares = verification.checked(row.columns)["a right answer"]
    cells = lines["a right answer", row.label]
    for cell, budget in zip(cells, (2, 5), strict=True):
      share = shares[budget]
      assert (cell.value, cell.low, cell.high) == share
  # A chain's last fact is found last, so few of these rows search again.
  assert lines["a right answer", "A"][1].value < 0.5


def test_the_page_draws_them(built):
  text = page.render(built.data, built.study, [], title="x")
  assert "Checked by a search: a right answer" in text
  assert "Checking what a passage says" in text


def test_rows_that_found_nothing_have_neither():
  row = study.row("A", budgets=(0, 2), questions=10)
  episodes = tuple({**e, "queries": [], "searches": 0} for e in row.episodes)
  built = report.build([dataclasses.replace(row, episodes=episodes)])
  table = {t.name: t for t in built.study.tables}["verification"]
  assert table.lines == ()
  text = page.render(built.data, built.study, [], title="x")
  assert "Checked by a search" not in text
