"""Wilson's interval against a published table and SciPy."""

from __future__ import annotations

import hypothesis
import numpy as np
import point_values
import pytest
from hypothesis import strategies as st
from scipy import special

from anysearch_jax.evaluation import inference


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
  found = inference.score(successes / n, n, special.ndtri(0.975))
  np.testing.assert_allclose(found, (low, high), atol=5e-5)


@hypothesis.settings(deadline=None)
@hypothesis.given(st.integers(1, 500), st.data())
def test_wilson_agrees_with_scipy(n, data):
  successes = data.draw(st.integers(0, n))
  oracle = point_values.wilson(successes, n, 0.9)
  found = inference.score(successes / n, n, special.ndtri(0.95))
  np.testing.assert_allclose(found, oracle[1:], atol=1e-12)


def test_ratio_never_divides_by_zero():
  np.testing.assert_array_equal(
    inference.ratio(np.array([1.0, 0.0, 3.0]), np.array([0.0, 0.0, 2.0])),
    [np.nan, np.nan, 1.5],
  )


def test_above_and_below():
  assert inference.Estimate(1.0, 0.5, 2.0).above()
  assert inference.Estimate(-1.0, -2.0, -0.5).below()
  straddling = inference.Estimate(0.1, -0.1, 0.3)
  assert not straddling.above()
  assert not straddling.below()
  assert not inference.Estimate(1.0, None, None).above()
