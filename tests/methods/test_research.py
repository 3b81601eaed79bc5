"""ReSearch's reward: its table by hand, and malformed responses."""

from __future__ import annotations

import dataclasses

import chex
import numpy as np
import pytest
import spoken

from anysearch_jax import types
from anysearch_jax.config import methods as config_methods
from anysearch_jax.methods import research

CONFIG = config_methods.ResearchConfig()
UNJITTED = research.reward.__wrapped__
QUESTION = types.Question("q", "which?", ("Tol",))
FOUND = (spoken.passage("1", "Tol", "a <search> river"),)
# Well formed, with a boxed answer, F1 -> reward.
TABLE = [
  (1, 1, 1.0, 1.0),
  (1, 1, 0.4, 0.4),
  (1, 1, 0.05, 0.05),
  (1, 1, 0.0, 0.1),
  (1, 0, 0.0, 0.0),
  (0, 1, 1.0, 0.0),
  (0, 1, 0.0, 0.0),
]


class RewardTest(chex.TestCase):
  @chex.variants(with_jit=True, without_jit=True)
  def test_rewards_equal_the_table(self):
    reward = self.variant(UNJITTED, static_argnames="config")
    formed, answered, f1, total = np.array(TABLE).T
    told = spoken.outcomes(
      f1 == 1, f1=f1, answered=answered, measures={"well_formed": formed}
    )
    out = reward(told, config=CONFIG)
    np.testing.assert_allclose(out["total"], total, atol=1e-6)
    chex.assert_type(list(out.values()), np.float32)

  @chex.variants(with_jit=True, without_jit=True)
  def test_every_case_in_float64(self):
    reward = self.variant(UNJITTED, static_argnames="config")
    told = spoken.drawn(np.random.default_rng(0), 200, 5, "well_formed")
    out = reward(told, config=CONFIG)
    for place in np.ndindex(told.em.shape):
      formed = told.measures["well_formed"][place] and told.answered[place]
      expected = (float(told.f1[place]) or 0.1) if formed else 0.0
      expected *= bool(told.valid[place])
      assert out["total"][place] == pytest.approx(expected, abs=1e-6)
    chex.assert_trees_all_equal(
      out, reward(spoken.spoiled(told), config=CONFIG)
    )


def form(*turns, outcome=types.Outcome.ANSWERED):
  played = spoken.trajectory(QUESTION, *turns)
  played = dataclasses.replace(played, outcome=outcome)
  return research.measure(played)["well_formed"]


ANSWER = (r"<think>so</think><answer>\boxed{Tol}</answer>", None)
SEARCH = ("<think>t</think><search>q</search>", FOUND)


def test_form_needs_closed_thoughts_answered_searches_and_one_answer():
  assert form(ANSWER) == form(SEARCH, SEARCH, ANSWER) == 1
  assert form(("<answer>Tol</answer>", None)) == 0
  assert form(("<think>so<answer>Tol</answer>", None)) == 0
  assert form(("<think>t</think><search>q</search>", "None left."), ANSWER) == 0
  assert form(("<think>t</think><search>q", "No action."), ANSWER) == 0
  assert form((ANSWER[0] + "<answer>x</answer>", None)) == 0
  assert form(SEARCH, outcome=types.Outcome.TRUNCATED) == 0
  # A turn without an action is only text.
  assert form(("Hm.", "No action."), ANSWER) == 1


@pytest.mark.parametrize(
  ("text", "expected"),
  [
    (r"<answer>It is \boxed{a {b} c}.</answer>", "a {b} c"),
    (r"<answer>\boxed{}</answer>", ""),
    (r"\boxed{a}<answer>b</answer>", None),
    (r"<answer>\boxed{a", None),
  ],
)
def test_the_answer_is_the_box_of_the_answer_block(text, expected):
  assert research.answer([types.Span(types.Author.MODEL, text)]) == expected
