"""Intervals against hand values and analytic cases."""

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


def _mean(totals):
  return intervals.ratio(totals[:, :1], totals[:, 1:])


def _ratio_data(questions=300, per=3):
  rng = np.random.default_rng(5)
  searches = rng.integers(1, 5, size=(questions, per)).astype(float)
  hard = rng.random((questions, 1))
  em = (rng.random((questions, per)) > hard).astype(float)
  return em, searches


def test_delta_agrees_with_the_cluster_robust_regression_of_statsmodels():
  api = pytest.importorskip("statsmodels.api")
  em, searches = _ratio_data()
  # The ratio of sums is the mean of em / searches, weighted by searches.
  fit = api.WLS(
    (em / searches).ravel(), np.ones(em.size), weights=searches.ravel()
  ).fit(
    cov_type="cluster",
    cov_kwds={"groups": np.repeat(np.arange(len(em)), em.shape[1])},
  )
  found = intervals.delta(em.sum(1), searches.sum(1))
  assert found.value == pytest.approx(fit.params[0])
  np.testing.assert_allclose(found[1:], fit.conf_int()[0], rtol=1e-9)


def test_delta_without_data_is_undefined():
  one = np.ones(1)
  assert intervals.delta(one, 0 * one) == (None, None, None)
  assert intervals.delta(one * np.nan, one) == (None, None, None)
  assert intervals.delta(one, 2 * one) == (0.5, None, None)


def test_clustered_rate_of_one_trial_a_question_is_wilson():
  em = np.random.default_rng(0).integers(0, 2, 90).astype(float)
  found = intervals.clustered_rate(em, np.ones(90))
  np.testing.assert_allclose(found, intervals.wilson(int(em.sum()), 90))


def test_copies_of_a_question_do_not_narrow_a_clustered_rate():
  em = np.random.default_rng(0).integers(0, 2, 90).astype(float)
  for rate in (em, 0 * em, 0 * em + 1):
    one = intervals.clustered_rate(rate, np.ones(90))
    four = intervals.clustered_rate(4 * rate, np.full(90, 4.0))
    np.testing.assert_allclose(four, one, atol=1e-12)


def test_clustered_rate_of_many_is_the_bootstrap_of_scipy():
  stats = pytest.importorskip("scipy.stats")
  em, _ = _ratio_data(questions=1500)
  oracle = stats.bootstrap(
    (em.mean(1),), np.mean, n_resamples=4000, rng=np.random.default_rng(1)
  ).confidence_interval
  found = intervals.clustered_rate(em.sum(1), np.full(1500, 3.0))
  width = oracle.high - oracle.low
  np.testing.assert_allclose(found[1:], oracle, atol=0.05 * width)


def test_intervals_have_nominal_coverage():
  rng = np.random.default_rng(8)
  rates = ratios = 0
  for _ in range(1000):
    # Three seeds of 60 questions with mean accuracy 1/2 and 2 mean searches.
    easy = rng.random((60, 1))
    em = (rng.random((60, 3)) < easy).sum(1).astype(float)
    searches = (
      (1 + rng.binomial(2, 1 - easy, size=(60, 3))).sum(1).astype(float)
    )
    found = intervals.clustered_rate(em, np.full(60, 3.0))
    rates += found.low < 0.5 < found.high
    found = intervals.delta(em, searches)
    ratios += found.low < 0.25 < found.high
  # The binomial error of 1000 runs is 0.007. If episodes were treated as
  # independent, the coverage would be 0.87.
  assert 0.93 < rates / 1000 < 0.97
  assert 0.92 < ratios / 1000 < 0.97


def test_clustered_rate_without_trials_is_unit_interval():
  none = np.zeros(0)
  assert intervals.clustered_rate(none, none) == (None, 0.0, 1.0)


def test_bootstrap_of_a_ratio_is_that_of_scipy():
  stats = pytest.importorskip("scipy.stats")
  em, searches = (x.sum(1) for x in _ratio_data())
  oracle = stats.bootstrap(
    (em, searches),
    lambda x, y, axis=-1: x.sum(axis) / y.sum(axis),
    paired=True,
    method="percentile",
    n_resamples=9999,
    rng=np.random.default_rng(1),
  ).confidence_interval
  (found,) = intervals.bootstrap(np.stack([em, searches], -1), _mean)
  width = oracle.high - oracle.low
  np.testing.assert_allclose(found[1:], oracle, atol=0.06 * width)


