"""Search-R1's reward: exact match, its variant's table, retrieved answers."""

from __future__ import annotations

import chex
import numpy as np
import pytest
import spoken
from absl.testing import parameterized

from anysearch_jax import types
from anysearch_jax.config import methods as config_methods
from anysearch_jax.methods import search_r1

PLAIN = config_methods.SearchR1Config()
VARIANT = config_methods.SearchR1Config(format_variant=True, retrieval=0.1)
UNJITTED = search_r1.reward.__wrapped__
# Right, well formed, answered, found -> reward.
TABLE = [
  (1, 1, 1, 0, 1.0),
  (1, 1, 1, 1, 1.0),
  (1, 0, 1, 1, 0.8),
  (0, 1, 1, 1, 0.3),
  (0, 1, 1, 0, 0.2),
  (0, 0, 1, 1, 0.1),
  (0, 0, 1, 0, 0.1),
  (0, 0, 0, 1, 0.0),
  (0, 0, 0, 0, 0.0),
]


class RewardTest(chex.TestCase):
  @chex.variants(with_jit=True, without_jit=True)
  def test_variant_rewards_equal_the_released_table(self):
    reward = self.variant(UNJITTED, static_argnames="config")
    em, format_, answered, found, total = np.array(TABLE).T
    told = spoken.outcomes(
      em, format=format_, answered=answered, measures={"gold_found": found}
    )
    out = reward(told, config=VARIANT)
    np.testing.assert_allclose(out["total"], total, atol=1e-7)
    np.testing.assert_array_equal(out["gold_found"], found)
    chex.assert_type(list(out.values()), np.float32)

  @chex.variants(with_jit=True, without_jit=True)
  def test_the_plain_reward_is_exact_match_and_needs_no_measure(self):
    reward = self.variant(UNJITTED, static_argnames="config")
    em, format_, answered, *_ = np.array(TABLE).T
    told = spoken.outcomes(em, format=format_, answered=answered)
    out = reward(told, config=PLAIN)
    assert set(out) == {"em", "total"}
    np.testing.assert_array_equal(out["total"], em)

  @parameterized.parameters(PLAIN, VARIANT)
  def test_failed_episode_has_zero_reward(self, c):
    told = spoken.drawn(np.random.default_rng(0), 200, 5, "gold_found")
    assert not told.valid.all()
    out = search_r1.reward(told, config=c)
    spoiled = search_r1.reward(spoken.spoiled(told), config=c)
    chex.assert_trees_all_equal(out, spoiled)
    for value in out.values():
      assert not np.asarray(value)[~told.valid].any()


@pytest.mark.parametrize(
  ("answers", "text", "found"),
  [
    (("The Tol River",), "It is the Tol, river of the north.", 1),
    (("Tol River",), "A tributary of the tol-river", 0),
    (("art",), "a party", 0),
    (("art", "party"), "a party", 1),
    (("no",), "Yes.", 0),
    (("the",), "the", 0),
  ],
)
def test_answer_is_found_as_whole_words_after_normalisation(
  answers, text, found
):
  played = spoken.trajectory(
    types.Question("q", "which?", answers),
    ("<search>x</search>", (spoken.passage("1", "Rivers", text),)),
    ("<answer>?</answer>", None),
  )
  assert search_r1.measure(played) == {"gold_found": found}


def test_model_text_and_empty_results_are_not_passages():
  # An empty result has the text "No results found."
  played = spoken.trajectory(
    types.Question("q", "which?", ("No", "Tol")),
    ("<search>x</search>", ()),
    ("<information>Doc 1(Title: Tol) Tol</information>", "Tol, no?\n"),
    ("<answer>Tol</answer>", None),
  )
  assert search_r1.measure(played) == {"gold_found": 0}


def test_title_is_part_of_a_passage():
  played = spoken.trajectory(
    types.Question("q", "which?", ("Tol",)),
    ("<search>x</search>", (spoken.passage("1", "Bath", "A city."),)),
    ("<search>y</search>", (spoken.passage("2", '"Tol (river)"', "Long."),)),
    ("<answer>?</answer>", None),
  )
  assert search_r1.measure(played) == {"gold_found": 1}
