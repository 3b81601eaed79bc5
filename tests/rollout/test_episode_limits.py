"""The episode at its limits: generated tokens, context and invalid turns."""

from __future__ import annotations

import dataclasses

import pytest
import scripted
from played_episode import (
  CONFIG,
  EMMA,
  FOUND,
  length_of_prompt,
  play,
  searches,
  transcript,
)
from scripted import CODEC, search

from anysearch_jax import types


def test_a_search_that_uses_the_last_token_is_charged_then_truncated():
  config = dataclasses.replace(CONFIG, max_generated=len(search("a")))
  trajectory, asked = play(search("a"), config=config, scaffold=True)
  assert len(searches(asked)) == trajectory.searches == 1
  assert trajectory.outcome is types.Outcome.TRUNCATED
  assert "max_generated" in trajectory.reason
  assert transcript(trajectory)[1:] == ["M " + search("a")]
  scripted.check_alignment(trajectory)


def test_bad_turn_at_the_generation_limit_truncates_at_once():
  config = dataclasses.replace(CONFIG, max_generated=10)
  trajectory, _ = play("x" * 50, config=config)
  assert trajectory.outcome is types.Outcome.TRUNCATED
  assert "max_generated" in trajectory.reason
  assert transcript(trajectory) == ["M " + "x" * 10]
  assert trajectory.generated_tokens == 10


def test_over_budget_search_at_the_limit_is_truncated_and_a_violation():
  said = tuple(CODEC.encode(search("a")))
  event = types.Generation(
    said,
    (-1.0,) * len(said),
    search("a"),
    types.Finish.LENGTH,
    (0,) * len(said),
  )
  trajectory, asked = play(event, budget=0)
  assert trajectory.outcome is types.Outcome.TRUNCATED
  assert trajectory.violation and not searches(asked)
  assert "The engine stopped turn 0 at" in trajectory.reason


def test_generated_tokens_are_limited_over_all_turns():
  config = dataclasses.replace(CONFIG, max_generated=60)
  trajectory, asked = play(search("a"), "y" * 99, config=config)
  turns = [e for e in asked if isinstance(e, types.GenerateRequest)]
  assert [each.max_tokens for each in turns] == [60, 60 - len(search("a"))]
  assert trajectory.generated_tokens == 60
  assert trajectory.outcome is types.Outcome.TRUNCATED


def test_context_limits_a_turn():
  config = dataclasses.replace(CONFIG, max_context=length_of_prompt() + 5)
  trajectory, asked = play("x" * 50, config=config)
  assert asked[0].max_tokens == 5
  assert len(trajectory.token_ids) == config.max_context
  assert trajectory.outcome is types.Outcome.TRUNCATED
  assert "max_context" in trajectory.reason


@pytest.mark.parametrize("room", [0, 1])
def test_observation_that_fills_the_context_is_not_recorded(room):
  told = len(search("a")) + len(CODEC.encode(FOUND))
  config = dataclasses.replace(
    CONFIG, max_context=length_of_prompt() + told + room
  )
  turns = [search("a"), "!"][: 1 + room]
  trajectory, _ = play(*turns, config=config, hits=(EMMA,))
  assert trajectory.outcome is types.Outcome.TRUNCATED
  assert "max_context" in trajectory.reason
  assert trajectory.searches == 1 and trajectory.queries == ("a",)
  recorded = ["M " + search("a"), "E " + FOUND, "M !"]
  assert transcript(trajectory) == recorded[: 1 + 2 * room]
  scripted.check_alignment(trajectory)


@pytest.mark.parametrize("scaffold", [False, True])
def test_prompt_that_fills_the_context_truncates_without_tokens(scaffold):
  config = dataclasses.replace(
    CONFIG, max_context=length_of_prompt(scaffold=scaffold)
  )
  trajectory, asked = play(config=config, scaffold=scaffold)
  assert trajectory.outcome is types.Outcome.TRUNCATED
  assert "max_context" in trajectory.reason
  assert asked == [] and trajectory.spans == ()
  assert trajectory.token_ids.shape == trajectory.logps.shape == (0,)


@pytest.mark.parametrize(
  "ids, logps, versions", [(0, 0, 0), (501, 501, 501), (2, 1, 2), (2, 2, 1)]
)
def test_generation_that_breaks_its_limits_is_refused(ids, logps, versions):
  event = types.Generation(
    (65,) * ids,
    (-1.0,) * logps,
    "A" * ids,
    types.Finish.LENGTH,
    (3,) * versions,
  )
  with pytest.raises(ValueError, match=f"returned {ids} tokens, {logps}"):
    play(event)
