"""Compares scoring with a second implementation on hostile texts."""

from __future__ import annotations

import re
import string

import hostile
import hypothesis

from anysearch_jax import types
from anysearch_jax.environment import scoring

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


@hostile.cases("the answer is the model's last")
@hypothesis.given(hostile.tapes())
def test_the_answer_is_the_last_one_of_the_model(tape):
  spans = tape.some(lambda: span(tape), 5)
  found = [answer_of(each.text) for each in spans if each.author is MODEL]
  said = [each for each in found if each is not None]
  expected = said[-1] if said else None
  assert scoring.extract_answer(spans) == expected
  verdict = scoring.judge(
    spans,
    golden_answers=(hostile.GOLD,),
    budget=1,
    searches=0,
    scaffold=False,
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


@hostile.cases("exact match is the official script's")
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


@hostile.cases("format is what a second reader says")
@hypothesis.given(hostile.tapes(100))
def test_format_equals_a_second_implementation(tape):
  spans, budget, searches, scaffold = nearly_formed(tape)
  for charged in (searches, searches + 1):
    expected = formed(spans, budget, charged, scaffold)
    found = scoring.check_format(
      spans, budget=budget, searches=charged, scaffold=scaffold
    )
    assert found == expected
