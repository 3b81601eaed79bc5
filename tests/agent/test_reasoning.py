"""Reasoning told token by token is the reasoning of the whole turn."""

from __future__ import annotations

import hypothesis
import hypothesis.strategies as st
import pytest

from anysearch_jax.agent import events


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
  assert events.of_turn(text) == expected


@hypothesis.given(
  st.lists(
    st.sampled_from(["<think>", "</think>", "a", " ", "é", "😀", "<search>"]),
    max_size=10,
  ).map("".join),
  st.randoms(use_true_random=False),
)
def test_pieces_of_bytes_add_up_to_the_whole(text, draw):
  data, told = list(text.encode()), []
  turn = events.Reasoning(
    lambda ids: bytes(ids).decode(errors="replace"), told.append
  )
  while data:
    size = draw.randint(1, 4)
    turn.add(data[:size])
    del data[:size]
  turn.end(text)
  assert "".join(told) == events.of_turn(text)


@hypothesis.given(st.randoms(use_true_random=False))
def test_pieces_of_an_answer_are_told_if_wanted(draw):
  data = list("<think>a</think>\n<answer>b <c </é></answer>".encode())
  thought: list[str] = []
  drafts: list[str] = []
  turn = events.Reasoning(
    lambda ids: bytes(ids).decode(errors="replace"),
    thought.append,
    drafts.append,
  )
  while data:
    size = draw.randint(1, 4)
    turn.add(data[:size])
    del data[:size]
  assert ("".join(thought).strip(), "".join(drafts)) == ("a", "b <c </é>")


def test_each_token_is_decoded_a_bounded_number_of_times():
  decoded = 0

  def decode(ids):
    nonlocal decoded
    decoded += len(ids)
    return "".join(map(chr, ids))

  turn = events.Reasoning(decode, lambda piece: None)
  for _ in range(1000):
    turn.add(list(b"word"))
  assert decoded <= 3 * 4000


def test_space_between_tokens_is_kept_by_a_tokenizer_that_strips_it():
  words = ["one", "two", "three"]
  told = []
  turn = events.Reasoning(
    lambda ids: " ".join(words[i] for i in ids), told.append
  )
  for i in range(3):
    turn.add([i])
  assert told == ["one", " two", " three"]
