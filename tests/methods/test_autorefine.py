"""AutoRefine's reward: its table by hand, and refinements that help."""

from __future__ import annotations

import chex
import numpy as np
import pytest
import spoken

from anysearch_jax import types
from anysearch_jax.config import methods as config_methods
from anysearch_jax.methods import autorefine

CONFIG = config_methods.AutoRefineConfig()
UNJITTED = autorefine.reward.__wrapped__
QUESTION = types.Question("q", "which?", ("the Tol", "art"))
# F1, answered, a refinement helped -> reward.
TABLE = [
  (1.0, 1, 0, 1.0),
  (1.0, 1, 1, 1.0),
  (0.05, 1, 1, 0.05),
  (0.0, 1, 1, 0.1),
  (0.0, 1, 0, 0.0),
  (0.0, 0, 1, 0.0),
]


class RewardTest(chex.TestCase):
  @chex.variants(with_jit=True, without_jit=True)
  def test_rewards_equal_the_table(self):
    reward = self.variant(UNJITTED, static_argnames="config")
    f1, answered, refined, total = np.array(TABLE).T
    told = spoken.outcomes(
      f1 == 1, f1=f1, answered=answered, measures={"refined": refined}
    )
    out = reward(told, config=CONFIG)
    np.testing.assert_allclose(out["total"], total, atol=1e-6)
    chex.assert_type(list(out.values()), np.float32)

  @chex.variants(with_jit=True, without_jit=True)
  def test_every_case_in_float64(self):
    reward = self.variant(UNJITTED, static_argnames="config")
    told = spoken.drawn(np.random.default_rng(0), 200, 5, "refined")
    out = reward(told, config=CONFIG)
    for place in np.ndindex(told.em.shape):
      helped = told.measures["refined"][place] and told.answered[place]
      expected = float(told.f1[place]) or 0.1 * bool(helped)
      expected *= bool(told.valid[place])
      assert out["total"][place] == pytest.approx(expected, abs=1e-6)
    chex.assert_trees_all_equal(
      out, reward(spoken.spoiled(told), config=CONFIG)
    )


@pytest.mark.parametrize(
  ("refined", "said", "shown"),
  [
    (1, "<refine>It is the\nTol.</refine>", "nothing"),
    (1, "<refine>x</refine><refine>an Art</refine>", "nothing"),
    (0, "<refine>a party</refine> Tol", "nothing"),
    (0, "<refine>no</refine><think>Tol</think>", "Tol"),
    (0, "<refine>Tol", "<refine>Tol</refine>"),
    (0, "", "Tol"),
  ],
)
def test_only_refinements_of_the_model_count(refined, said, shown):
  played = spoken.trajectory(
    QUESTION,
    ("<search>x</search>", (spoken.passage("1", "A", shown),)),
    (f"{said}<answer>x</answer>", None),
  )
  assert autorefine.measure(played) == {"refined": refined}


def test_a_refinement_lies_within_one_turn():
  played = spoken.trajectory(
    QUESTION, ("<refine>Tol", "No action."), ("</refine>", None)
  )
  assert autorefine.measure(played) == {"refined": 0}
