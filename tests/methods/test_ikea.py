"""IKEA's reward: its table by hand, and malformed responses."""

from __future__ import annotations

import chex
import numpy as np
import pytest
import spoken

from anysearch_jax import types
from anysearch_jax.config import methods as config_methods
from anysearch_jax.methods import ikea

CONFIG = config_methods.IkeaConfig()
UNJITTED = ikea.reward.__wrapped__
QUESTION = types.Question("q", "which?", ("Tol",))
FOUND = (spoken.passage("1", "Tol", "some (research) [answer] there"),)
# Well formed, right, searches -> reward.
TABLE = [
  (1, 1, 0, 1.6),
  (1, 1, 1, 1.4),
  (1, 1, 2, 1.2),
  (1, 1, 3, 1.0),
  (1, 1, 8, 1.0),
  (1, 0, 0, 0.0),
  (1, 0, 1, 0.05),
  (1, 0, 8, 0.05),
  (0, 1, 0, -1.0),
  (0, 0, 2, -1.0),
]


class RewardTest(chex.TestCase):
  @chex.variants(with_jit=True, without_jit=True)
  def test_rewards_equal_the_papers_table(self):
    reward = self.variant(UNJITTED, static_argnames="config")
    formed, em, searches, total = np.array(TABLE).T
    told = spoken.outcomes(
      em, searches=searches, measures={"well_formed": formed}
    )
    out = reward(told, config=CONFIG)
    np.testing.assert_allclose(out["total"], total, atol=1e-6)
    np.testing.assert_allclose(
      out["kb"], [0.6, 0.4, 0.2, 0, 0, 0, 0, 0, 0, 0], atol=1e-6
    )
    chex.assert_type(list(out.values()), np.float32)

  @chex.variants(with_jit=True, without_jit=True)
  def test_every_case_in_float64(self):
    reward = self.variant(UNJITTED, static_argnames="config")
    told = spoken.drawn(np.random.default_rng(0), 300, 5, "well_formed")
    out = reward(told, config=CONFIG)

    def worth(valid, formed, em, searches):
      if not valid:
        return 0.0
      if not formed:
        return -1.0
      if em:
        return 1 + max(0.6 - 0.2 * searches, 0)
      return 0.05 if searches else 0.0

    np.testing.assert_allclose(
      out["total"],
      np.vectorize(worth)(
        told.valid, told.measures["well_formed"], told.em, told.searches
      ),
      atol=1e-6,
    )
    chex.assert_trees_all_equal(
      out, reward(spoken.spoiled(told), config=CONFIG)
    )


def form(*turns):
  return ikea.measure(spoken.trajectory(QUESTION, *turns))["well_formed"]


THOUGHT = "<think>so (think of it)</think>"


@pytest.mark.parametrize(
  ("formed", "turns"),
  [
    (1, [(f"{THOUGHT}<answer>Tol</answer>", None)]),
    (
      1,
      [
        (f"{THOUGHT}<search>[re]search) it</search>", FOUND),
        (f"{THOUGHT}<search>more</search>", "No search is left.\n"),
        ("<answer>Bath</answer>", None),
      ],
    ),
    (0, []),
    (0, [("<answer>Tol</answer>", None)]),
    (0, [(THOUGHT, "That was no action.\n")] * 2),
    (
      0,
      [
        (THOUGHT, "That was no action.\n"),
        ("<answer>Tol</answer>", None),
      ],
    ),
    (
      0,
      [(f"{THOUGHT}<search> </search>", "?\n"), ("<answer>x</answer>", None)],
    ),
    (0, [(f"{THOUGHT}(search)x(/search)<answer>Tol</answer>", None)]),
    (0, [(f"{THOUGHT}<search]<answer>Tol</answer>", None)]),
    (0, [(f"{THOUGHT}[/answer><answer>Tol</answer>", None)]),
    (0, [("<think>so (/think)<answer>Tol</answer>", None)]),
  ],
)
def test_well_formed_needs_a_thought_and_an_action_in_every_turn(formed, turns):
  assert form(*turns) == formed
