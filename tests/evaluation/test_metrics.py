"""Measures, curves and costs, by hand."""

from __future__ import annotations

import numpy as np
import point_values
import pytest
import study

from anysearch_jax import budgets as budgets_lib
from anysearch_jax.evaluation import columns, measures, metrics


def _episodes(*changes):
  """Returns episodes of two permitted searches with these changes."""
  (base,) = study.row("a", questions=1, budgets=(2,)).episodes
  base |= {
    "em": 1,
    "format": 1,
    "searches": 1,
    "violation": False,
    "outcome": "answered",
    "generated_tokens": 10,
    "retrieved_tokens": 30,
    "total_tokens": 40,
  }
  return [
    base | {"question_id": f"q{i}"} | change for i, change in enumerate(changes)
  ]


def test_failed_episodes_are_counted_and_excluded():
  cell = point_values.cell(
    _episodes(
      {},
      {
        "em": 0,
        "searches": 2,
        "outcome": "invalid",
        "format": 0,
        "violation": True,
      },
      {"searches": 0, "retrieved_tokens": 0, "total_tokens": 10},
      {"em": 0, "outcome": "truncated", "generated_tokens": 40},
      {"em": 0, "outcome": "failed", "total_tokens": 999},
    )
  )
  assert (cell.n, cell.failed) == (4, 1)
  rates = cell.invalid_rate, cell.truncated_rate, cell.violation_rate
  assert rates == (0.25, 0.25, 0.25)
  assert (cell.accuracy, cell.searches, cell.tp) == (0.5, 1.0, 0.5)
  assert (cell.format_rate, cell.unused) == (0.75, 1.0)
  assert (cell.generated_tokens, cell.retrieved_tokens) == (17.5, 22.5)
  assert cell.total_tokens == 32.5
  assert cell.retrieval_share == pytest.approx(90 / 130)
  assert cell.tokens_per_right == 130 / 2
  cell = point_values.cell(_episodes({"outcome": "failed"}))
  assert (cell.n, cell.failed) == (0, 1)
  assert cell.accuracy is cell.tp is cell.retrieval_share is None


def test_productivity_pools_searches_and_excludes_closed_book_answers():
  found = _episodes(
    {"budget": 0, "searches": 0, "em": 1},
    {"budget": 1, "searches": 1, "em": 1},
    {"budget": 2, "searches": 2, "em": 0},
  )
  cells = point_values.by_budget(found)
  assert (cells[0].tp, cells[0].accuracy) == (None, 1.0)
  assert (cells[1].tp, cells[2].tp) == (1.0, 0.0)
  assert point_values.cell(found).tp == pytest.approx(1 / 3)
  assert point_values.cell(found).accuracy == pytest.approx(2 / 3)


def test_the_area_is_by_trapezoids_over_uneven_budgets():
  curve = study.row("a", questions=30, budgets=(0, 1, 5)).curve
  a, b, c = (p.accuracy.value for p in curve.points.values())
  by_hand = ((a + b) / 2 * 1 + (b + c) / 2 * 4) / 5
  assert curve.area.value == pytest.approx(by_hand)
  assert curve.area.low < by_hand < curve.area.high
  row = study.row("a", questions=5, budgets=(2,))
  assert row.curve.area == (None,) * 3
  failed = tuple(e | {"outcome": "failed"} for e in row.episodes)
  assert metrics.Row("a", failed).curve == ("a", {}, (None,) * 3)


def _sets(row):
  names = ("nq", "musique", "bamboogle")
  return [
    e | {"dataset": names[int(e["question_id"][1:]) % 5 % 3]}
    for e in row.episodes
  ]


def test_average_weighs_datasets_equally():
  row = metrics.Row("a", tuple(_sets(study.row("a", budgets=(2, 6)))))
  assert len({part.n for part in row.cells.values()}) > 2  # Of different sizes.
  for budget, point in row.curve.points.items():
    own = [part for (_, b), part in row.cells.items() if b == budget]
    assert point.accuracy.value == pytest.approx(
      np.mean([part.accuracy.value for part in own])
    )
    assert point.tp.value == pytest.approx(np.mean([p.tp.value for p in own]))
    assert point.n == sum(part.n for part in own)
  both = [point.accuracy.value for point in row.curve.points.values()]
  assert row.curve.area.value == pytest.approx(np.mean(both))


def test_average_needs_the_measure_in_every_dataset():
  found = _sets(study.row("a", questions=50, budgets=(2,)))
  found = [e | ({"searches": 0} if e["dataset"] == "nq" else {}) for e in found]
  average = measures.estimates(found, ("accuracy", "tp"), weigh_sets=True)
  assert average["tp"] == (None, None, None)
  assert average["accuracy"].value is not None
  assert measures.estimates([], ("tp",)) == {"tp": (None, None, None)}


def test_dollars_by_hand():
  (episode,) = _episodes(
    {"searches": 2, "generated_tokens": 300, "input_tokens": 5000, "cost": 9.0}
  )
  table = columns.as_columns([episode])
  prices = budgets_lib.Prices(search=5.0, input=0.2, output=1.0)
  by_hand = 2 * 0.005 + 5000 * 0.2e-6 + 300 * 1e-6
  np.testing.assert_allclose(table.priced(prices).cost, [by_hand])
  assert point_values.cell(table).cost == 9.0  # The recorded cost, by default.
  # What is free needs no count; an unknown count has no cost.
  row = study.row("a", questions=5, budgets=(3,))
  free = row.columns.priced(budgets_lib.Prices(search=1.0)).cost
  np.testing.assert_allclose(free, row.columns.searches / 1000)
  unknown = row.columns.priced(budgets_lib.Prices(input=1.0)).cost
  assert np.isnan(unknown).all()
