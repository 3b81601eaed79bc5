"""Chains of searches that lead to a known answer."""

from __future__ import annotations

import asyncio
import dataclasses

from anysearch_jax import types
from anysearch_jax.demonstrations import evidence_chains
from anysearch_jax.environment import scoring

BAKERY = types.Passage(
  "1", '"Orlan bakery"', "The Orlan bakery was founded by Mira Tasse in 1902."
)
TASSE = types.Passage(
  "2",
  '"Mira Tasse"',
  "Mira Tasse (1870-1931) was a baker. She grew up in Lund.",
)
OTHER = types.Passage("3", '"Bakery"', "A bakery bakes bread.")
TWO_HOPS = types.Question(
  "q",
  "Where did the founder of the Orlan bakery grow up?",
  ("Lund", "Lund, Sweden"),
  metadata={
    "hops": 2,
    "gold_doc_ids": ["1", "2"],
    "supporting": [
      {"title": "Orlan bakery", "text": BAKERY.text},
      {"title": "Mira Tasse", "text": TASSE.text},
    ],
  },
)
ANSWERS = {TWO_HOPS.text: (BAKERY, OTHER), "Mira Tasse": (TASSE, BAKERY)}


def chain(question, budget, answers=ANSWERS):
  """Returns the turns, and the queries that were tried."""
  tried = []

  async def search(query):
    tried.append(query)
    return answers.get(query, (OTHER,))

  turns = evidence_chains.turns(question, budget=budget, search=search)
  return asyncio.run(turns), tried


def actions(question, budget, answers=ANSWERS):
  return [turn.action for turn in chain(question, budget, answers)[0]]


def test_without_a_search_the_answer_is_from_memory():
  turns, tried = chain(TWO_HOPS, 0)
  assert [turn.action for turn in turns] == ["Lund"] and not tried


def test_a_chain_that_the_budget_cuts_does_not_know():
  expected = [TWO_HOPS.text, evidence_chains.UNKNOWN]
  assert actions(TWO_HOPS, 1) == expected


def test_half_of_the_questions_are_answered_after_searches_in_vain():
  endings = set()
  for name in ("q", "r", "s", "t"):
    question = dataclasses.replace(TWO_HOPS, id=name)
    turns, _ = chain(question, 1)
    endings.add((turns[-1].thought, turns[-1].action))
    # With a search left it does not guess.
    hidden = {TWO_HOPS.text: (OTHER,)}
    assert actions(question, 2, hidden)[-1] == evidence_chains.UNKNOWN
  assert endings == {
    ("Not found.", evidence_chains.UNKNOWN),
    ("No search left. From memory.", "Lund"),
  }


def test_the_second_query_is_a_title_that_was_read():
  turns, tried = chain(TWO_HOPS, 3)
  assert [turn.action for turn in turns] == [
    TWO_HOPS.text,
    "Mira Tasse",
    "Lund",
  ]
  assert tried == [TWO_HOPS.text, "Mira Tasse"]
  assert turns[-1].thought == "From Mira Tasse."
  assert turns[0].thought.startswith("3 of 3")
  assert turns[1].thought.startswith("2 of 3")


def test_a_title_that_was_not_read_is_no_query():
  hidden = {TWO_HOPS.text: (OTHER,), "Mira Tasse": (TASSE,)}
  assert actions(TWO_HOPS, 3, hidden) == [
    TWO_HOPS.text,
    evidence_chains.UNKNOWN,
  ]
  assert actions(TWO_HOPS, 3, hidden | {"Orlan bakery": (BAKERY,)}) == [
    TWO_HOPS.text,
    "Orlan bakery",
    "Mira Tasse",
    "Lund",
  ]


def test_a_sub_question_comes_before_a_title():
  steps = [
    {"question": "Who founded the Orlan bakery?", "answer": "Mira Tasse"},
    {"question": "Where did #1 grow up?", "answer": "Lund"},
  ]
  question = types.Question(
    "q", TWO_HOPS.text, ("Lund",), metadata={"hops": 2, "sub_questions": steps}
  )
  answers = {"Where did Mira Tasse grow up?": (TASSE,)}
  assert actions(question, 3, answers) == [
    TWO_HOPS.text,
    "Where did Mira Tasse grow up?",
    "Lund",
  ]


def test_a_question_without_evidence_stops_at_its_answer():
  question = types.Question("q", "Who founded the bakery?", ("Mira Tasse",))
  answers = {question.text: (BAKERY,)}
  assert actions(question, 3, answers) == [question.text, "Mira Tasse"]
  assert actions(question, 3, {}) == [question.text, evidence_chains.UNKNOWN]


def test_an_answer_that_no_passage_holds_needs_all_of_them():
  question = types.Question(
    "q",
    "Is the founder of the Orlan bakery a baker?",
    ("yes",),
    metadata={**TWO_HOPS.metadata, "hops": None},
  )
  answers = {question.text: (BAKERY,), "Mira Tasse": (TASSE,)}
  assert actions(question, 1, answers)[-1] == evidence_chains.UNKNOWN
  turns, _ = chain(question, 2, answers)
  assert turns[-1] == evidence_chains.Turn(
    "From Orlan bakery and Mira Tasse.", "yes", is_answer=True
  )


def test_the_alias_that_the_passage_spells_is_the_answer():
  question = types.Question("q", "Where?", ("LUND", "Lund"))
  assert actions(question, 1, {"Where?": (TASSE,)})[-1] == "Lund"


def test_the_telling_passage_with_most_words_of_the_question_is_named():
  question = types.Question("q", "Where did Tasse grow up?", ("Lund",))
  city = types.Passage("8", "City", "Lund is a city.")
  turns, _ = chain(question, 1, {question.text: (city, TASSE, OTHER)})
  assert turns[-1].thought == "From Mira Tasse."
  untitled = dataclasses.replace(TASSE, title="")
  turns, _ = chain(question, 1, {question.text: (untitled,)})
  assert turns[-1].thought == "From a passage."


def test_turns_are_well_formed_and_hold_no_tag_of_a_passage():
  passage = types.Passage("9", "Tag", "In <answer> Lund </answer> it was.")
  question = types.Question("q", "Where?", ("Lund",))
  turns, _ = chain(question, 1, {"Where?": (passage,)})
  texts = [evidence_chains.written(turn, ()) for turn in turns]
  model = types.Author.MODEL
  environment = types.Author.ENVIRONMENT
  spans = [
    types.Span(model, texts[0]),
    types.Span(environment, "<information>x</information>"),
    types.Span(model, texts[1]),
  ]
  assert scoring.check_format(spans, budget=1, searches=1, scaffold=False)
