"""What equal accuracy costs: by hand, and its intervals."""

from __future__ import annotations

import math

import numpy as np
import pytest

from anysearch_jax.evaluation import money_curves


@pytest.mark.parametrize(
  "accuracy, expected",
  [
    (0.2, 1.0),
    (0.3, 1.5),
    (0.4, 2.0),
    (0.6, 6.0),  # Halfway from (2, .4) to (10, .8): the dip at 5 is skipped.
    (0.8, 10.0),
    (0.1, math.nan),
    (0.9, math.nan),
  ],
)
def test_cost_is_read_off_the_line_between_budgets(accuracy, expected):
  found = money_curves.cost_of(
    [1.0, 2.0, 5.0, 10.0], [0.2, 0.4, 0.3, 0.8], accuracy
  )
  assert found == pytest.approx(expected, nan_ok=True)


def made(rng, price, runs=3, n=400):
  """A method whose accuracy grows with its budget, at a price."""
  budgets = np.array([1, 4, 9, 20])
  p = 1 - np.exp(-budgets / 10)
  right = rng.random((runs, 4, n)) < p[:, None]
  dollars = np.broadcast_to(price * budgets[:, None], right.shape)
  return money_curves.Played(right.astype(float), dollars.astype(float))


def test_a_method_of_half_the_price_has_a_ratio_of_one_half():
  rng = np.random.default_rng(0)
  ours, theirs = made(rng, 0.01), made(rng, 0.02)
  found = money_curves.compare(ours, theirs, (0.3, 0.5, 0.99), draws=300)
  for each in found[:2]:
    assert each.ratio.low < 0.5 < each.ratio.high
    assert each.ratio.high - each.ratio.low < 0.2
    assert each.ours.low < each.ours.value < each.ours.high
  assert math.isnan(found[2].ratio.value)
  same = money_curves.compare(ours, ours, (0.3,), draws=200)[0]
  assert same.ratio.value == 1 and same.ratio.low < 1 < same.ratio.high


def test_the_ratio_is_covered_as_often_as_stated():
  covered = []
  for seed in range(60):
    rng = np.random.default_rng(seed)
    found = money_curves.compare(
      made(rng, 0.01, 8), made(rng, 0.02, 8), (0.4,), draws=200
    )[0].ratio
    covered.append(found.low <= 0.5 <= found.high)
  assert np.mean(covered) > 0.85
