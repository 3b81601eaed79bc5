"""The price of a search is where docs/objective.md derives it."""

from __future__ import annotations

import re

import numpy as np
import pytest

from research import price_of_a_search


def test_searches_stop_where_the_derivation_says(tmp_path, capsys):
  price_of_a_search.main([f"--figure={tmp_path / 'price.svg'}"])
  _, *rows = capsys.readouterr().out.splitlines()
  pairs = [re.findall(r"([\d.]+) / ([\d.]+)", row) for row in rows]
  predicted, measured = np.array(pairs, float).transpose(2, 0, 1)
  assert predicted.shape == (12, 3)
  np.testing.assert_allclose(measured, predicted, atol=0.035)
  # Only without the group's deviation does the budget change the price.
  np.testing.assert_array_equal(predicted[[1, 3, 7]], 0.5)
  np.testing.assert_array_equal(predicted[[0, 2, 6]], 0.4)
  assert measured[9, 0] + 0.2 < measured[9, 1] + 0.02 < measured[9, 2]
  assert "B = 8" in (tmp_path / "price.svg").read_text()


def test_forces_of_two_trajectories_by_hand():
  # One of two searches in half of the groups, and finds the fact with q.
  cost, gain = price_of_a_search.forces(0.6, size=2)
  assert (cost, gain) == pytest.approx((0.5, 0.5 * 0.6))
