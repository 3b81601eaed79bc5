"""Tests the budget curriculum: schedule, draws, windows and whole runs."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter

import chex
import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from absl.testing import parameterized
from hypothesis import given
from hypothesis import strategies as st

from anysearch_jax import config as config_lib
from anysearch_jax.algorithms import curriculum

CONFIG = config_lib.CurriculumConfig()
PROBABILITIES = curriculum.probabilities.__wrapped__


def at(step, *, config=CONFIG, accuracies=None, seed=0):
  """Returns a state at `step` with full windows of these accuracies."""
  state = curriculum.init(config, seed)._replace(step=jnp.int32(step))
  if accuracies is None:
    return state
  right = np.rint(np.array(accuracies) * config.window)
  windows = np.arange(config.window) < right[:, None]
  return state._replace(
    windows=jnp.asarray(windows, jnp.int8),
    counts=jnp.full(config.max_budget, config.window, jnp.int32),
  )


def held(state, budget):
  """Returns a level's window from its ring buffer, oldest first."""
  ring = np.asarray(state.windows)[budget - 1]
  count = int(state.counts[budget - 1])
  first = max(count - len(ring), 0)
  return [int(ring[i % len(ring)]) for i in range(first, count)]


def outcomes(rng, size, *, levels=5):
  """Draws budgets (some without a window), correctness and validity."""
  return (
    rng.integers(-1, levels + 3, size).astype(np.int32),
    rng.integers(0, 2, size).astype(np.int32),
    rng.random(size) < 0.8,
  )


class ProbabilitiesTest(chex.TestCase):
  @chex.variants(with_jit=True, without_jit=True)
  @parameterized.parameters(
    # Gaps to the best: 0.8 0.6 0.4 0.2 0, with sum 2.
    (0.6, (0.2, 0.4, 0.6, 0.8, 1.0), (0.28, 0.24, 0.20, 0.16, 0.12)),
    (0.0, (0.2, 0.4, 0.6, 0.8, 1.0), (0.4, 0.3, 0.2, 0.1, 0.0)),
    (1.0, (0.2, 0.4, 0.6, 0.8, 1.0), (0.2, 0.2, 0.2, 0.2, 0.2)),
    # Gaps 1 0 1 0 0; equal gaps have equal probabilities.
    (0.0, (0.0, 1.0, 0.0, 1.0, 1.0), (0.5, 0.0, 0.5, 0.0, 0.0)),
    (0.6, (0.0, 1.0, 0.0, 1.0, 1.0), (0.32, 0.12, 0.32, 0.12, 0.12)),
    (0.0, (0.3, 0.3, 0.3, 0.3, 0.3), (0.2, 0.2, 0.2, 0.2, 0.2)),
    (0.6, (0.0, 0.0, 0.0, 0.0, 0.0), (0.2, 0.2, 0.2, 0.2, 0.2)),
  )
  def test_hand_table(self, uniform_mix, accuracies, expected):
    config = dataclasses.replace(CONFIG, uniform_mix=uniform_mix)
    probabilities = self.variant(PROBABILITIES, static_argnames="config")
    actual = probabilities(at(0, accuracies=accuracies), config=config)
    np.testing.assert_allclose(actual, expected, atol=3e-6)
    np.testing.assert_allclose(actual.sum(), 1, rtol=1e-6)
    chex.assert_type(actual, jnp.float32)

  @chex.variants(with_jit=True, without_jit=True)
  def test_empty_window_counts_zero(self):
    probabilities = self.variant(PROBABILITIES, static_argnames="config")
    # With one right outcome, at level 5, the gaps are 1 1 1 1 0.
    state = curriculum.record(
      at(0), np.array([5]), np.array([1]), np.array([True]), config=CONFIG
    )
    np.testing.assert_array_equal(curriculum.accuracies(state), [0, 0, 0, 0, 1])
    np.testing.assert_allclose(
      probabilities(state, config=CONFIG),
      [0.22, 0.22, 0.22, 0.22, 0.12],
      atol=1e-6,
    )


