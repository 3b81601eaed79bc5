"""Tests of the shared draws: kept draws are those of a fresh generator."""

from __future__ import annotations

import numpy as np
import pytest

from anysearch_jax.evaluation import draws

pytestmark = pytest.mark.usefixtures("_nothing_kept")


@pytest.fixture
def _nothing_kept():
  draws._kept_counts.cache_clear()
  draws._kept_signs.cache_clear()


def _totals(questions: int, *, seed: int) -> tuple[np.ndarray, int]:
  """Returns the totals of a bootstrap, and the generator's next number."""
  sums = np.random.default_rng(1).normal(size=(questions, 3))
  rng = np.random.default_rng(seed)
  rng.integers(7, size=seed, dtype=np.int32)  # Leaves half of a number unused.
  found = draws.resampled_totals(rng, sums, resamples=500)
  return found, int(rng.integers(2**62))


@pytest.mark.parametrize("seed", (0, 1, 2))
@pytest.mark.parametrize("questions", (1, 40, 300))
def test_kept_resamples_are_those_of_a_fresh_generator(
  monkeypatch, questions, seed
):
  first, second = (_totals(questions, seed=seed) for _ in range(2))
  assert draws._kept_counts.cache_info().hits == 1
  monkeypatch.setattr(draws, "_KEPT", 0)
  fresh = _totals(questions, seed=seed)
  assert draws._kept_counts.cache_info().misses == 1
  for totals, following in (first, second):
    np.testing.assert_array_equal(totals, fresh[0])
    assert following == fresh[1]


@pytest.mark.parametrize("scale", (1, 2**24 / 5000, 1e9, 0.1, np.nan), ids=str)
def test_product_is_that_of_float64(scale):
  rng = np.random.default_rng(0)
  drawn = rng.integers(3, size=(700, 500), dtype=np.int8)
  sums = rng.integers(10, size=(500, 4)) * float(scale)
  np.testing.assert_array_equal(
    draws.product(drawn, sums), drawn.astype(np.float64) @ sums
  )


def test_every_resample_draws_as_many_questions_as_there_are():
  rng = np.random.default_rng(0)
  totals = draws.resampled_totals(rng, np.ones((25, 1)), resamples=90)
  np.testing.assert_array_equal(totals, np.full((90, 1), 25.0))


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
