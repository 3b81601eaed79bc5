"""Curves over the budget, their area, the Pareto front, and costs."""

from __future__ import annotations

import numpy as np
import point_values
import pytest
import study

from anysearch_jax import budgets as budgets_lib
from anysearch_jax.evaluation import (
  columns,
  curves,
  inference,
  measures,
  metrics,
)


def _sets(row):
  names = ("nq", "musique", "bamboogle")
  return [
    e | {"dataset": names[int(e["question_id"][1:]) % 5 % 3]}
    for e in row.episodes
  ]


def test_curve_points_equal_cells():
  row = study.row("a", questions=40, budgets=(0, 2, 5, 7), seeds=(1, 2))
  curve = curves.curve("a", row.columns, trained=5)
  cells = point_values.by_budget(row.columns)
  assert [p.budget for p in curve.points] == [0, 2, 5, 7]
  assert [p.unseen for p in curve.points] == [False, False, False, True]
  for point in curve.points:
    cell = cells[point.budget]
    assert point.n == cell.n
    assert point.accuracy.value == pytest.approx(cell.accuracy)
    assert point.searches.value == pytest.approx(cell.searches)
    assert point.tokens.value == pytest.approx(cell.total_tokens)
    assert point.accuracy.low < cell.accuracy < point.accuracy.high
    assert point.cost == (None, None, None)
  assert curve.points[0].tp == (None, None, None)
  assert curve.points[2].tp.value == pytest.approx(cells[5].tp)


def test_the_area_is_by_trapezoids_over_uneven_budgets():
  row = study.row("a", questions=30, budgets=(0, 1, 5))
  curve = curves.curve("a", row.columns, trained=5)
  a, b, c = (p.accuracy.value for p in curve.points)
  by_hand = ((a + b) / 2 * 1 + (b + c) / 2 * 4) / 5
  assert curve.area.value == pytest.approx(by_hand)
  assert curve.area.low < by_hand < curve.area.high


def test_one_budget_has_no_area_and_empty_row_no_points():
  row = study.row("a", questions=5, budgets=(2,))
  assert curves.curve("a", row.columns, trained=5).area == (None,) * 3
  failed = [e | {"outcome": "failed"} for e in row.episodes]
  assert curves.curve("a", failed, trained=5).points == ()


def test_over_sets_weighs_datasets_equally():
  found = _sets(study.row("a", questions=50, budgets=(2, 6)))
  parts = columns.by_dataset(found)
  cells = [point_values.by_budget(part) for part in parts.values()]
  assert len({c[2].n for c in cells}) > 1  # Sets of different sizes.
  curve = curves.curve("a", found, trained=5)
  for point in curve.points:
    own = [c[point.budget] for c in cells]
    assert point.accuracy.value == pytest.approx(
      np.mean([c.accuracy for c in own])
    )
    assert point.tp.value == pytest.approx(np.mean([c.tp for c in own]))
    assert point.n == sum(c.n for c in own)
  both = [point.accuracy.value for point in curve.points]
  assert curve.area.value == pytest.approx(np.mean(both))
  six = columns.by_budget(found)[6]
  average = metrics.over_sets(six)
  assert average["accuracy"] == pytest.approx(
    curve.points[1].accuracy, abs=0.02
  )
  assert average["tp"].value == pytest.approx(curve.points[1].tp.value)


def test_average_needs_the_measure_in_every_dataset():
  found = _sets(study.row("a", questions=50, budgets=(2,)))
  found = [e | ({"searches": 0} if e["dataset"] == "nq" else {}) for e in found]
  average = metrics.over_sets(found, ("accuracy", "tp"))
  assert average["tp"] == (None, None, None)
  assert average["accuracy"].value is not None
  assert metrics.over_sets([], ("tp",)) == {"tp": (None, None, None)}


def _curve(label, *points):
  """Builds a curve from (budget, accuracy, searches)."""
  nothing = inference.Estimate(None, None, None)
  return curves.Curve(
    label,
    tuple(
      curves.Point(
        budget,
        False,
        9,
        accuracy=inference.Estimate(accuracy, None, None),
        tp=nothing,
        searches=inference.Estimate(searches, None, None),
        tokens=nothing,
        cost=nothing,
        regret=nothing,
      )
      for budget, accuracy, searches in points
    ),
    nothing,
  )


def test_pareto_front_by_hand():
  ours = _curve("a", (0, 0.2, 0.0), (1, 0.5, 0.8), (2, 0.5, 1.0))
  theirs = _curve("b", (0, 0.2, 0.0), (1, 0.4, 0.8), (2, 0.6, 2.0))
  offers = curves.pareto([ours, theirs])
  assert [(o.label, o.budget) for o in offers if not o.dominated] == [
    ("a", 0),
    ("b", 0),  # Equal to the other point, so neither dominates.
    ("a", 1),
    ("b", 2),
  ]
  assert len(offers) == 6
  assert [o.price for o in offers] == sorted(o.price for o in offers)
  assert curves.pareto([ours], "cost") == ()


def test_dollars_by_hand():
  (base,) = study.row("a", questions=1, budgets=(3,)).episodes
  episode = base | {
    "searches": 2,
    "generated_tokens": 300,
    "input_tokens": 5000,
    "cost": 9.0,
    "outcome": "answered",
  }
  table = columns.of([episode])
  prices = budgets_lib.Prices(search=5.0, input=0.2, output=1.0)
  by_hand = 2 * 0.005 + 5000 * 0.2e-6 + 300 * 1e-6
  np.testing.assert_allclose(table.priced(prices).cost, [by_hand])
  assert point_values.cell(table.priced(prices)).cost == pytest.approx(by_hand)
  assert point_values.cell(table).cost == 9.0  # The recorded cost, by default.


def test_free_items_need_no_count():
  row = study.row("a", questions=5, budgets=(3,))
  free = row.columns.priced(budgets_lib.Prices(search=1.0)).cost
  np.testing.assert_allclose(free, row.columns.searches / 1000)
  unknown = row.columns.priced(budgets_lib.Prices(input=1.0)).cost
  assert np.isnan(unknown).all()


def test_estimates_without_episodes_are_undefined():
  row = study.row("a", questions=2, budgets=(1,))
  found = measures.estimates(row.columns.where(row.columns.budget == 9))
  assert found["accuracy"] == (None, None, None)
  assert found["tp"] == found["searches"] == (None, None, None)


def test_rate_with_one_seed_has_wilson_interval():
  row = study.row("a", questions=50, budgets=(3,))
  cell = point_values.cell(row.columns)
  found = measures.estimates(row.columns, ("accuracy",))["accuracy"]
  oracle = point_values.wilson(round(cell.accuracy * cell.n), cell.n)
  np.testing.assert_allclose(found, oracle)
