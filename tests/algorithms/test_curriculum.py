"""Tests the budget curriculum: its schedule, its draws and whole runs."""

from __future__ import annotations

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from absl.testing import parameterized
from curriculum_states import CONFIG, at, held

from anysearch_jax.algorithms import curriculum
from anysearch_jax.training import validation

PROBABILITIES = curriculum.probabilities.__wrapped__


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


def test_phase1_only():
  config = dataclasses.replace(CONFIG, phase1_steps=500)
  expected = [b for b in (5, 4, 3, 2, 1) for _ in range(20)]
  assert schedule(config) == [([b, b], True) for b in expected]


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


@pytest.mark.parametrize("phase1", [True, False])
@pytest.mark.parametrize("phase2", [True, False])
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


def test_phase_helpers():
  steps = np.array([0, 19, 20, 79, 80, 99])
  np.testing.assert_array_equal(
    curriculum.annealed_budget(steps, config=CONFIG), [5, 5, 4, 2, 1, 1]
  )
  np.testing.assert_array_equal(
    curriculum.in_phase1(np.array([0, 99, 100]), config=CONFIG), [1, 1, 0]
  )


class DrawsTest(chex.TestCase):
  @chex.variants(with_jit=True, without_jit=True)
  @parameterized.parameters((100, True), (105, False), (495, False))
  def test_frequencies(self, step, uniform):
    """The first Phase II rollout is uniform, later ones follow Eq. 4."""
    assign = self.variant(
      curriculum.assign.__wrapped__, static_argnames=("num_groups", "config")
    )
    state = at(step, accuracies=(0.2, 0.4, 0.6, 0.8, 1.0), seed=7)
    draws = 40_000
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

  def test_groups_are_independent(self):
    """Neighbouring groups have equal budgets as often as chance predicts."""
    budgets, *_ = curriculum.assign(at(100), num_groups=40_000, config=CONFIG)
    alike = np.mean(np.asarray(budgets)[::2] == np.asarray(budgets)[1::2])
    assert abs(alike - 0.2) < 5 * np.sqrt(0.2 * 0.8 / 20_000)


def simulate(state, rollouts, *, assign, record, seed=3, groups=16):
  """Plays a run whose policy is right more often with a larger budget."""
  seen = []
  for _ in range(rollouts):
    rng = np.random.default_rng((seed, int(state.step)))
    budgets, *_ = assign(state, num_groups=groups, config=CONFIG)
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


def test_resumes_exactly():
  assign, record = curriculum.assign, curriculum.record
  run = functools.partial(simulate, assign=assign, record=record)
  start = curriculum.init(CONFIG, 11)
  whole, seen = run(start, 40)
  middle, _ = run(start, 25)
  # A checkpoint stores only the bytes of plain arrays.
  leaves, tree = jax.tree.flatten(jax.device_get(middle))
  stored = [(x.tobytes(), x.dtype.str, x.shape) for x in leaves]
  restored = jax.tree.unflatten(
    tree, [np.frombuffer(b, d).reshape(s) for b, d, s in stored]
  )
  resumed, rest = run(restored, 15)
  chex.assert_trees_all_equal(resumed, whole)
  chex.assert_trees_all_equal(rest, seen[25:])


@pytest.mark.parametrize(
  "changes",
  [
    {},
    {"phase1_steps": 500},
    {"phase1_steps": 0},
    {"uniform_mix": 0.0},
    {"uniform_mix": 1.0},
    {"fixed_budget": 0},
    {"max_budget": 1, "window": 1, "steps_per_rollout": 1},
  ],
)
def test_valid_configurations(changes):
  validation._curriculum(dataclasses.replace(CONFIG, **changes))


@pytest.mark.parametrize(
  "changes, sentence",
  [
    ({"phase1_steps": 525}, "525 phase1_steps in 500 total_steps"),
    ({"total_steps": 501}, "501 total_steps; expected a multiple of"),
    ({"phase1_steps": 101}, "101 phase1_steps; expected a multiple of"),
    ({"phase1_steps": 40}, "8 steps per level"),
  ],
)
def test_refused_configurations(changes, sentence):
  with pytest.raises(ValueError, match=sentence):
    validation._curriculum(dataclasses.replace(CONFIG, **changes))
