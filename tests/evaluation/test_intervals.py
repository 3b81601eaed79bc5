"""Wilson's interval against a published table and SciPy."""

from __future__ import annotations

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from anysearch_jax.evaluation import intervals


# Newcombe (1998), table of Wilson intervals without continuity correction.
@pytest.mark.parametrize(
  ("successes", "n", "low", "high"),
  [
    (81, 263, 0.2553, 0.3662),
    (15, 148, 0.0624, 0.1605),
    (0, 20, 0.0, 0.1611),
    (1, 29, 0.0061, 0.1718),
    (29, 29, 0.8830, 1.0),
  ],
)
def test_wilson_by_the_published_table(successes, n, low, high):
  found = intervals.wilson(successes, n)
  assert found.value == successes / n
  np.testing.assert_allclose(found[1:], (low, high), atol=5e-5)


@hypothesis.settings(deadline=None)
@hypothesis.given(st.integers(1, 500), st.data())
def test_wilson_agrees_with_scipy(n, data):
  stats = pytest.importorskip("scipy.stats")
  successes = data.draw(st.integers(0, n))
  oracle = stats.binomtest(successes, n).proportion_ci(0.9, method="wilson")
  found = intervals.wilson(successes, n, confidence=0.9)
  np.testing.assert_allclose(found[1:], oracle, atol=1e-12)


def test_wilson_without_trials_is_unit_interval():
  assert intervals.wilson(0, 0) == (None, 0.0, 1.0)
  with pytest.raises(ValueError, match="expected 0 to n = 2"):
    intervals.wilson(3, 2)


def test_ratio_never_divides_by_zero():
  np.testing.assert_array_equal(
    intervals.ratio(np.array([1.0, 0.0, 3.0]), np.array([0.0, 0.0, 2.0])),
    [np.nan, np.nan, 1.5],
  )


def test_above_and_below():
  assert intervals.Estimate(1.0, 0.5, 2.0).above()
  assert intervals.Estimate(-1.0, -2.0, -0.5).below()
  straddling = intervals.Estimate(0.1, -0.1, 0.3)
  assert not straddling.above()
  assert not straddling.below()
  assert not intervals.Estimate(1.0, None, None).above()
