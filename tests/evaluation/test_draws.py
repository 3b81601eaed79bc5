"""Tests of the shared signs: kept ones are those of a fresh generator."""

from __future__ import annotations

import numpy as np
import pytest

from anysearch_jax.evaluation import draws

pytestmark = pytest.mark.usefixtures("_nothing_kept")


@pytest.fixture
def _nothing_kept():
  draws._kept_signs.cache_clear()


@pytest.mark.parametrize("chunk", (4_000_000, 70))
def test_kept_signs_are_those_of_a_fresh_generator(monkeypatch, chunk):
  monkeypatch.setattr(draws, "_CHUNK", chunk)
  first, second = (list(draws.signs(30, 11, 5)) for _ in range(2))
  assert draws._kept_signs.cache_info().hits == 1
  monkeypatch.setattr(draws, "_KEPT", 0)
  fresh = list(draws.signs(30, 11, 5))
  for found in (first, second):
    np.testing.assert_array_equal(np.concatenate(found), np.concatenate(fresh))
  assert np.concatenate(fresh).shape == (11, 30)
  assert set(np.concatenate(fresh).ravel()) == {-1.0, 1.0}
