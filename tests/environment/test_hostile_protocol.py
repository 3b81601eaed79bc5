"""Tests with tags, control tokens and placeholders in untrusted texts."""

from __future__ import annotations

import copy
import json
import pathlib
import re
import string

import growth
import hostile
import hypothesis
import pytest

from anysearch_jax import types
from anysearch_jax.environment import prompts, protocol, scoring
from anysearch_jax.policy import tokenizer as tokenizer_lib

ZERO_WIDTH = "\u200b"
# Undoes all that neutralising may do: three replacements of single characters.
UNDONE = str.maketrans({"‹": "<", "›": ">", ZERO_WIDTH: None})


@hostile.cases(12_000)
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


@hostile.cases(9_000)
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


@hostile.cases(6_000)
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


@hostile.cases(6_000)
@hypothesis.given(hostile.tapes())
def test_a_question_is_inserted_into_its_prompt_unchanged(tape):
  states_budget = [
    environment
    for environment in prompts.PROMPTS.values()
    if environment.plain != "{Question}"  # Each request is a prompt there.
  ]
  chosen, budget = tape.pick(states_budget), tape.below(100)
  question = protocol.neutralise(tape.text(20), hostile.CONTROL)
  for template in (chosen.scaffold, chosen.plain):
    before, slot, after = template.partition("{Question}")
    assert slot and "{B}" in before
    rendered = protocol.render(template, searches=budget, question=question)
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

  @hostile.cases(1_000)
  @hypothesis.given(hostile.tapes())
  def encode(tape):
    text, title = tape.text(20), tape.text()
    shown = protocol.observation([types.Passage("1", title, text)], control)
    ids = real_tokenizer.encode(shown)
    assert found(ids) == []
    assert real_tokenizer.decode(ids).count("</information>") == 1
    content = protocol.render(
      prompts.PROMPTS["world"].plain,
      searches=3,
      question=protocol.neutralise(text, control),
    )
    for each, ids in zip(tokenizers, expected, strict=True):
      assert found(each.render(content)[1]) == ids

  encode()


