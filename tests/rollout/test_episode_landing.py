"""The episode asks for the answer while there is room for one."""

from __future__ import annotations

import dataclasses

import hypothesis
import hypothesis.strategies as st
import pytest
import scripted
from played_episode import (
  CONFIG,
  EMMA,
  FOUND,
  begin,
  length_of_prompt,
  play,
  searches,
  transcript,
)
from scripted import CODEC, answer, search

from anysearch_jax import types
from anysearch_jax.environment import prompts
from anysearch_jax.rollout import episode, episode_state

LINE = prompts.PROMPTS["paper"].over_budget
ROOM = 40


def config(*, generated=500, context=5000):
  return dataclasses.replace(
    CONFIG, max_generated=generated, max_context=context, answer_room=ROOM
  )


def test_long_turn_is_followed_by_the_answer_in_the_room_that_was_kept():
  most = 20 + ROOM + len(LINE)
  trajectory, asked = play(
    "x" * 99, answer("Jane"), config=config(generated=most)
  )
  assert [each.max_tokens for each in asked] == [20, most - 20]
  assert transcript(trajectory) == [
    "M " + "x" * 20,
    "E " + LINE,
    "M " + answer("Jane"),
  ]
  assert trajectory.outcome is types.Outcome.ANSWERED
  scripted.check_alignment(trajectory)


def test_observation_without_room_is_left_out_and_the_answer_asked_for():
  said = len(search("a"))
  most = length_of_prompt() + said + len(CODEC.encode(FOUND)) + ROOM
  trajectory, asked = play(
    search("a"), answer("Jane"), hits=(EMMA,), config=config(context=most)
  )
  assert trajectory.searches == len(searches(asked)) == 1
  assert transcript(trajectory)[1:] == ["E " + LINE, "M " + answer("Jane")]
  assert trajectory.outcome is types.Outcome.ANSWERED


def test_observation_that_is_longer_than_the_context_is_left_out_as_well():
  most = length_of_prompt() + len(search("a")) + len(LINE) + ROOM + 1
  long = types.Passage("1", "Emma", "word " * most)
  trajectory, _ = play(
    search("a"), answer("Jane"), hits=(long,), config=config(context=most)
  )
  assert transcript(trajectory)[1:] == ["E " + LINE, "M " + answer("Jane")]
  assert trajectory.outcome is types.Outcome.ANSWERED


@pytest.mark.parametrize("last", ["y" * 99, search("b"), "nothing"])
def test_no_answer_after_the_line_is_truncated_with_a_reason(last):
  trajectory, asked = play(
    "x" * 300, last, config=config(generated=30 + ROOM + len(LINE))
  )
  assert trajectory.outcome is types.Outcome.TRUNCATED
  assert "answer" in trajectory.reason
  assert not searches(asked)


def test_episode_that_ends_in_time_is_as_without_the_room():
  turns = (search("a"), answer("Jane"))
  plain, _ = play(*turns, hits=(EMMA,))
  kept, _ = play(*turns, hits=(EMMA,), config=config())
  assert kept.token_ids.tolist() == plain.token_ids.tolist()
  assert transcript(kept) == transcript(plain)


def test_prompt_that_leaves_less_than_the_room_gets_all_of_it():
  most = length_of_prompt() + ROOM // 2
  _, asked = play(answer("J"), config=config(context=most))
  assert [each.max_tokens for each in asked] == [ROOM // 2]


@pytest.mark.parametrize("searching", [False, True])
def test_landing_replaces_the_turn_or_search_that_was_waited_for(searching):
  state, request = begin()
  if searching:
    state, _ = episode.step(state, scripted.turn(request, search("a")))
  state, request = episode.land(state)
  assert CODEC.decode(request.token_ids).endswith(LINE)
  state, request = episode.step(state, scripted.turn(request, answer("Jane")))
  assert request.trajectory.outcome is types.Outcome.ANSWERED
  assert request.trajectory.searches == 0


def test_second_landing_ends_the_episode():
  state, _ = begin()
  state, _ = episode.land(state)
  _, request = episode.land(state)
  assert isinstance(request, episode_state.Done)
  assert request.trajectory.outcome is types.Outcome.TRUNCATED


@hypothesis.given(
  turns=st.lists(
    st.one_of(
      st.integers(0, 120).map(lambda n: "x" * n),
      st.integers(0, 60).map(lambda n: search("q" * n)),
      st.just(answer("Jane")),
    ),
    min_size=1,
    max_size=6,
  ),
  generated=st.integers(1, 300),
  context=st.integers(0, 500),
  room=st.integers(0, 60),
  budget=st.integers(0, 3),
  scaffold=st.booleans(),
)
def test_limits_hold_and_whoever_answers_when_asked_is_answered(
  turns, generated, context, room, budget, scaffold
):
  limits = dataclasses.replace(
    CONFIG,
    max_generated=generated,
    max_context=length_of_prompt(budget, scaffold) + context,
    answer_room=room,
  )
  state, request = begin(config=limits, budget=budget, scaffold=scaffold)
  # A prompt that leaves less than the room gets all of it.
  kept = not isinstance(request, episode_state.Done) and (
    request.max_tokens < state.most_tokens
  )
  script, landed = iter(turns), False
  while not isinstance(request, episode_state.Done):
    if isinstance(request, types.SearchRequest):
      event = episode_state.Retrieved((EMMA,))
    else:
      landed = state.landing
      text = answer("J") if landed else next(script, answer("Jane"))
      event = scripted.turn(request, text)
    state, request = episode.step(state, event)
  trajectory = request.trajectory
  assert trajectory.searches <= budget
  assert trajectory.generated_tokens <= generated
  assert len(trajectory.token_ids) <= limits.max_context
  if landed and kept and room >= len(answer("J")):
    assert trajectory.outcome is types.Outcome.ANSWERED
