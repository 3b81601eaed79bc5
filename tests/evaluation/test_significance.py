"""Significance tests against scipy, statsmodels and full enumeration."""

from __future__ import annotations

import gc
import itertools

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from anysearch_jax.evaluation import intervals, significance


@hypothesis.settings(deadline=None)
@hypothesis.given(st.integers(0, 400), st.integers(0, 400))
def test_exact_mcnemar_agrees_with_statsmodels(wins, losses):
  tables = pytest.importorskip("statsmodels.stats.contingency_tables")
  found = significance.mcnemar(wins, losses, mid=False)
  oracle = tables.mcnemar([[7, wins], [losses, 9]], exact=True)
  # Without discordant pairs statsmodels divides by zero.
  expected = oracle.pvalue if wins + losses else 1.0
  assert found == pytest.approx(expected, rel=1e-9)


@hypothesis.settings(deadline=None)
@hypothesis.given(st.integers(0, 400), st.integers(0, 400))
def test_mid_p_counts_half_of_the_observed_outcome(wins, losses):
  stats = pytest.importorskip("scipy.stats")
  n, few = wins + losses, min(wins, losses)
  half = stats.binom.pmf(few, n, 0.5) / 2
  oracle = 2 * (stats.binom.cdf(few, n, 0.5) - half)
  assert significance.mcnemar(wins, losses) == pytest.approx(oracle, abs=1e-12)


def test_the_mid_p_of_a_published_table():
  # Fagerland, Lydersen and Laake (2013), airway hyper-responsiveness: 1 and 7.
  assert significance.mcnemar(1, 7) == pytest.approx(0.0391, abs=5e-5)
  assert significance.mcnemar(1, 7, mid=False) == pytest.approx(
    0.0703, abs=5e-5
  )


def test_many_discordant_pairs_do_not_overflow():
  assert 0.8 < significance.mcnemar(50_010, 50_000) < 1
  assert significance.mcnemar(60_000, 40_000) < 1e-100


def test_negative_counts_are_refused():
  with pytest.raises(ValueError, match="Found -1 wins"):
    significance.mcnemar(-1, 3)


def _means(ours, theirs):
  found = intervals.ratio(ours[..., 0::2], ours[..., 1::2])
  other = intervals.ratio(theirs[..., 0::2], theirs[..., 1::2])
  return (found - other).mean(axis=1)


def _with_counts(values):
  return np.stack([values, np.ones_like(values)], axis=-1)


@pytest.mark.parametrize("questions", [1, 7, 12])
def test_few_questions_are_enumerated(questions):
  stats = pytest.importorskip("scipy.stats")
  rng = np.random.default_rng(questions)
  ours, theirs = rng.integers(0, 4, size=(2, questions)).astype(float)
  (found,) = significance.sign_flips(
    _with_counts(ours), _with_counts(theirs), _means
  )
  if questions == 1:
    assert found == 1.0
    return
  oracle = stats.permutation_test(
    (ours, theirs),
    lambda x, y: np.mean(x) - np.mean(y),
    permutation_type="samples",
    n_resamples=np.inf,
  )
  assert found == pytest.approx(oracle.pvalue)


def test_a_ratio_of_few_questions_is_enumerated():
  rng = np.random.default_rng(2)
  ours, theirs = rng.integers(1, 5, size=(2, 9, 2)).astype(float)

  def gap(swapped):
    mine = np.where(swapped[:, None], theirs, ours).sum(axis=0)
    other = np.where(swapped[:, None], ours, theirs).sum(axis=0)
    return abs(mine[0] / mine[1] - other[0] / other[1])

  gaps = [gap(np.array(s)) for s in itertools.product((False, True), repeat=9)]
  oracle = np.mean(np.array(gaps) >= gaps[0] - 1e-12)
  (found,) = significance.sign_flips(ours, theirs, _means)
  assert found == pytest.approx(oracle)


def test_many_questions_are_drawn_and_close_to_the_normal_test():
  stats = pytest.importorskip("scipy.stats")
  rng = np.random.default_rng(4)
  ours, theirs = rng.normal(size=(2, 800))
  ours += 0.1
  found = significance.sign_flips(
    _with_counts(ours), _with_counts(theirs), _means, draws=20_000
  )
  gap = ours - theirs
  z = abs(gap.mean()) / np.sqrt((gap**2).sum()) * len(gap)
  assert found[0] == pytest.approx(2 * stats.norm.sf(z), abs=0.01)
  assert 0.005 < found[0] < 0.5
  again = significance.sign_flips(
    _with_counts(ours), _with_counts(theirs), _means, draws=20_000
  )
  np.testing.assert_array_equal(found, again)


def test_p_is_never_zero_and_identical_rows_have_one():
  ours = _with_counts(np.ones(50))
  assert significance.sign_flips(ours, 0.5 * ours * [1, 2], _means, draws=99)[
    0
  ] == pytest.approx(0.01)
  assert significance.sign_flips(ours, ours, _means, draws=99)[0] == 1.0


def test_permutations_swap_whole_questions():
  """Copies of a question do not make a difference more significant."""
  rng = np.random.default_rng(6)
  ours, theirs = rng.integers(0, 2, size=(2, 40)).astype(float)
  once = significance.sign_flips(
    _with_counts(ours), _with_counts(theirs), _means
  )
  often = significance.sign_flips(
    9 * _with_counts(ours), 9 * _with_counts(theirs), _means
  )
  np.testing.assert_allclose(often, once)


def test_sets_weigh_the_same_in_a_stratified_test():
  rng = np.random.default_rng(7)
  ours, theirs = rng.integers(0, 3, size=(2, 10)).astype(float)
  stratum = np.repeat([0, 1], [2, 8])
  (found,) = significance.sign_flips(
    _with_counts(ours), _with_counts(theirs), _means, stratum=stratum
  )
  weights = np.where(stratum == 0, 1 / 2, 1 / 8) / 2
  signs = np.array(list(itertools.product((1, -1), repeat=10)))
  gaps = np.abs(signs @ (weights * (ours - theirs)))
  assert found == pytest.approx(np.mean(gaps >= gaps[0] - 1e-12))


def test_undefined_difference_has_no_p_value():
  ours = np.zeros((20, 2))
  assert np.isnan(significance.sign_flips(ours, ours, _means)[0])


_P_VALUES = st.lists(st.floats(0, 1), min_size=1, max_size=30)


@pytest.fixture(scope="module")
def multitest():
  oracle = pytest.importorskip("statsmodels.stats.multitest")
  with pytest.MonkeyPatch.context() as patch:
    # statsmodels runs the garbage collector at every call, which takes seconds
    # with many loaded objects.
    patch.setattr(gc, "collect", lambda *args: 0)
    yield oracle


@hypothesis.given(p_values=_P_VALUES)
def test_corrections_agree_with_statsmodels(multitest, p_values):
  for ours, method in (
    (significance.holm, "holm"),
    (significance.benjamini_hochberg, "fdr_bh"),
  ):
    oracle = multitest.multipletests(p_values, method=method)[1]
    np.testing.assert_allclose(ours(p_values), oracle, rtol=1e-12, atol=1e-300)


def test_nan_p_values_are_not_in_the_family():
  found = significance.holm([0.01, np.nan, 0.04])
  np.testing.assert_allclose(found, [0.02, np.nan, 0.04])
  assert len(significance.holm([])) == 0
