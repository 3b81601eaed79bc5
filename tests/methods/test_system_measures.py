"""What the shipped systems measure of a trajectory, besides its scores."""

from __future__ import annotations

import pytest
import scripted
import spoken

from anysearch_jax import types
from anysearch_jax.algorithms import method
from anysearch_jax.methods import systems
from anysearch_jax.rollout import episode_state


def measured(name, *turns, answers=("Tol",)):
  question = types.Question("q", "which?", answers)
  played = spoken.trajectory(question, *turns)
  return systems.get(name).measure(played)


def searched(text, *found):
  return f"<search>{text}</search>", found


@pytest.mark.parametrize(
  ("text", "expected"),
  [("<search>a</search>", 18), ("so <search>a</search>", 18), ("no call", 7)],
)
def test_a_turn_without_the_mark_of_a_call_counts_whole(text, expected):
  ids = tuple(scripted.CODEC.encode(text))
  none = (0.0,) * len(ids)
  turn = episode_state.Chunk(
    types.Author.MODEL, ids, none, (0,) * len(ids), text
  )
  assert episode_state.call_tokens(turn, "<search>", scripted.CODEC) == expected


@pytest.mark.parametrize(
  ("answer", "contained"),
  [("the river Tol", 1), ("Tolkien", 0), ("An art!", 1), ("", 0), (None, 0)],
)
def test_an_answer_may_hold_an_accepted_one(answer, contained):
  text = "nothing" if answer is None else f"<answer>{answer}</answer>"
  question = types.Question("q", "which?", ("the Tol", "art"))
  played = spoken.trajectory(question, (text, None))
  assert method.contained(played) == {"contained": contained}


def shown(text, title="Rivers"):
  return searched("x", spoken.passage("1", title, text))


@pytest.mark.parametrize(
  ("found", "answers", "turns"),
  [
    (1, ("The Tol River",), [shown("It is the Tol, river of the north.")]),
    (0, ("Tol River",), [shown("A tributary of the tol-river")]),
    (0, ("art",), [shown("a party")]),
    (1, ("art", "party"), [shown("a party")]),
    (0, ("no",), [shown("Yes.")]),
    (0, ("the",), [shown("the")]),
    # An empty result has the text "No results found.".
    (0, ("No",), [searched("x")]),
    (0, ("Tol",), [("<information>Doc 1 Tol</information>", "Tol?\n")]),
    # A title is a part of its passage.
    (1, ("Tol",), [shown("A city."), shown("Long.", '"Tol (river)"')]),
  ],
)
def test_search_r1_finds_answers_in_passages_as_whole_words(
  found, answers, turns
):
  turns = *turns, ("<answer>Tol</answer>", None)
  assert measured("search_r1", *turns, answers=answers) == {"gold_found": found}
