"""Tests that the planner's constants are those that its benchmark fits."""

from __future__ import annotations

import pytest

from anysearch_jax.planning import targets
from bench import published

STEPS = published.read()


def test_constants_are_recovered_from_steps_that_obey_them():
  constants = targets.Efficiency(
    products=0.7, attention=0.4, memory=0.8, passes=7.0
  )
  obeying = [step._replace(seconds=step.predicted(constants)) for step in STEPS]
  fitted_constants = published.fit(obeying, targets.ASSUMED)
  assert fitted_constants == pytest.approx(constants)
  assert published.passes_of(obeying[0], constants) == pytest.approx(7.0)


def test_the_assumed_constants_are_the_fitted_ones():
  fitted, held_out = published.halves(STEPS)
  assert not set(fitted) & set(held_out)
  assert len(fitted) + len(held_out) == len(STEPS)
  fitted_constants = published.fit(fitted, targets.PRIME_RL)
  assert fitted_constants == pytest.approx(targets.PRIME_RL, rel=0.01)
  on_h100 = next(step for step in STEPS if step.source == "MaxText")
  assert published.passes_of(on_h100, targets.MAXTEXT) == pytest.approx(
    targets.MAXTEXT.passes, rel=0.01
  )


def test_most_held_out_steps_are_within_a_fifth():
  _, held_out = published.halves(STEPS)
  ratios = [
    step.predicted(targets.PRIME_RL) / step.seconds
    for step in held_out
    if step.source == "prime-rl" and step.device != "b200"
  ]
  assert len(ratios) == 12
  assert sum(abs(ratio - 1) <= 0.2 for ratio in ratios) == 11


def test_a_token_of_a_published_row_sees_half_of_it():
  step = next(x for x in STEPS if x.policy == "Qwen3-4B" and x.row == 16384)
  a = step.architecture
  # A forward pass, its repetition, and twice that for gradients.
  pairs = 2 * 16384 * 8192
  assert step.operations.attention == 4 * 4 * a.layers * 32 * 128 * pairs


def test_whole_steps_of_others_take_longer_than_their_plan():
  ratios = [x.seconds / x.predicted() for x in published.ROLLOUTS]
  # docs/will_it_fit.md and the plan's assumptions state this range.
  assert min(ratios) == pytest.approx(2.4, abs=0.05)
  assert max(ratios) == pytest.approx(3.7, abs=0.05)
