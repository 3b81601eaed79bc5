"""MT-GRPO's rewards of searches and of the outcome, by hand."""

from __future__ import annotations

import chex
import numpy as np
import pytest
import spoken

from anysearch_jax import types
from anysearch_jax.config import methods as config_methods
from anysearch_jax.methods import mt_grpo

CONFIG = config_methods.MtGrpoConfig()
UNJITTED = mt_grpo.reward.__wrapped__
QUESTION = types.Question("q", "which?", ("the Tol", "art"))
RIVER = spoken.passage("1", "Rivers", "It is the tol-river, or Tol.")
PARTY = spoken.passage("2", "Party", "a party")
TITLE = spoken.passage("3", '"Art"', "Some text.")
# Right, holds an accepted answer, well formed -> reward.
TABLE = [
  (1, 1, 1, 1.7),
  (1, 1, 0, 1.5),
  (0, 1, 1, 0.7),
  (0, 0, 1, 0.2),
  (0, 0, 0, 0.0),
]


class RewardTest(chex.TestCase):
  @chex.variants(with_jit=True, without_jit=True)
  def test_outcomes_equal_the_table(self):
    reward = self.variant(UNJITTED, static_argnames="config")
    em, contained, formed, total = np.array(TABLE).T
    told = spoken.outcomes(em, format=formed, measures={"contained": contained})
    out = reward(told, config=CONFIG)
    np.testing.assert_allclose(out["total"], total, atol=1e-6)
    chex.assert_type(list(out.values()), np.float32)

  @chex.variants(with_jit=True, without_jit=True)
  def test_failed_trajectories_have_no_reward(self):
    reward = self.variant(UNJITTED, static_argnames="config")
    told = spoken.drawn(np.random.default_rng(0), 50, 5, "contained")
    out = reward(told, config=CONFIG)
    assert not np.asarray(out["total"])[~told.valid].any()
    chex.assert_trees_all_equal(
      out, reward(spoken.spoiled(told), config=CONFIG)
    )


def test_a_search_earns_more_if_its_passages_hold_the_answer():
  played = spoken.trajectory(
    QUESTION,
    ("<search>a</search>", (PARTY, RIVER)),
    ("<search>b</search>", (PARTY,)),
    ("<search>c</search>", ()),
    ("<search>d</search>", (TITLE,)),
    ("<search>e</search>", "No search is left: art.\n"),
    ("<answer>x</answer>", None),
  )
  found = mt_grpo.steps(played, CONFIG)
  np.testing.assert_allclose(found, [0.7, 0.2, 0.2, 0.7], atol=1e-6)
  assert found.dtype == np.float32


@pytest.mark.parametrize(
  ("answer", "contained"),
  [("the river Tol", 1), ("Tolkien", 0), ("An art!", 1), ("", 0), (None, 0)],
)
def test_an_answer_may_hold_an_accepted_one(answer, contained):
  text = "nothing" if answer is None else f"<answer>{answer}</answer>"
  played = spoken.trajectory(QUESTION, (text, None))
  assert mt_grpo.measure(played) == {"contained": contained}
