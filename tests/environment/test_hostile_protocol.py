"""Tests with tags, control tokens and placeholders in untrusted texts."""

from __future__ import annotations

import copy
import json
import pathlib
import re

import growth
import hostile
import hypothesis
import pytest

from anysearch_jax import types
from anysearch_jax.environment import prompts, protocol
from anysearch_jax.policy import tokenizer as tokenizer_lib

ZERO_WIDTH = "\u200b"
# Undoes all that neutralising may do: three replacements of single characters.
UNDONE = str.maketrans({"‹": "<", "›": ">", ZERO_WIDTH: None})


def test_every_hostile_case_has_a_test():
  folder = pathlib.Path(__file__).parents[1]
  sources = [p.read_text() for p in folder.rglob("test_hostile_*.py")]
  drawn = re.findall(r'\bcases\(\s*"([^"]+)"\s*\)', "".join(sources))
  assert sorted(drawn) == sorted(hostile.CASES)
  assert sum(hostile.CASES.values()) >= 100_000


@hostile.cases("an action is read as one pass over the tags reads it")
@hypothesis.given(hostile.tapes())
def test_last_action_equals_a_single_pass_over_the_tags(tape):
  text = tape.pick((tape.text, tape.turn))() + tape.turn() + tape.text(3)
  opened, expected = {}, None
  for tag in re.finditer("<(/?)(search|answer)>", text):
    closes, kind = tag.groups()
    if not closes:
      opened[kind] = tag.end()
    elif kind in opened:
      content = text[opened.pop(kind) : tag.start()].strip()
      expected = protocol.Action(protocol.ActionKind(kind), content)
  assert protocol.last_action(text) == expected


@hostile.cases("neutralised text holds nothing but text")
@hypothesis.given(hostile.tapes())
def test_neutralised_text_has_no_tag_and_no_control_token(tape):
  text = tape.text(20)
  clean = protocol.neutralise(text, hostile.CONTROL)
  folded = clean.casefold()
  assert not any(tag in folded for tag in hostile.TAGS)
  assert not any(token in clean for token in hostile.CONTROL)
  clean.encode()
  assert clean.translate(UNDONE) == hostile.halved(text).translate(UNDONE)
  assert protocol.neutralise(clean, hostile.CONTROL) == clean


@hostile.cases("an observation is one block")
@hypothesis.given(hostile.tapes())
def test_an_observation_is_one_block(tape):
  pairs = tape.some(lambda: (tape.text(6), tape.text()), 3)
  text = protocol.observation(
    [types.Passage(str(i), *pair) for i, pair in enumerate(pairs)],
    hostile.CONTROL,
  )
  assert text.startswith("\n\n<information>")
  assert text.endswith("</information>\n\n")
  tags = re.findall("|".join(hostile.TAGS), text.casefold())
  assert tags == ["<information>", "</information>"]
  assert not any(token in text for token in hostile.CONTROL)
  lines = text.strip().split("\n")
  assert len(lines) == len(text.strip().splitlines()) == max(1, len(pairs))
  for line, pair in zip(lines, pairs):
    for word in hostile.halved(" ".join(pair)).translate(UNDONE).split():
      assert word in line.translate(UNDONE)


@hostile.cases("a question stays a question in its prompt")
@hypothesis.given(hostile.tapes())
def test_a_question_is_inserted_into_its_prompt_unchanged(tape):
  chosen, budget = tape.pick([*prompts.PROMPTS.values()]), tape.below(100)
  question = protocol.neutralise(tape.text(20), hostile.CONTROL)
  for template in (chosen.scaffold, chosen.plain):
    before, slot, after = template.partition("{Question}")
    assert slot and "{B}" in before
    rendered = prompts.render(template, budget=budget, question=question)
    assert rendered == before.replace("{B}", str(budget)) + question + after


def special_ids(tokenizer):
  """Returns the ids of special tokens, from the file and from the library."""
  folder = pathlib.Path(tokenizer.hf.name_or_path)
  added = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
  return {each["id"] for each in added} | set(tokenizer.hf.all_special_ids)


def test_no_text_from_outside_encodes_to_a_special_token(real_tokenizer):
  special = special_ids(real_tokenizer)
  assert special & set(real_tokenizer.encode("".join(hostile.CONTROL)))
  base = copy.copy(real_tokenizer.hf)
  base.chat_template = None
  tokenizers = (real_tokenizer, tokenizer_lib.Tokenizer(base))
  control = real_tokenizer.control_tokens

  def found(ids):
    return [i for i in ids if i in special]

  expected = [found(each.render("a question")[1]) for each in tokenizers]

  @hostile.cases("no text from outside encodes to a special token")
  @hypothesis.given(hostile.tapes())
  def encode(tape):
    text, title = tape.text(20), tape.text()
    shown = protocol.observation([types.Passage("1", title, text)], control)
    ids = real_tokenizer.encode(shown)
    assert found(ids) == []
    assert real_tokenizer.decode(ids).count("</information>") == 1
    content = prompts.render(
      prompts.PROMPTS["world"].plain,
      budget=3,
      question=protocol.neutralise(text, control),
    )
    for each, ids in zip(tokenizers, expected, strict=True):
      assert found(each.render(content)[1]) == ids

  encode()


@pytest.mark.slow
@pytest.mark.parametrize("piece", ["<|", "</answer>", "\u202e", " ", "{B}"])
def test_a_megabyte_is_encoded_without_a_special_token(real_tokenizer, piece):
  text = protocol.observation(
    [types.Passage("1", "t", piece * (2**20 // len(piece)))],
    real_tokenizer.control_tokens,
  )

  def encode(text):
    ids = real_tokenizer.encode(text)
    assert special_ids(real_tokenizer).isdisjoint(ids)

  growth.assert_linear(encode, text)
