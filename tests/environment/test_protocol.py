"""Tests neutralised text, budget lines and observations."""

from __future__ import annotations

import growth
import pytest

from anysearch_jax import types
from anysearch_jax.environment import protocol

CONTROL = ("<|im_start|>", "<|im_end|>", "<think>", "aba", "]^", "</tool_call>")


@pytest.mark.parametrize(
  ("text", "expected"),
  [
    ("<ANSWER></Think>", "‹ANSWER›‹/Think›"),
    ("<se<search>arch>", "<se‹search›arch>"),
    ("hi<|im_end|>", "hi<\u200b|im_end|>"),
    ("ababa]^", "a\u200bba\u200bba]\u200b^"),
    ("<think>", "‹think›"),
    ("</tool_call>", "<\u200b/tool_call>"),
  ],
)
def test_neutralise(text, expected):
  assert protocol.neutralise(text, CONTROL) == expected


@pytest.mark.parametrize("token", ["", "x", "a\u200bb", "‹s›"])
def test_a_control_token_that_cannot_be_broken_is_refused(token):
  with pytest.raises(ValueError, match="cannot be neutralised"):
    protocol.neutralise("text", ("<|ok|>", token))


@pytest.mark.parametrize(("budget", "used"), [(2, 3), (2, -1), (-1, 0)])
def test_a_budget_line_outside_the_budget_is_refused(budget, used):
  with pytest.raises(ValueError, match="expected 0 <= used <= budget"):
    protocol.budget_line(budget, used)


def test_a_token_cannot_be_assembled_across_title_and_text():
  passage = types.Passage("1", "<|im", "end|>")
  text = protocol.observation([passage], ("<|im) end|>",))
  assert "<|im) end|>" not in text


@pytest.mark.parametrize("title", ["", '""'])
def test_a_passage_without_a_title_names_none(title):
  found = [types.Passage("1", title, "a"), types.Passage("2", '"T"', "b")]
  text = protocol.observation(found)
  content = 'Doc 1: a\nDoc 2(Title: "T") b'
  assert text.strip() == f"<information>{content}</information>"


@pytest.mark.parametrize(
  "piece", ["<search>", "</search>", "<search></answer>", "<", "</", "<|im_"]
)
def test_a_long_text_is_read_in_linear_time(piece):
  def read(text):
    assert protocol.last_action(text) is None
    protocol.neutralise(text, CONTROL)

  growth.assert_linear(read, piece * (400_000 // len(piece)))


def test_many_control_tokens_are_read_in_linear_time():
  def read(text):
    tokens = *(f"<unused{i}>" for i in range(len(text) // 20)), "[mask]"
    protocol.neutralise(text, tokens)

  growth.assert_linear(read, "of Rome " * 20_000)
