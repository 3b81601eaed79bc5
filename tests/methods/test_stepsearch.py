"""StepSearch's rewards: the outcome, and a search's gain and redundancy."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import spoken
from sklearn.feature_extraction.text import TfidfVectorizer

from anysearch_jax import types
from anysearch_jax.methods import stepsearch

CONFIG = stepsearch.Options()
# Gain minus redundancy, with a scale of 1.
BARE = dataclasses.replace(CONFIG, step_scale=1.0)
QUESTION = types.Question(
  "q",
  "Where was the author of Emma born?",
  ("Steventon",),
  metadata={
    "supporting": [
      {"title": "Emma", "text": "Austen"},
      {"title": "Austen", "text": "Steventon"},
    ],
    "search_keys": [["Emma author", "who wrote Emma"], ["Austen born"]],
  },
)
EMMA = spoken.passage("1", "Emma", "Austen")
BORN = spoken.passage("2", "Austen", "Steventon")
BATH = spoken.passage("3", "Bath", "city")
ANSWER = ("<answer>Steventon</answer>", None)


def search(query, *found):
  return f"<search>{query}</search>", found


def test_gain_and_redundancy_by_hand():
  """A passage is compared with the golds `emma austen`, `austen steventon`.

  A word in all three texts has the weight 1, in two 1 + ln(4/3), in one
  1 + ln 2. The cosine of a gold passage is 1 with itself, and with the other
      1 / (|1, 1 + ln(4/3)| |1, 1 + ln 2|) = 0.3119.
  """
  alike = (
    1 / math.hypot(1, 1 + math.log(4 / 3)) / math.hypot(1, 1 + math.log(2))
  )
  assert alike == pytest.approx(0.3119, abs=1e-4)
  played = spoken.trajectory(
    QUESTION,
    search("who wrote Emma", EMMA, BATH),
    search("Austen born", EMMA, BORN),
    search("nothing of the kind"),
    search("Austen born", BORN, EMMA),
    ANSWER,
  )
  gain = [(1 + alike) / 2, (1 - alike) / 2, 0, 0]
  redundancy = [0, 1 / 2, 0, 1]
  out = stepsearch.steps(played, CONFIG)
  np.testing.assert_allclose(
    out, 0.6 * (np.array(gain) - redundancy), atol=1e-6
  )
  assert out.dtype == np.float32


def test_passages_are_identified_by_id():
  played = spoken.trajectory(
    QUESTION,
    search("x", BATH),
    search("y", dataclasses.replace(BATH, id="4")),
    search("z", dataclasses.replace(EMMA, id="3")),
    ANSWER,
  )
  out = stepsearch.steps(played, BARE)
  assert out[:2].tolist() == [0, 0]
  # The text is new, so there is a gain; the id is not, so it is redundant.
  assert out[2] == pytest.approx((1 + 0.3119) / 2 - 1, abs=1e-4)


def test_step_rewards_are_zero_without_an_answer():
  turns = [search("x", EMMA), search("y", EMMA)]
  assert stepsearch.steps(
    spoken.trajectory(QUESTION, *turns), CONFIG
  ).tolist() == [0, 0]
  quoted = dataclasses.replace(EMMA, text="<answer>Steventon</answer>")
  turns = [search("x", quoted), ("<think>?</think>", "Say something.\n")]
  assert stepsearch.steps(
    spoken.trajectory(QUESTION, *turns), CONFIG
  ).tolist() == [0]


def test_over_budget_searches_have_no_step_reward():
  played = spoken.trajectory(
    QUESTION,
    search("x", BATH),
    ("<search>y</search>", "No search is left.\n"),
    search("z", EMMA),
    ("<search>y</search>", "No search is left.\n"),
    ANSWER,
  )
  out = stepsearch.steps(played, BARE)
  assert out.shape == (2,)
  assert out[0] == 0 < out[1]


def keys(*queries):
  played = spoken.trajectory(QUESTION, *(search(q) for q in queries), ANSWER)
  return stepsearch.measure(played)["search_keys"]


def test_a_key_group_keeps_the_best_query():
  assert keys() == 0
  assert keys("who wrote emma?") == 0.5
  assert keys("Austen born", "Emma author") == 1
  # "emma" has F1 2/3 with the group's first key; so has "austen".
  assert keys("Emma", "Austen") == pytest.approx(2 / 3)
  assert keys("Emma author", "Emma") == keys("Emma", "Emma author") == 0.5


@pytest.mark.parametrize(
  ("texts", "plain"),
  [
    (
      ["the river tol, in Bath", "bath b 7 by river", "River-Tol tol", ""],
      ["river tol in bath", "bath b 7 by river", "rivertol tol", ""],
    ),
    (["zz", "été 42 42", "42"], ["zz", "été 42 42", "42"]),
  ],
)
def test_similarities_equal_scikit_learn(texts, plain):
  table = TfidfVectorizer().fit_transform(plain).toarray()
  np.testing.assert_allclose(
    stepsearch.similarities(texts[0], texts[1:]),
    table[1:] @ table[0],
    atol=1e-12,
  )


def test_question_without_evidence_is_rejected():
  bare = dataclasses.replace(QUESTION, metadata={})
  played = spoken.trajectory(bare, ANSWER)
  with pytest.raises(ValueError, match="questions without evidence"):
    stepsearch.steps(played, CONFIG)
  with pytest.raises(ValueError, match="questions without evidence"):
    stepsearch.measure(played)