def test_strata_keep_their_sizes():
  # Values are constant in each dataset, so only unstratified draws vary.
  sums = np.stack([np.repeat([0.0, 1.0], [5, 20]), np.ones(25)], -1)
  stratum = np.repeat([0, 1], [5, 20])
  (found,) = intervals.bootstrap(
    sums, lambda t: _mean(t.sum(axis=1)), stratum=stratum, resamples=100
  )
  assert found == (0.8, 0.8, 0.8)
  (loose,) = intervals.bootstrap(sums, _mean, resamples=100)
  assert loose.low < 0.8 < loose.high


def test_a_mean_over_sets_has_the_standard_error_of_its_strata():
  rng = np.random.default_rng(3)
  sets = [rng.normal(0, 1, 200), rng.normal(5, 3, 400)]
  values = np.concatenate(sets)
  (found,) = intervals.bootstrap(
    np.stack([values, np.ones(600)], -1),
    lambda t: (t[..., 0] / t[..., 1]).mean(axis=1, keepdims=True),
    stratum=np.repeat([0, 1], [200, 400]),
  )
  error = np.sqrt(sum(s.var() / len(s) for s in sets)) / 2
  assert found.value == pytest.approx((sets[0].mean() + sets[1].mean()) / 2)
  assert found.high - found.low == pytest.approx(2 * 1.96 * error, rel=0.05)


def test_bootstrap_of_a_normal_mean_is_the_analytic_interval():
  x = np.random.default_rng(0).normal(3.0, 2.0, size=1500)
  (found,) = intervals.bootstrap(np.stack([x, np.ones_like(x)], -1), _mean)
  half = 1.959964 * x.std() / np.sqrt(len(x))
  assert found.value == pytest.approx(x.mean())
  np.testing.assert_allclose(
    found[1:], (x.mean() - half, x.mean() + half), atol=0.05 * half
  )


def test_multinomial_shortcut_equals_drawing_questions():
  em = np.random.default_rng(1).integers(0, 2, 3000).astype(float)
  apart = em + 1e-9 * np.arange(3000)  # All values differ.
  (kinds,), (drawn,) = (
    intervals.bootstrap(np.stack([x, np.ones(3000)], -1), _mean)
    for x in (em, apart)
  )
  assert kinds.value == pytest.approx(drawn.value, abs=1e-5)
  width = drawn.high - drawn.low
  np.testing.assert_allclose(kinds[1:], drawn[1:], atol=0.04 * width)


def test_clustering_undoes_narrowing_by_repeats():
  em = np.repeat(np.random.default_rng(1).integers(0, 2, 400), 4).astype(float)
  cluster = np.repeat(np.arange(400), 4)

  def width(index, clusters):
    sums = intervals.cluster_sums(
      index, [em, np.ones_like(em)], clusters=clusters
    )
    (found,) = intervals.bootstrap(sums, _mean)
    return found.high - found.low

  # Four copies carry no more information than one question, so intervals that
  # ignore clusters are too narrow by sqrt(4) = 2.
  ratio = width(cluster, 400) / width(np.arange(1600), 1600)
  assert ratio == pytest.approx(2.0, rel=0.1)


def test_bootstrap_is_determined_by_its_seed():
  sums = np.random.default_rng(2).random((50, 2))
  first = intervals.bootstrap(sums, _mean, resamples=500, seed=3)
  assert first == intervals.bootstrap(sums, _mean, resamples=500, seed=3)
  assert first != intervals.bootstrap(sums, _mean, resamples=500, seed=4)


def test_undefined_ratio_has_neither_value_nor_interval():
  sums = np.stack([np.ones(20), np.zeros(20)], -1)
  assert intervals.bootstrap(sums, _mean) == [(None, None, None)]


def test_mostly_undefined_resamples_give_a_value_without_interval():
  sums = np.zeros((20, 2))
  # One of 20 questions searched; 36 % of the resamples miss it.
  sums[0] = 1.0, 2.0
  assert intervals.bootstrap(sums, _mean) == [(0.5, None, None)]


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


def test_all_resamples_go_through_the_statistic_in_one_call():
  sums = np.random.default_rng(0).random((1000, 16))
  shapes = []

  def statistic(totals):
    shapes.append(totals.shape)
    return intervals.ratio(totals[:, ::2], totals[:, 1::2])

  assert len(intervals.bootstrap(sums, statistic)) == 8
  assert shapes == [(1, 16), (10_000, 16)]
