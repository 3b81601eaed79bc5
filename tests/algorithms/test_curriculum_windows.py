"""Tests the budget curriculum's windows: the last outcomes of each level."""

from __future__ import annotations

import dataclasses
import functools

import chex
import numpy as np
import oracles
import pytest
from absl.testing import parameterized
from curriculum_states import CONFIG, at, held, outcomes
from hypothesis import given, settings
from hypothesis import strategies as st

from anysearch_jax import config as config_lib
from anysearch_jax.algorithms import curriculum

SMALL = config_lib.CurriculumConfig(max_budget=3, phase1_steps=15, window=4)
RECORD = curriculum.record.__wrapped__


class RecordTest(chex.TestCase):
  @chex.variants(with_jit=True, without_jit=True)
  def test_hand_table(self):
    config = dataclasses.replace(SMALL, window=3)
    record = self.variant(RECORD, static_argnames="config")
    budgets = np.array([1, 2, 1, 1, 0, 2, 1, 4, 1, -1])
    em = np.array([1, 1, 0, 0, 1, 0, 1, 1, 1, 1])
    valid = np.array([1, 1, 1, 1, 1, 1, 0, 1, 1, 1]) == 1
    # Level 1 gets 1 0 0 (1 is invalid) 1 and keeps 0 0 1. Budgets 0, 4 and -1
    # have no level.
    state = record(at(0, config=config), budgets, em, valid, config=config)
    assert [held(state, b) for b in (1, 2, 3)] == [[0, 0, 1], [1, 0], []]
    np.testing.assert_array_equal(state.counts, [4, 2, 0])
    np.testing.assert_allclose(
      curriculum.accuracies(state), [1 / 3, 1 / 2, 0], rtol=1e-6
    )
    assert state.step == 5
    # One more outcome each: a full window drops its oldest one.
    state = record(
      state, np.array([2, 1]), np.array([1, 1]), np.full(2, True), config=config
    )
    assert [held(state, b) for b in (1, 2, 3)] == [[0, 1, 1], [1, 0, 1], []]
    assert state.step == 10

  @chex.variants(with_jit=True, without_jit=True)
  @parameterized.parameters(1, 3, 20)
  def test_the_last_of_each_level_in_order(self, window):
    config = dataclasses.replace(CONFIG, window=window)
    record = self.variant(RECORD, static_argnames="config")
    rng = np.random.default_rng(window)
    state, oracle = at(0, config=config), oracles.Windows(config)
    for size in (0, 1, 7, 7, 60, 60, 300):
      call = outcomes(rng, size)
      state = record(state, *call, config=config)
      oracle.record(*call)
      for b in range(1, 6):
        assert held(state, b) == list(oracle.held[b])
      np.testing.assert_allclose(
        curriculum.probabilities(state, config=config),
        oracle.probabilities(),
        atol=1e-6,
      )
    assert np.all(np.asarray(state.counts) > window)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 24), st.integers(0, 2**32 - 1))
def test_splitting_a_call_in_two_gives_the_same_windows(cut, seed):
  """Windows and counts depend on the stream; only the step counts calls."""
  calls = outcomes(np.random.default_rng(seed), 24, levels=3)
  record = functools.partial(curriculum.record, config=SMALL)
  whole = record(at(0, config=SMALL), *calls)
  # Invalid outcomes are the padding, so that every cut has the same shape.
  first, second = (
    (*calls[:2], calls[2] & keep)
    for keep in (np.arange(24) < cut, np.arange(24) >= cut)
  )
  split = record(record(at(0, config=SMALL), *first), *second)
  chex.assert_trees_all_equal(
    split._replace(step=whole.step), whole, strict=True
  )


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_invalid_outcomes_are_inert(seed):
  rng = np.random.default_rng(seed)
  budgets, em, valid = outcomes(rng, 24, levels=3)
  others, wrong, _ = outcomes(rng, 24, levels=3)
  state = at(0, config=SMALL)
  chex.assert_trees_all_equal(
    curriculum.record(
      state,
      np.where(valid, budgets, others),
      np.where(valid, em, wrong),
      valid,
      config=SMALL,
    ),
    curriculum.record(state, budgets, em, valid, config=SMALL),
  )


def test_record_takes_any_number_type():
  budgets, em, valid = outcomes(np.random.default_rng(0), 24, levels=3)
  state = at(0, config=SMALL)
  expected = curriculum.record(state, budgets, em, valid, config=SMALL)
  for dtype in (bool, np.int8, np.float32):
    chex.assert_trees_all_equal(
      curriculum.record(
        state, budgets.astype(int), em.astype(dtype), valid, config=SMALL
      ),
      expected,
    )
  with pytest.raises(AssertionError):
    curriculum.record(state, budgets, em[:-1], valid, config=SMALL)


def test_a_full_rollout_of_the_paper():
  call = outcomes(np.random.default_rng(0), 2560)
  oracle = oracles.Windows(CONFIG)
  oracle.record(*call)
  state = curriculum.record(curriculum.init(CONFIG, 0), *call, config=CONFIG)
  assert [held(state, b) for b in range(1, 6)] == [
    list(w) for w in oracle.held.values()
  ]
