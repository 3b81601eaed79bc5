"""Intervals, tests and power against textbook formulas and leaving out."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import point_values
import pytest
from scipy import special, stats

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


def _rates(right, answers, runs=("",), clusters=None):
  """Returns the rate of right answers, float `[R, N]` each."""
  right, answers = (np.asarray(x, float)[..., None] for x in (right, answers))
  return inference.ratios(
    right, answers, runs=runs, trials=answers.sum(0), clusters=clusters
  )


def _means(values):
  """Linearises the mean of `[R, N]` values."""
  y = np.asarray(values, float)[..., None]
  return inference.ratios(y, np.ones_like(y), runs=[*"abcdefgh"[: len(y)]])


def _crossed(runs, questions):
  rng = np.random.default_rng(0)
  both = rng.normal(size=(1, questions)) + rng.normal(0, 0.3, size=(runs, 1))
  return both + rng.normal(0, 0.5, size=(runs, questions))


def _data(runs=3, questions=12, ratios=4, seed=0):
  rng = np.random.default_rng(seed)
  bottom = rng.integers(1, 6, size=(runs, questions, ratios)).astype(float)
  return bottom * rng.random(bottom.shape), bottom


def _ratio(top, bottom):
  return top.sum(axis=(0, 1)) / bottom.sum(axis=(0, 1))


def test_jackknife_scores_are_those_of_leaving_out():
  top, bottom = _data()
  found = inference.ratios(top, bottom, runs=("a", "b", "c"))
  whole = _ratio(top, bottom)
  np.testing.assert_allclose(found.value, whole)
  for q in range(12):
    without = _ratio(np.delete(top, q, 1), np.delete(bottom, q, 1))
    np.testing.assert_allclose(found.cluster[0][q], whole - without)
  for r in range(3):
    without = _ratio(np.delete(top, r, 0), np.delete(bottom, r, 0))
    np.testing.assert_allclose(found.run[r], whole - without)
  np.testing.assert_allclose(
    found.run_cluster[0].sum(axis=(0, 1)), 0, atol=1e-12
  )


def test_weighted_sums_and_differences_have_the_scores_of_their_parts():
  weights = np.array([[1.0, -1, 0, 0], [0.25, 0.25, 0.25, 0.25]])
  top, bottom = _data(runs=1)
  other_top, other_bottom = _data(runs=1, seed=1)
  found = inference.minus(
    inference.ratios(top, bottom, runs=("a",)).combined(weights),
    inference.ratios(other_top, other_bottom, runs=("b",)).combined(weights),
  )

  def value(q=None):
    keep = np.arange(12) != q
    parts = (top, bottom), (other_top, other_bottom)
    ours, theirs = (_ratio(a[:, keep], b[:, keep]) for a, b in parts)
    return weights @ (ours - theirs)

  np.testing.assert_allclose(found.value, value())
  without = [value() - value(q) for q in range(12)]
  np.testing.assert_allclose(found.cluster[0], without, atol=1e-12)


def test_trainings_of_both_rows_are_paired_in_any_order():
  top, bottom = _data(runs=3)
  top += bottom * np.array([0.0, 1.0, 5.0])[:, None, None]
  ours = inference.ratios(top, bottom, runs=("a", "b", "c"))
  theirs = inference.ratios(
    2 + top[[2, 0, 1]], bottom[[2, 0, 1]], runs=("c", "a", "b")
  )
  found = inference.minus(ours, theirs)
  assert found.runs == ("a", "b", "c")
  assert found.group.tolist() == [0, 0, 0]
  others = dataclasses.replace(theirs, runs=("d", "e", "f"))
  apart = inference.minus(ours, others)
  assert apart.group.tolist() == [1, 1, 1, 2, 2, 2]
  # Common deviations of a training cancel only where it is paired.
  paired, free = map(inference.variance, (found, apart))
  for one, other in zip(paired, free, strict=True):
    assert 10 * one[-1][0] < other[-1][0]


def _totals(found):
  return [sum(v for v, _ in parts) for parts in inference.variance(found)]


def test_sets_weigh_alike_and_their_questions_are_separate():
  parts = [
    inference.ratios(*_data(runs=1, questions=n, seed=n)) for n in (5, 20)
  ]
  found = inference.average(parts)
  np.testing.assert_allclose(found.value, (parts[0].value + parts[1].value) / 2)
  # The variance of a mean of two independent numbers.
  each = [np.array(_totals(part)) for part in parts]
  np.testing.assert_allclose(_totals(found), (each[0] + each[1]) / 4)


def test_an_undefined_ratio_spoils_only_what_uses_it():
  top, bottom = _data(runs=1)
  bottom[..., 0] = top[..., 0] = 0
  found = inference.ratios(top, bottom).combined(np.eye(4)[[0, 1]])
  assert np.isnan(found.value).tolist() == [True, False]
  effects = inference.effects(found)
  assert effects[0] == inference.UNKNOWN
  assert effects[1].estimate.low is not None
  # A ratio of one question has a value without an interval.
  top, bottom = np.zeros((2, 1, 5, 1))
  top[0, 2], bottom[0, 2] = 1, 2
  (effect,) = inference.effects(inference.ratios(top, bottom))
  assert effect.estimate == (pytest.approx(0.5), None, None)
  assert effect.p is effect.detectable is None


def test_a_mean_has_students_interval():
  values = np.random.default_rng(0).normal(2, 3, size=20)
  (found,) = inference.effects(_means([values]))
  oracle = stats.ttest_1samp(values, 0)
  ends = oracle.confidence_interval()
  np.testing.assert_allclose(found.estimate[1:], ends, rtol=1e-12)
  half = inference.reach(found.parts, oracle.pvalue / 2)
  assert half == pytest.approx(abs(values.mean()))
  assert found.p is None  # There is one training.


@pytest.mark.parametrize("differ", [True, False])
def test_crossed_trainings_have_the_variance_of_their_mean_squares(differ):
  """The two-way analysis of variance with random effects, balanced.

  Expectations, of R trainings and N questions with variances T, Q and E (the
  interaction): MS_run = N T + E, MS_question = R Q + E, MS_rest = E; that of
  the mean, T / R + Q / N + E / (R N), is (MS_run + MS_question - MS_rest) /
  (R N).
  """
  y = _crossed(4, 30)
  if not differ:
    y -= y.mean(axis=0)
  runs, questions = y.shape
  grand = y.mean()
  of_run, of_question = y.mean(axis=1), y.mean(axis=0)
  rest = y - of_run[:, None] - of_question + grand
  ms_run = questions * np.sum((of_run - grand) ** 2) / (runs - 1)
  ms_question = runs * np.sum((of_question - grand) ** 2) / (questions - 1)
  ms_rest = np.sum(rest**2) / ((runs - 1) * (questions - 1))
  size = runs * questions
  # The spread of the trainings is never smaller than it is seen to be.
  trained = ms_run / size
  assert trained == pytest.approx(stats.sem(of_run) ** 2)
  asked = max(ms_question - ms_rest, 0) / size
  assert (asked > 0) == differ
  (effect,) = inference.effects(_means(y))
  each = [(asked, questions - 1), (trained, runs - 1)][not asked :]
  np.testing.assert_allclose(effect.parts, each)
  # Cochran and Cox: quantiles weighted by the variances.
  quantiles = [v * stats.t.ppf(0.975, df) for v, df in each]
  half = sum(quantiles) / np.sqrt(asked + trained)
  assert effect.estimate.high - grand == pytest.approx(half)
  assert inference.reach(effect.parts, 0.025) == pytest.approx(half)


def test_trainings_that_agree_by_chance_decide_nothing():
  y = _crossed(3, 40)
  y += 0.2 + y.mean() - y.mean(axis=1, keepdims=True)  # Equal means.
  for runs in (1, 2, 3):
    (found,) = inference.effects(_means(y[:runs]))
    assert (found.p is None) == (runs < 3)
  # Unequal ones are as sure as they agree.
  y += np.array([[-0.1], [0.0], [0.1]])
  (found,) = inference.effects(_means(y))
  assert found.parts[-1] == pytest.approx((0.01 / 3, 2))
  assert not found.p < 0.05


def test_questions_of_a_cluster_are_one():
  """Scores and intervals are those of the sums over each cluster."""
  top, bottom = _data(runs=2, questions=12)
  clusters = np.array([7, 3, 3, 7, 9, 9, 9, 3, 7, 1, 1, 1])
  names, runs = (1, 3, 7, 9), ("a", "b")
  trials = bottom.sum(axis=0)
  found = inference.ratios(
    top, bottom, runs=runs, trials=trials, clusters=clusters
  )
  sums = [
    np.stack([x[:, clusters == name].sum(axis=1) for name in names], axis=1)
    for x in (top, bottom)
  ]
  plain = inference.ratios(*sums, runs=runs)
  np.testing.assert_allclose(found.cluster, plain.cluster)
  np.testing.assert_allclose(found.run_cluster, plain.run_cluster)
  np.testing.assert_allclose(found.run, plain.run)
  assert (found.question_count, plain.question_count) == (12, 4)
  for name, scores in zip(names, found.cluster[0], strict=True):
    keep = clusters != name
    without = _ratio(top[:, keep], bottom[:, keep])
    np.testing.assert_allclose(scores, _ratio(top, bottom) - without)
  assert {df for parts in inference.variance(found) for _, df in parts} == {
    *(3, 1)
  }
  # Equal answers of ten questions in each of 24 clusters say as much as 24.
  right = np.random.default_rng(0).integers(0, 2, 24).astype(float)
  ten, ones = np.repeat(right, 10)[None], np.ones((1, 240))
  (one,) = inference.rates(_rates(right[None], ones[:, :24]))
  (wide,) = inference.rates(_rates(ten, ones, clusters=np.arange(240) // 10))
  np.testing.assert_allclose(wide.estimate, one.estimate)
  (narrow,) = inference.rates(_rates(ten, ones))
  assert (
    narrow.estimate.high - narrow.estimate.low
    < 0.2
    < (wide.estimate.high - wide.estimate.low)
  )


def test_p_value_is_where_the_interval_reaches_zero():
  (found,) = inference.effects(_means(_crossed(3, 30) + 0.8))
  half = inference.reach(found.parts, found.p / 2)
  assert half == pytest.approx(found.estimate.value)
  assert (found.p < 0.05) == (found.estimate.low > 0)


def test_one_trial_a_question_is_wilson():
  em = np.random.default_rng(0).integers(0, 2, 90)
  (found,) = inference.rates(_rates([em], np.ones((1, 90))), [90])
  np.testing.assert_allclose(
    found.estimate, point_values.wilson(int(em.sum()), 90)
  )


@pytest.mark.parametrize("rate", [0, 1])
def test_boundary_counts_a_question_once(rate):
  right = np.full((1, 20), 4.0 * rate)
  (found,) = inference.rates(_rates(right, np.full((1, 20), 4.0)), [80])
  np.testing.assert_allclose(
    found.estimate, point_values.wilson(20 * rate, 20), atol=1e-15
  )
  assert found.estimate.low < found.estimate.high


def test_rates_of_trainings_that_differ_are_wider():
  em = np.random.default_rng(0).random((3, 400))
  alike = (em < 0.5).astype(float)
  apart = (em < np.array([[0.4], [0.5], [0.6]])).astype(float)
  ones = np.ones((3, 400))
  widths = []
  for right in (alike, apart):
    (found,) = inference.rates(_rates(right, ones, tuple("abc")), [1200])
    widths.append(found.estimate.high - found.estimate.low)
  assert widths[1] > 3 * widths[0]
  assert 0 <= found.estimate.low and found.estimate.high <= 1


def test_a_difference_without_any_change_is_not_certain():
  """With no change among n, up to about 3 / n of all may change."""
  right = np.random.default_rng(0).integers(0, 2, (1, 60))
  ours = _rates(right, np.ones((1, 60)), ("a",))
  theirs = _rates(right, np.ones((1, 60)), ("b",))
  (found,) = inference.effects(inference.minus(ours, theirs))
  assert found.estimate.value == 0
  assert 2 / 60 < found.estimate.high < 5 / 60
  assert not (found.estimate.above() or found.estimate.below())


def test_detectable_effect_is_found_with_its_power():
  rng = np.random.default_rng(3)
  (one,) = inference.effects(_means([rng.normal(size=25)]))
  error = one.parts[0][0] ** 0.5
  found = stats.nct.sf(stats.t.ppf(0.975, 24), 24, one.detectable / error)
  assert found == pytest.approx(0.8, abs=0.01)


def test_holm_is_the_closed_test_of_bonferroni():
  """A claim is rejected if every family that has it is, by its smallest p."""
  rng = np.random.default_rng(0)
  for size in (1, 2, 7):
    p = rng.random(size) ** 3
    p[-1] = p[0]
    families = [
      np.array(chosen, dtype=bool)
      for chosen in itertools.product((False, True), repeat=size)
    ]
    expected = [
      max(min(1, f.sum() * p[f].min()) for f in families if f[i])
      for i in range(size)
    ]
    np.testing.assert_allclose(inference.holm(p), expected, rtol=1e-12)
  # NaN is not in the family.
  found = inference.holm([0.01, np.nan, 0.04])
  np.testing.assert_allclose(found, [0.02, np.nan, 0.04])
  assert len(inference.holm([])) == 0
