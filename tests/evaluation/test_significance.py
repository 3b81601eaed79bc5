"""Significance tests against scipy, statsmodels and full enumeration."""

from __future__ import annotations

import gc
import itertools

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st
from scipy import stats

from anysearch_jax.evaluation import significance


@hypothesis.settings(deadline=None, max_examples=30)
@hypothesis.given(st.integers(0, 400), st.integers(0, 400))
def test_mid_p_counts_half_of_the_observed_outcome(wins, losses):
  n, few = wins + losses, min(wins, losses)
  half = stats.binom.pmf(few, n, 0.5) / 2
  oracle = 2 * (stats.binom.cdf(few, n, 0.5) - half)
  assert significance.mcnemar(wins, losses) == pytest.approx(oracle, abs=1e-12)


def test_the_mid_p_of_a_published_table():
  # Fagerland, Lydersen and Laake (2013), airway hyper-responsiveness: 1 and 7.
  assert significance.mcnemar(1, 7) == pytest.approx(0.0391, abs=5e-5)
  # Many discordant pairs do not overflow.
  assert 0.8 < significance.mcnemar(50_010, 50_000) < 1
  assert significance.mcnemar(60_000, 40_000) < 1e-100


def _scores(ours, theirs):
  """Returns the scores of a difference of means of float `[N]` each."""
  sides = [(x[:, None], np.ones((len(x), 1))) for x in (ours, theirs)]
  return [significance.null_scores(*sides)]


def _p(scores, **options):
  return significance.sign_flips(scores, **options)[0, 0]


@pytest.mark.parametrize("questions", [1, 7, 12])
def test_few_questions_are_enumerated(questions):
  rng = np.random.default_rng(questions)
  ours, theirs = rng.integers(0, 4, size=(2, questions)).astype(float)
  found = _p(_scores(ours, theirs))
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


def test_scores_of_ratios_add_up_to_their_difference():
  rng = np.random.default_rng(2)
  ours, theirs = rng.integers(1, 5, size=(2, 2, 9, 3)).astype(float)
  scores = significance.null_scores(tuple(ours), tuple(theirs))
  ratios = [
    top.sum(axis=0) / bottom.sum(axis=0) for top, bottom in (ours, theirs)
  ]
  np.testing.assert_allclose(scores.sum(axis=0), ratios[0] - ratios[1])
  signs = np.array(list(itertools.product((1, -1), repeat=9)))
  gaps = np.abs(signs @ scores)
  found = significance.sign_flips([scores])[0]
  np.testing.assert_allclose(found, (gaps >= gaps[0] - 1e-12).mean(axis=0))


def test_many_questions_are_drawn_and_close_to_the_normal_test():
  rng = np.random.default_rng(4)
  ours, theirs = rng.normal(size=(2, 800))
  ours += 0.1
  found = _p(_scores(ours, theirs), draws=5_000)
  gap = ours - theirs
  z = abs(gap.mean()) / np.sqrt((gap**2).sum()) * len(gap)
  assert found == pytest.approx(2 * stats.norm.sf(z), abs=0.015)
  assert 0.005 < found < 0.5
  assert found == _p(_scores(ours, theirs), draws=5_000)


def test_p_is_never_zero_and_undefined_without_a_difference():
  ours, nothing = np.ones(50), np.zeros((20, 1))
  assert _p(_scores(ours, 0.5 * ours), draws=99) == pytest.approx(0.01)
  assert _p(_scores(ours, ours), draws=99) == 1.0
  scores = significance.null_scores((nothing, nothing), (nothing, nothing))
  assert np.isnan(_p([scores]))


def test_sets_weigh_the_same_in_a_test_of_all():
  rng = np.random.default_rng(7)
  ours, theirs = rng.integers(0, 3, size=(2, 10)).astype(float)
  sets = slice(0, 2), slice(2, 10)
  scores = [_scores(ours[s], theirs[s])[0] for s in sets]
  found = significance.sign_flips(scores)[:, 0]
  signs = np.array(list(itertools.product((1, -1), repeat=10)))
  weights = np.repeat([1 / 2, 1 / 8], [2, 8])
  for place, use in enumerate((slice(0, 10), *sets)):
    gaps = np.abs(signs[:, use] @ (weights * (ours - theirs))[use])
    assert found[place] == pytest.approx(np.mean(gaps >= gaps[0] - 1e-12))


def test_trainings_are_exchanged_exactly():
  ours, theirs = np.array([[3.0], [4], [5], [6]]), np.array([[0.0], [1], [2]])
  found = significance.between_trainings(ours, theirs, paired=False)
  # One arrangement of 35 is as extreme; SciPy doubles the smaller side.
  np.testing.assert_allclose(found, [2 / 35])
  found = significance.between_trainings(ours[:3], theirs, paired=True)
  np.testing.assert_allclose(found, [2 / 8])
  single = significance.between_trainings(ours[:1], theirs, paired=False)
  assert np.isnan(single).all()


def test_holm_agrees_with_statsmodels(monkeypatch):
  oracle = pytest.importorskip("statsmodels.stats.multitest")
  # statsmodels runs the garbage collector at every call, which takes seconds
  # with many loaded objects.
  monkeypatch.setattr(gc, "collect", lambda *args: 0)
  rng = np.random.default_rng(0)
  for size in (1, 2, 7, 30):
    p = rng.random(size) ** 3
    p[-1] = p[0]
    expected = oracle.multipletests(p, method="holm")[1]
    np.testing.assert_allclose(significance.holm(p), expected, rtol=1e-12)
  # NaN is not in the family.
  found = significance.holm([0.01, np.nan, 0.04])
  np.testing.assert_allclose(found, [0.02, np.nan, 0.04])
  assert len(significance.holm([])) == 0
