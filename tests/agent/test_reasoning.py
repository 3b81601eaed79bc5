"""Reasoning told token by token is the reasoning of the whole turn."""

from __future__ import annotations

import hypothesis
import hypothesis.strategies as st
import pytest

from anysearch_jax.agent import reasoning


@pytest.mark.parametrize(
  "text, expected",
  [
    ("<think>Who?</think>\n<search>emma</search>", "Who?\n"),
    ("<think>a < b</think><answer>c</answer>", "a < b"),
    ("plain", "plain"),
    ("<search>only</search>", ""),
    ("\n <think>a", "a"),
    ("<thinking>a", "<thinking>a"),
  ],
)
def test_reasoning_is_the_text_before_the_action(text, expected):
  assert reasoning.of_turn(text) == expected


def test_unfinished_tag_and_character_wait_for_their_rest():
  told = []
  data = "<think>é</think>x".encode()
  turn = reasoning.Reasoning(
    lambda ids: bytes(ids).decode(errors="replace"), told.append
  )
  for byte in data:
    turn.add([byte])
  assert told == ["é", "x"]


@hypothesis.given(
  st.lists(
    st.sampled_from(
      ["<think>", "</think>", "<search>", "<", "answer>", "a", " ", "é", "<th"]
    ),
    max_size=12,
  ).map("".join)
)
def test_pieces_add_up_to_the_whole(text):
  told = []
  turn = reasoning.Reasoning(lambda ids: "".join(map(chr, ids)), told.append)
  for char in text:
    turn.add([ord(char)])
  turn.end(text)
  assert "".join(told) == reasoning.of_turn(text)
