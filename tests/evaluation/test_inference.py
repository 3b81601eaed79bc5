"""Intervals, tests, equivalence and power against textbook formulas."""

from __future__ import annotations

import numpy as np
import point_values
import pytest
from scipy import stats

from anysearch_jax.evaluation import inference


def _rates(right, answers, runs=("",)):
  """Returns the rate of right answers, float `[R, N]` each."""
  right, answers = (np.asarray(x, float)[..., None] for x in (right, answers))
  return inference.ratios(right, answers, runs=runs, trials=answers.sum(0))


def _mean(values):
  values = np.asarray(values, float)
  return inference.ratios(values[None, :, None], np.ones((1, len(values), 1)))


def _crossed(runs, questions, *, spread=0.3, seed=0):
  rng = np.random.default_rng(seed)
  return (
    rng.normal(size=(1, questions))
    + rng.normal(0, spread, size=(runs, 1))
    + rng.normal(0, 0.5, size=(runs, questions))
  )


def test_a_mean_has_students_interval():
  values = np.random.default_rng(0).normal(2, 3, size=20)
  (found,) = inference.effects(_mean(values))
  oracle = stats.ttest_1samp(values, 0)
  np.testing.assert_allclose(
    found.estimate[1:], oracle.confidence_interval(), rtol=1e-12
  )
  assert found.p == pytest.approx(oracle.pvalue)


def test_crossed_trainings_have_the_variance_of_their_mean_squares():
  """The two-way analysis of variance with random effects, balanced."""
  y = _crossed(4, 30)
  runs, questions = y.shape
  grand = y.mean()
  of_run, of_question = y.mean(axis=1), y.mean(axis=0)
  rest = y - of_run[:, None] - of_question + grand
  ms_run = questions * np.sum((of_run - grand) ** 2) / (runs - 1)
  ms_question = runs * np.sum((of_question - grand) ** 2) / (questions - 1)
  ms_rest = np.sum(rest**2) / ((runs - 1) * (questions - 1))
  size = runs * questions
  assert ms_run > ms_rest
  scores = inference.ratios(
    y[..., None], np.ones_like(y)[..., None], runs=tuple("abcd")
  )
  found = inference.variance(scores)
  np.testing.assert_allclose(
    found.total, (ms_question + ms_run - ms_rest) / size
  )
  (effect,) = inference.effects(scores)
  # Each part of the variance has its own quantile.
  asked, trained = stats.t.ppf(0.975, [questions - 1, runs - 1])
  half = np.sqrt(
    asked**2 * ms_question / size + trained**2 * (ms_run - ms_rest) / size
  )
  assert effect.estimate.high - grand == pytest.approx(half)
  assert effect.reach(0.025) == pytest.approx(half)


def test_p_value_is_where_the_interval_reaches_zero():
  y = _crossed(3, 30)[..., None] + 0.8
  (found,) = inference.effects(
    inference.ratios(y, np.ones_like(y), runs=tuple("abc"))
  )
  assert found.reach(found.p / 2) == pytest.approx(found.estimate.value)
  assert (found.p < 0.05) == (found.estimate.low > 0)


def test_trainings_alike_leave_the_interval_over_questions():
  y = _crossed(1, 40) * np.ones((3, 1))
  ones = np.ones_like(y)
  three = inference.ratios(y[..., None], ones[..., None], runs=tuple("abc"))
  one = inference.ratios(y[:1, :, None], ones[:1, :, None])
  np.testing.assert_allclose(
    inference.variance(three).total, inference.variance(one).total
  )


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


def test_copies_of_a_question_do_not_narrow_a_rate():
  em = np.random.default_rng(0).integers(0, 2, (1, 90))
  (one,) = inference.rates(_rates(em, np.ones((1, 90))))
  (four,) = inference.rates(_rates(4 * em, np.full((1, 90), 4.0)))
  np.testing.assert_allclose(four.estimate, one.estimate)


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


def test_detectable_effect_is_found_with_its_power():
  rng = np.random.default_rng(3)
  (one,) = inference.effects(_mean(rng.normal(size=25)))
  error = one.parts[0][0] ** 0.5
  found = stats.nct.sf(stats.t.ppf(0.975, 24), 24, one.detectable / error)
  assert found == pytest.approx(0.8, abs=0.01)


def test_equivalence_is_two_one_sided_tests():
  values = np.random.default_rng(1).normal(0.01, 0.1, size=60)
  (found,) = inference.effects(_mean(values))
  below = stats.ttest_1samp(values, -0.05, alternative="greater").pvalue
  above = stats.ttest_1samp(values, 0.05, alternative="less").pvalue
  assert found.not_below(-0.05) == pytest.approx(below)
  assert found.within(0.05) == pytest.approx(max(below, above))


def test_few_data_never_show_equivalence():
  rng = np.random.default_rng(2)
  (few,) = inference.effects(_mean(rng.normal(0, 0.3, size=8)))
  (many,) = inference.effects(_mean(rng.normal(0, 0.3, size=8000)))
  assert few.within(0.02) > 0.05 > many.within(0.02)
