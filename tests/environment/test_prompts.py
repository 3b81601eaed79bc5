"""Tests that the paper's prompts are verbatim and are filled as plain text."""

from __future__ import annotations

import hashlib

import pytest

from anysearch_jax.environment import prompts

PAPER = prompts.PROMPTS["paper"]


@pytest.mark.parametrize(
  ("text", "length", "digest"),
  [
    (
      PAPER.scaffold,
      2095,
      "8d1661e6772a078cbd6d6b40313118b5f9ce14e306e10c54f97a0d416a96ebfb",
    ),
    (
      PAPER.plain,
      1001,
      "72a05d61813ac57959052ba75ec6be77dac16b3bbee3d0ba227053b3e544e7a0",
    ),
  ],
  ids=["scaffold", "plain"],
)
def test_the_papers_prompts_are_verbatim(text, length, digest):
  assert len(text) == length
  assert hashlib.sha256(text.encode()).hexdigest() == digest


def test_render_fills_both_slots():
  world = prompts.PROMPTS["world"]
  assert (
    prompts.render(world.scaffold, budget=3, question="kelmar river ?")
    == "guide budget 3 question kelmar river ?"
  )
  assert (
    prompts.render(world.plain, budget=0, question="kelmar river ?")
    == "budget 0 question kelmar river ?"
  )
  rendered = prompts.render(PAPER.plain, budget=8, question="Who?")
  assert "a total of 8 searches" in rendered
  assert rendered.endswith("Now, answer the following question:\nWho?")


def test_a_negative_budget_is_refused():
  with pytest.raises(ValueError, match=r"budget of -1 searches; expected 0"):
    prompts.render(PAPER.plain, budget=-1, question="Who?")
