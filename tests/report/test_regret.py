"""Regret to the optimum in the report: by hand, in tables and in figures."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import study
from scipy import stats

from anysearch_jax.evaluation import columns, measures, metrics
from anysearch_jax.report import build as report
from anysearch_jax.report import page
from anysearch_jax.report import tables as tables_lib

BUDGETS = (0, 2, 5)
REGRET_TABLES = ("overview", "main", "efficiency", "ablation_rows")


def beside(row: metrics.Row, seed: int = 0) -> metrics.Row:
  """Puts an invented optimum beside a row: equal questions, equal numbers."""
  table = row.columns
  best = np.random.default_rng(seed).random((len(table.ids), len(BUDGETS)))
  return dataclasses.replace(row, table=table.with_optimum(best, BUDGETS))


@pytest.fixture(scope="module")
def rows():
  made = [study.row(label, budgets=BUDGETS) for label in ("A", "B")]
  return [beside(row) for row in made]


@pytest.fixture(scope="module")
def built(rows):
  return report.build(rows, ["B"])


def test_regret_by_hand_with_its_interval():
  em = np.array([1, 0, 0, 1, 1], float)
  best = np.array([1, 0.5, 0.25, 1, 0.75])
  episodes = [
    e | {"em": int(right), "outcome": "answered"}
    for e, right in zip(
      study.row("A", questions=5, budgets=(2,)).episodes, em, strict=True
    )
  ]
  table = columns.of(episodes).with_optimum(best[:, None], [2])
  found = measures.estimates(table, ("regret",))["regret"]
  missed = best - em
  assert found.value == pytest.approx(missed.mean()) == pytest.approx(0.1)
  reach = stats.t(4).ppf(0.975) * missed.std(ddof=1) / 5**0.5
  assert found.low == pytest.approx(0.1 - reach)  # Below 0, and not cut there.
  assert found.high == pytest.approx(0.1 + reach)
  assert found.low < 0


def test_an_unknown_optimum_is_no_regret():
  table = study.row("A", questions=6, budgets=(2,)).columns
  assert measures.estimates(table, ("regret",))["regret"].value is None
  # Where some questions have none, the others count.
  best = np.full((6, 1), np.nan)
  best[0] = 1.0
  half = table.with_optimum(best, [2])
  found = measures.estimates(half, ("regret",))["regret"]
  assert found.value == 1 - table.em[0]


def test_overview_has_regret_by_budget_pooled_and_the_optimum(rows, built):
  table = {t.name: t for t in built.study.tables}["overview"]
  lines = {line.keys: line.cells for line in table.lines}
  for row in rows:
    kept = row.columns.scored()
    regret = kept.optimum - kept.em
    *by_budget, pooled = lines["regret", row.label]
    for budget, cell in zip(BUDGETS, by_budget, strict=True):
      assert cell.value == pytest.approx(regret[kept.budget == budget].mean())
      assert cell.low < cell.value < cell.high
    assert pooled.value == pytest.approx(regret.mean())
  first = rows[0].columns.scored()
  *by_budget, mean = lines["EM", "the optimum, computed"]
  means = [first.optimum[first.budget == b].mean() for b in BUDGETS]
  assert [c.value for c in by_budget] == pytest.approx(means)
  assert mean.value == pytest.approx(np.mean(means))


def test_the_papers_tables_have_a_column_of_it(rows, built):
  tables = {t.name: t for t in built.study.tables}
  row = rows[1].columns.scored()
  at = row.where(row.budget == 5)
  expected = (at.optimum - at.em).mean()
  over = row.where(row.budget >= 1)
  pooled = (over.optimum - over.em).mean()
  for name, keys, column, value in (
    ("main", ("5", "B"), "regret", expected),
    ("efficiency", ("world", "5", "B"), "regret", expected),
    ("ablation_rows", ("B",), "B = 5 regret", expected),
    ("ablation_rows", ("B",), "all B ≥ 1 regret", pooled),
  ):
    place = [c.full_name for c in tables[name].columns].index(column)
    (line,) = [line for line in tables[name].lines if line.keys == keys]
    assert line.cells[place].value == pytest.approx(value)


def test_figures_and_summary_show_it(rows, built):
  text = page.render(built.data, built.study, [], title="x")
  assert "Regret to the optimum" in text and ">optimum<" in text
  summary = report.summary_table(built.data)
  assert summary.count("regret") == len(rows)
  (overview,) = [t for t in built.study.tables if t.name == "overview"]
  assert "Regret:" in tables_lib.to_markdown(overview)


def test_rows_without_an_optimum_show_none():
  plain = report.build([study.row("A", budgets=BUDGETS)])
  for table in plain.study.tables:
    if table.name in REGRET_TABLES:
      assert "egret" not in tables_lib.to_markdown(table)
  assert "Regret" not in page.render(plain.data, plain.study, [], title="x")
  assert "regret" not in report.summary_table(plain.data)
