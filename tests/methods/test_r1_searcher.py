"""R1-Searcher's two stages: tables by hand, and malformed responses."""

from __future__ import annotations

import chex
import numpy as np
import pytest
import spoken

from anysearch_jax import types
from anysearch_jax.config import methods as config_methods
from anysearch_jax.methods import outcomes as outcomes_lib
from anysearch_jax.methods import r1_searcher

CONFIG = config_methods.R1SearcherConfig()
UNJITTED = r1_searcher.reward.__wrapped__
QUESTION = types.Question("q", "which?", ("Tol",))
FOUND = (spoken.passage("1", "Tol", "\u4e2d <answer>x</answer>"),)
# Holds an accepted answer, well formed, searches, F1 -> stage 1, stage 2.
TABLE = [
  (1, 1, 2, 1.0, 2.0, 1.0),
  (1, 1, 0, 0.5, 1.5, 0.5),
  (1, 0, 1, 0.5, 1.0, -1.5),
  (0, 1, 1, 0.0, 0.0, 0.0),
  (0, 1, 0, 0.2, -0.5, 0.2),
  (0, 0, 3, 0.0, -1.0, -2.0),
]


def at(step, total=100):
  return outcomes_lib.Progress(step // 5, step, total)


class RewardTest(chex.TestCase):
  @chex.variants(with_jit=True, without_jit=True)
  def test_each_stage_equals_its_table(self):
    reward = self.variant(UNJITTED, static_argnames="config")
    contained, formed, searches, f1, first, second = np.array(TABLE).T
    told = spoken.outcomes(
      f1 == 1,
      f1=f1,
      searches=searches,
      measures={"contained": contained, "well_formed": formed},
    )
    for step, stage, total in (
      (0, 1, first),
      (15, 1, first),
      (16, 2, second),
      (95, 2, second),
    ):
      out = reward(told._replace(progress=at(step)), config=CONFIG)
      np.testing.assert_allclose(out["total"], total, atol=1e-6)
      np.testing.assert_array_equal(out["stage"], [stage] * len(TABLE))
      chex.assert_type(list(out.values()), np.float32)

  @chex.variants(with_jit=True, without_jit=True)
  def test_failed_trajectories_have_no_reward(self):
    reward = self.variant(UNJITTED, static_argnames="config")
    names = ("contained", "well_formed")
    told = spoken.drawn(np.random.default_rng(0), 50, 5, *names)
    told = told._replace(progress=at(50))
    out = reward(told, config=CONFIG)
    assert not np.asarray(out["total"])[~told.valid].any()
    chex.assert_trees_all_equal(
      out, reward(spoken.spoiled(told), config=CONFIG)
    )


def form(*turns):
  played = spoken.trajectory(QUESTION, *turns)
  return r1_searcher.measure(played)["well_formed"]


ANSWER = ("<think>so</think><answer>Tol</answer>", None)
SEARCH = ("<think>t</think><search>q</search>", FOUND)


def test_form_needs_closed_tags_answered_searches_and_a_short_answer():
  assert form(ANSWER) == form(SEARCH, ANSWER) == 1
  assert form(("<answer>Tol</answer>", None)) == 0
  assert form(("<think>so<answer>Tol</answer>", None)) == 0
  assert form(("<think>t</think><search>q</search>", "None left."), ANSWER) == 0
  assert form((ANSWER[0] + ANSWER[0], None)) == 0
  assert form((f"<think>t</think><answer>{'a ' * 11}</answer>", None)) == 0
  assert form((f"<think>t</think><answer>{'a ' * 10}</answer>", None)) == 1
  assert form(("<think>\u4e2d</think><answer>Tol</answer>", None)) == 0
  assert form(("<think>t</think>", None)) == 0


@pytest.mark.parametrize("answer", ["Tol", "the river Tol", "Bath"])
def test_an_answer_that_holds_an_accepted_one_is_known(answer):
  played = spoken.trajectory(QUESTION, (f"<answer>{answer}</answer>", None))
  contained = r1_searcher.measure(played)["contained"]
  assert contained == (answer != "Bath")
