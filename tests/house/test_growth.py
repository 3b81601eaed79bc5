"""Tests `growth.assert_linear`: linear work passes, quadratic work fails."""

from __future__ import annotations

import growth
import pytest


def test_linear_work_passes():
  growth.assert_linear(lambda text: text.count("b"), "ab" * 500_000)


def test_quadratic_work_fails():
  def pairs(items):
    return sum(1 for i in items for j in items if i == j)

  with pytest.raises(AssertionError, match="more than 10 times"):
    growth.assert_linear(pairs, range(2000))
