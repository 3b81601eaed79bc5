"""The price of a search is where docs/objective.md derives it."""

from __future__ import annotations

import re

import numpy as np

from research import price_of_a_search


def test_searches_stop_where_the_derivation_says(tmp_path, capsys):
  price_of_a_search.main([f"--figure={tmp_path / 'price.svg'}"])
  _, *rows = capsys.readouterr().out.splitlines()
  pairs = [re.findall(r"([\d.]+) / ([\d.]+)", row) for row in rows]
  predicted, measured = np.array(pairs, float).transpose(2, 0, 1)
  assert predicted.shape == (6, 3)
  np.testing.assert_allclose(measured, predicted, atol=0.035)
  # Only without the group's deviation does the budget change the price.
  np.testing.assert_array_equal(predicted[[0, 1, 3]], 0.5)
  assert measured[4, 0] + 0.2 < measured[4, 1] + 0.02 < measured[4, 2]
  assert "B = 8" in (tmp_path / "price.svg").read_text()
