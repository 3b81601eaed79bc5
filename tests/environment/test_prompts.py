"""Tests that the paper's prompts are verbatim and are filled as plain text."""

from __future__ import annotations

import hashlib
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

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


@pytest.mark.parametrize("name", prompts.PROMPTS)
def test_every_prompt_set_has_placeholders_and_tagless_error_lines(name):
  chosen = prompts.PROMPTS[name]
  for template in (chosen.scaffold, chosen.plain):
    assert template.count("{B}") == template.count("{Question}") == 1
    assert template.endswith("{Question}")
  for line in (chosen.over_budget, chosen.no_action):
    assert line.endswith("\n") and len(line.strip().splitlines()) == 1
    assert not re.search("[<>{}]", line)


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


@given(st.text(), st.integers(0, 9))
def test_a_question_is_inserted_unchanged(question, budget):
  question = "{B} \\1 {Question} {0} { } " + question
  rendered = prompts.render(PAPER.scaffold, budget=budget, question=question)
  head = PAPER.scaffold.removesuffix("{Question}")
  assert rendered == head.replace("{B}", str(budget)) + question


def test_a_negative_budget_is_refused():
  with pytest.raises(ValueError, match=r"budget of -1 searches; expected 0"):
    prompts.render(PAPER.plain, budget=-1, question="Who?")