@pytest.mark.slow
@pytest.mark.parametrize("piece", ["<|", "\u202e"])
def test_a_megabyte_is_encoded_without_a_special_token(real_tokenizer, piece):
  text = protocol.observation(
    [types.Passage("1", "t", piece * (2**20 // len(piece)))],
    real_tokenizer.control_tokens,
  )

  def encode(text):
    ids = real_tokenizer.encode(text)
    assert special_ids(real_tokenizer).isdisjoint(ids)

  growth.assert_linear(encode, text)


MODEL, ENVIRONMENT = types.Author.MODEL, types.Author.ENVIRONMENT

AUTHORS = (MODEL, ENVIRONMENT)


def any_text(tape):
  """Draws any text, a turn of the protocol, an imitation of one, or a tag."""
  kinds = tape.turn(), tape.text(), tape.pick(hostile.FAKES + hostile.TAGS)
  return tape.pick(kinds)


def span(tape):
  return types.Span(tape.pick(AUTHORS), any_text(tape))


def answer_of(text):
  """Returns the last complete answer, in one pass over the tags."""
  start = found = None
  for tag in re.finditer("<(/?)answer>", text):
    if not tag[1]:
      start = tag.end()
    elif start is not None:
      found, start = text[start : tag.start()].strip(), None
  return found


@hostile.cases(14_000)
@hypothesis.given(hostile.tapes())
def test_the_answer_is_the_last_one_of_the_model(tape):
  spans = tape.some(lambda: span(tape), 5)
  found = [answer_of(each.text) for each in spans if each.author is MODEL]
  said = [each for each in found if each is not None]
  expected = said[-1] if said else None
  assert protocol.extract_answer(spans) == expected
  verdict = scoring.judge(
    spans, golden_answers=(hostile.GOLD,), budget=1, searches=0, scaffold=False
  )
  if verdict.em:
    assert expected is not None
    assert re.sub(r"\W|the", "", expected) == hostile.GOLD


def normalized(text):
  """Normalises as the official script of SQuAD."""

  def remove_articles(text):
    return re.sub(re.compile(r"\b(a|an|the)\b", re.UNICODE), " ", text)

  def remove_punctuation(text):
    exclude = set(string.punctuation)
    return "".join(each for each in text if each not in exclude)

  return " ".join(remove_articles(remove_punctuation(text.lower())).split())


@hostile.cases(9_000)
@hypothesis.given(hostile.tapes())
def test_exact_match_equals_the_official_script(tape):
  aliases = tape.some(lambda: tape.text(3), 3)
  answer = tape.pick((lambda: tape.text(3), lambda: None, *aliases))
  answer = answer() if callable(answer) else f" The {answer}."
  accepted = [normalized(alias) for alias in aliases]
  expected = answer is not None and normalized(answer) in accepted
  expected = expected and normalized(answer) != ""
  assert scoring.exact_match(answer, aliases) == expected
  f1 = scoring.f1(answer, aliases)
  assert 0 <= f1 <= 1
  if expected:
    assert f1 == 1
  words = set(normalized(answer or "").split())
  common = any(words & set(each.split()) for each in accepted)
  assert (f1 > 0) == common


def nearly_formed(tape):
  """Draws a well-formed response of hostile contents; may change one block."""
  scaffold, searches = tape.pick((False, True)), tape.below(3)
  budget = searches + tape.below(2)
  blocks = []
  for used in range(searches + 1):
    if scaffold:
      state = f"remaining={budget - used}; used={used}; total={budget}"
      blocks.append((ENVIRONMENT, "budget", state))
    blocks.append((MODEL, "think", tape.text(2)))
    if used < searches:
      blocks.append((MODEL, "search", tape.text(2)))
      blocks.append((ENVIRONMENT, "information", tape.text(2)))
  blocks.append((MODEL, "answer", tape.text(2)))
  found = [
    types.Span(author, f"<{name}>{content}</{name}>\n")
    for author, name, content in blocks
  ]
  place = tape.below(3 * len(found))
  if place < len(found):
    text, more = found[place].text, any_text(tape)
    text = tape.pick((text, text + more, more + text))
    found[place] = types.Span(tape.pick(AUTHORS), text)
  return found, budget, searches, scaffold


ANY_TAG = "</?(?:budget|think|search|information|answer)>"
BLOCK = re.compile(
  rf"\s*<(budget|think|search|information|answer)>((?:(?!{ANY_TAG}).)*)</\1>",
  re.DOTALL,
)


def formed(spans, budget, searches, scaffold):
  """Returns whether spans form a complete episode, read from the left."""
  found = []
  for span in spans:
    text = span.text
    while block := BLOCK.match(text):
      found.append((span.author, block[1], block[2].strip()))
      text = text[block.end() :]
    if text.strip():
      return False
  expected = []
  for used in range(searches + 1):
    if scaffold:
      expected.append((ENVIRONMENT, "budget"))
    expected.append((MODEL, "think"))
    if used < searches:
      expected += [(MODEL, "search"), (ENVIRONMENT, "information")]
  expected.append((MODEL, "answer"))
  states = [content for _, name, content in found if name == "budget"]
  return (
    [each[:2] for each in found] == expected
    and searches <= budget
    and states
    == [
      f"remaining={budget - used}; used={used}; total={budget}"
      for used in range(len(states))
    ]
  )


@hostile.cases(9_000)
@hypothesis.given(hostile.tapes(100))
def test_format_equals_a_second_implementation(tape):
  spans, budget, searches, scaffold = nearly_formed(tape)
  for charged in (searches, searches + 1):
    expected = formed(spans, budget, charged, scaffold)
    found = scoring.check_format(
      spans, budget=budget, searches=charged, scaffold=scaffold
    )
    assert found == expected