def schedule(config, *, skewed=False):
  """Returns (budgets of two groups, scaffold) for every rollout of a run."""
  accuracies = [1] + [0] * (config.max_budget - 1) if skewed else None
  state, out = at(0, config=config, accuracies=accuracies), []
  nothing = np.zeros(2, np.int32), np.zeros(2, np.int32), np.zeros(2, bool)
  for _ in range(config.total_steps // config.steps_per_rollout):
    assigned = curriculum.assign(state, num_groups=2, config=config)
    out.append((np.asarray(assigned.budgets).tolist(), bool(assigned.scaffold)))
    state = curriculum.record(state, *nothing, config=config)
  assert state.step == config.total_steps
  return out


def test_annealing_drops_at_steps_20_40_60_80():
  run = schedule(CONFIG)
  assert len(run) == 100
  expected = [5] * 4 + [4] * 4 + [3] * 4 + [2] * 4 + [1] * 4
  assert run[:20] == [([b, b], True) for b in expected]
  assert not any(scaffold for _, scaffold in run[20:])
  drawn = {b for budgets, _ in run[20:] for b in budgets}
  assert drawn == {1, 2, 3, 4, 5}


def test_phase2_only():
  config = dataclasses.replace(CONFIG, phase1_steps=0, uniform_mix=0.0)
  # Level 1 is always right, so it is never drawn after the uniform start.
  run = schedule(config, skewed=True)
  assert not any(scaffold for _, scaffold in run)
  assert 1 not in {b for budgets, _ in run[1:] for b in budgets}
  first = curriculum.assign(
    at(0, config=config, accuracies=[1, 0, 0, 0, 0]),
    num_groups=100,
    config=config,
  )
  assert 1 in first.budgets


@pytest.mark.parametrize(
  ("phase1", "phase2"), [(False, False), (True, True), (False, True)]
)
def test_scaffold_flags(phase1, phase2):
  config = dataclasses.replace(
    CONFIG, phase1_scaffold=phase1, phase2_scaffold=phase2
  )
  flags = [scaffold for _, scaffold in schedule(config)]
  assert flags == [phase1] * 20 + [phase2] * 80


@pytest.mark.parametrize("budget", [0, 3, 7])
def test_fixed_budget(budget):
  config = dataclasses.replace(CONFIG, fixed_budget=budget)
  fixed = [budget, budget]
  assert schedule(config) == [(fixed, True)] * 20 + [(fixed, False)] * 80


class DrawsTest(chex.TestCase):
  @chex.variants(with_jit=True, without_jit=True)
  @parameterized.parameters((100, True), (105, False), (495, False))
  def test_frequencies(self, step, uniform):
    """The first Phase II rollout is uniform, later ones follow Eq. 4."""
    assign = self.variant(
      curriculum.assign.__wrapped__, static_argnames=("num_groups", "config")
    )
    state = at(step, accuracies=(0.2, 0.4, 0.6, 0.8, 1.0), seed=7)
    draws = 20_000
    budgets, *_ = assign(state, num_groups=draws, config=CONFIG)
    chex.assert_shape(budgets, (draws,))
    chex.assert_type(budgets, jnp.int32)
    p = np.array([0.2] * 5 if uniform else [0.28, 0.24, 0.20, 0.16, 0.12])
    np.testing.assert_allclose(
      curriculum.distribution(state, config=CONFIG), p, atol=1e-6
    )
    frequencies = np.bincount(budgets, minlength=7)[1:6] / draws
    sigma = np.sqrt(p * (1 - p) / draws)
    np.testing.assert_array_less(np.abs(frequencies - p), 5 * sigma)
    assert frequencies.sum() == pytest.approx(1)

  def test_addressed_by_seed_and_rollout(self):
    draw = functools.partial(curriculum.assign, num_groups=64, config=CONFIG)
    budgets = [
      draw(at(step, seed=seed)).budgets.tolist()
      for seed, step in ((0, 105), (0, 105), (0, 110), (1, 105))
    ]
    assert budgets[0] == budgets[1]
    assert budgets[0] != budgets[2]
    assert budgets[0] != budgets[3]


def simulate(state, rollouts, *, assign, record):
  """Plays a run whose policy is right more often with a larger budget."""
  seen = []
  for _ in range(rollouts):
    rng = np.random.default_rng((3, int(state.step)))
    budgets, *_ = assign(state, num_groups=16, config=CONFIG)
    budgets = np.repeat(np.asarray(budgets), 5)
    em = rng.random(len(budgets)) < budgets / 6
    valid = rng.random(len(budgets)) < 0.9
    state = record(state, budgets, em, valid, config=CONFIG)
    seen.append((budgets, em, valid))
  return state, seen


def test_a_whole_run_compiles_once_and_follows_the_equations():
  chex.clear_trace_counter()
  assign = jax.jit(
    chex.assert_max_traces(curriculum.assign.__wrapped__, 1),
    static_argnames=("num_groups", "config"),
  )
  record = jax.jit(
    chex.assert_max_traces(curriculum.record.__wrapped__, 1),
    static_argnames="config",
  )
  state, seen = simulate(
    curriculum.init(CONFIG, 0), 100, assign=assign, record=record
  )
  oracle = oracles.Windows(CONFIG)
  for call in seen:
    oracle.record(*call)
  assert [held(state, b) for b in range(1, 6)] == [
    list(w) for w in oracle.held.values()
  ]
  np.testing.assert_allclose(
    curriculum.probabilities(state, config=CONFIG),
    oracle.probabilities(),
    atol=1e-6,
  )
  assert state.step == 500


# Windows: the last outcomes of each level.

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


# Budgets in other units than searches.

FOUR = dataclasses.replace(CONFIG, max_budget=4, phase1_steps=80)
PAIRS = dataclasses.replace(FOUR, token_levels=(64, 128))


def levels_of(assigned):
  """Returns the pair of caps of each group."""
  return list(zip(assigned.budgets.tolist(), assigned.tokens.tolist()))


def test_levels_anneal_together_from_the_largest():
  seen = []
  for step in range(0, PAIRS.phase1_steps, PAIRS.steps_per_rollout):
    found = curriculum.assign(
      at(step, config=PAIRS), num_groups=2, config=PAIRS
    )
    first, second = levels_of(found)
    assert first == second
    seen.append(first)
  assert [*dict.fromkeys(seen)] == [(4, 128), (3, 128), (2, 64), (1, 64)]


def test_levels_are_recorded_and_drawn_as_the_oracle_says():
  rng, config = np.random.default_rng(5), PAIRS
  state, oracle = curriculum.init(config, 0), oracles.Windows(config)
  for _ in range(4):
    drawn = outcomes(rng, 60)
    tokens = rng.choice(config.token_levels, 60).astype(np.int32)
    state = curriculum.record(state, *drawn, config=config, tokens=tokens)
    oracle.record(*drawn, tokens)
    np.testing.assert_allclose(
      curriculum.probabilities(state, config=config),
      oracle.probabilities(),
      atol=1e-6,
    )
  state = state._replace(step=jnp.int32(config.phase1_steps + 5))
  found = curriculum.assign(state, num_groups=60_000, config=config)
  drawn = Counter(levels_of(found))
  assert drawn.keys() == {*oracle.held}
  shares = [drawn[level] / 60_000 for level in oracle.held]
  np.testing.assert_allclose(shares, oracle.probabilities(), atol=0.01)


def test_one_token_level_draws_the_budgets_of_none():
  one = dataclasses.replace(CONFIG, token_levels=(99,))
  for step in (0, 100, 150):
    plain, paired = (
      curriculum.assign(
        curriculum.init(config, 3)._replace(step=jnp.int32(step)),
        num_groups=50,
        config=config,
      )
      for config in (CONFIG, one)
    )
    np.testing.assert_array_equal(plain.budgets, paired.budgets)
    assert plain.tokens is None and set(paired.tokens.tolist()) == {99}
