"""Budgets of cents alone as levels of the curriculum."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from curriculum_states import CONFIG as CURRICULUM

from anysearch_jax.algorithms import curriculum
from anysearch_jax.training import validation

CENTS = (1, 3, 8, 20)
CONFIG = dataclasses.replace(
  CURRICULUM, max_budget=4, phase1_steps=80, cent_levels=CENTS
)
# The same levels as numbers of searches.
PLAIN = dataclasses.replace(CONFIG, cent_levels=())


def test_levels_anneal_from_the_largest_cap():
  seen = []
  for step in range(0, CONFIG.phase1_steps, CONFIG.steps_per_rollout):
    state = curriculum.init(CONFIG, 0)._replace(step=jnp.int32(step))
    found = curriculum.assign(state, num_groups=3, config=CONFIG)
    assert len({*found.cents.tolist()}) == 1 and found.tokens is None
    seen.append((int(found.budgets[0]), int(found.cents[0])))
  assert list(dict.fromkeys(seen)) == [(4, 20), (3, 8), (2, 3), (1, 1)]


def test_levels_are_recorded_and_drawn_as_the_oracle_says():
  rng = np.random.default_rng(3)
  state, oracle = curriculum.init(CONFIG, 0), oracles.Windows(PLAIN)
  for _ in range(4):
    drawn = (
      rng.integers(1, 5, 60).astype(np.int32),
      rng.integers(0, 2, 60),
      rng.random(60) < 0.8,
    )
    state = curriculum.record(state, *drawn, config=CONFIG)
    oracle.record(*drawn)
    np.testing.assert_allclose(
      curriculum.probabilities(state, config=CONFIG),
      oracle.probabilities(),
      atol=1e-6,
    )
  state = state._replace(step=jnp.int32(CONFIG.phase1_steps + 5))
  found = curriculum.assign(state, num_groups=60_000, config=CONFIG)
  assert {*zip(found.budgets.tolist(), found.cents.tolist())} == {
    *enumerate(CENTS, 1)
  }
  shares = [np.mean(np.asarray(found.cents) == cents) for cents in CENTS]
  np.testing.assert_allclose(shares, oracle.probabilities(), atol=0.01)


@pytest.mark.parametrize(
  "changes, words",
  [
    ({"cent_levels": (1, 8, 3, 20)}, "expected ascending"),
    ({"cent_levels": (1, 3, 8)}, "3 cent_levels and a max_budget of 4"),
    ({"token_levels": (9, 16)}, "one of the three"),
    ({"fixed_budget": 2}, "one of the three"),
  ],
)
def test_levels_that_do_not_fit_are_refused(changes, words):
  with pytest.raises(ValueError, match=words):
    validation._curriculum(dataclasses.replace(CONFIG, **changes))
