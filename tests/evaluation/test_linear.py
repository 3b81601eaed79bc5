"""Linearised ratios against leaving out each question and training."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from anysearch_jax.evaluation import inference


def _data(runs=3, questions=12, ratios=4, seed=0):
  rng = np.random.default_rng(seed)
  bottom = rng.integers(1, 6, size=(runs, questions, ratios)).astype(float)
  return bottom * rng.random(bottom.shape), bottom


def _ratio(top, bottom):
  return top.sum(axis=(0, 1)) / bottom.sum(axis=(0, 1))


def test_jackknife_scores_are_those_of_leaving_out():
  top, bottom = _data()
  names = ("a", "b", "c")
  found = inference.ratios(top, bottom, runs=names)
  whole = _ratio(top, bottom)
  np.testing.assert_allclose(found.value, whole)
  for q in range(12):
    without = _ratio(np.delete(top, q, 1), np.delete(bottom, q, 1))
    np.testing.assert_allclose(found.question[0][q], whole - without)
  for r in range(3):
    without = _ratio(np.delete(top, r, 0), np.delete(bottom, r, 0))
    np.testing.assert_allclose(found.run[r], whole - without)
  np.testing.assert_allclose(found.both[0].sum(axis=(0, 1)), 0, atol=1e-12)


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
  for q in range(12):
    np.testing.assert_allclose(
      found.question[0][q], value() - value(q), atol=1e-12
    )


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
  apart = inference.minus(
    ours, dataclasses.replace(theirs, runs=("d", "e", "f"))
  )
  assert apart.group.tolist() == [1, 1, 1, 2, 2, 2]
  # Common deviations of a training cancel only where it is paired.
  paired, free = (inference.variance(x).trainings for x in (found, apart))
  assert (10 * paired < free).all()


def test_sets_weigh_alike_and_their_questions_are_separate():
  parts = [inference.ratios(*_data(questions=n, seed=n)) for n in (5, 20)]
  found = inference.average(parts)
  np.testing.assert_allclose(found.value, (parts[0].value + parts[1].value) / 2)
  assert [len(scores) for scores in found.question] == [5, 20]
  # The variance of a mean of two independent numbers.
  each = [inference.variance(part).questions for part in parts]
  np.testing.assert_allclose(
    inference.variance(found).questions, (each[0] + each[1]) / 4
  )


def test_an_undefined_ratio_spoils_only_what_uses_it():
  top, bottom = _data(runs=1)
  bottom[..., 0] = top[..., 0] = 0
  found = inference.ratios(top, bottom).combined(np.eye(4)[[0, 1]])
  assert np.isnan(found.value).tolist() == [True, False]
  effects = inference.effects(found)
  assert effects[0] == inference.UNKNOWN
  assert effects[1].estimate.low is not None


def test_a_ratio_of_one_question_has_a_value_without_an_interval():
  top, bottom = np.zeros((2, 1, 5, 1))
  top[0, 2], bottom[0, 2] = 1, 2
  (effect,) = inference.effects(inference.ratios(top, bottom))
  assert effect.estimate == (pytest.approx(0.5), None, None)
  assert effect.p is effect.detectable is effect.within(0.1) is None
