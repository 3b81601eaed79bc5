"""The environments of the compared systems, tested by readable transcripts.

Each file of tests/golden/environments belongs to one environment. A scene
starts with `===` and has each author's text and the outcome. The model's texts
are the script; everything else is the expected result.
"""

from __future__ import annotations

import itertools
import pathlib
import re

import growth
import hypothesis
import pytest
import scripted
import transcripts
from hypothesis import strategies as st

from anysearch_jax import types
from anysearch_jax.environment import protocol, tools
from anysearch_jax.methods import bats, search_o1, systems
from anysearch_jax.policy import tokenizer
from anysearch_jax.world import world as world_lib
from anysearch_jax.world import world_tokenizer

FOLDER = pathlib.Path(__file__).parents[1] / "golden" / "environments"
NAMES = sorted(systems.ENVIRONMENTS)
# Others are one request after the other (tests/rollout/test_short_prompts.py),
# or a program's conversation (tests/sessions).
CONVERSATIONS = [
  name
  for name in NAMES
  if systems.ENVIRONMENTS[name].begin is None and name != "program"
]
WORLDS = [name for name in NAMES if name.endswith("world")]
MODEL, ENVIRONMENT = types.Author.MODEL, types.Author.ENVIRONMENT
# Tags besides the paper's five.
OWN_TAGS = {
  "stepsearch": (
    *("<plan>", "</plan>", "<observation>", "</observation>"),
    *("<warning>", "</warning>"),
  ),
  "paper_fetch": tools.FETCH.markers,
  "search_o1": (
    *("<|begin_search_query|>", "<|end_search_query|>"),
    *("<|begin_search_result|>", "<|end_search_result|>"),
  ),
}


def test_environments_and_golden_files_match():
  assert sorted(path.stem for path in FOLDER.iterdir()) == CONVERSATIONS


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_episode_equals_its_golden_transcript(name):
  path = FOLDER / f"{name}.txt"
  assert transcripts.played_again(name, path) == path.read_text("utf-8")


def one_search(name):
  """A turn that searches for Emma and one that answers."""
  if name == "search_o1":
    begin, end = search_o1.QUERY
    return f"{begin}who wrote Emma{end}", r"\boxed{Jane Austen}"
  return scripted.search("who wrote Emma"), scripted.answer("Jane Austen")


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_passages_cannot_contain_markers_or_answers(name):
  transcripts.assert_no_forgery(name, one_search(name), OWN_TAGS.get(name, ()))


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_a_prompt_states_the_budget_and_the_question_once(name):
  transcripts.assert_states_budget_and_question_once(name)


WORLD = world_lib.World()


@pytest.mark.parametrize("name", WORLDS)
def test_world_environment_uses_world_vocabulary_only(name):
  env = systems.environment(name)
  codec = tokenizer.Tokenizer(world_tokenizer.build_tokenizer(WORLD))
  unknown = codec.hf.unk_token_id
  assert unknown in codec.encode("xylophone")
  (question,) = WORLD.questions("dev", 1, 0)
  states = [(b, used) for b in range(21) for used in range(b + 1)]
  texts = [
    *(
      protocol.render(env.plain, searches=b, question=question.text)
      for b in range(9)
    ),
    protocol.render(env.scaffold, searches=8, question=question.text),
    *(env.over_budget, env.no_action, env.repeated),
    *(env.before_turn(*state) for state in states),
    *(env.after_search(*state) for state in states),
    *(tool.observation((), codec.control_tokens) for tool in env.tools),
  ]
  for text in texts:
    assert unknown not in codec.encode(text), text


@hypothesis.settings(max_examples=30)
@hypothesis.given(
  st.lists(st.sampled_from(["who wrote Emma", "", None]), min_size=1)
)
def test_zerosearch_has_one_more_turn_than_its_budget(asked):
  turns = [
    "Hm." if query is None else scripted.search(query) for query in asked
  ]
  budget = len(turns) - 1
  trajectory = transcripts.play("zerosearch", turns, budget=budget)
  assert trajectory.outcome is types.Outcome.INVALID
  assert trajectory.searches == sum(map(bool, asked[:budget]))
  assert trajectory.violation is bool(asked[-1])


def oracle(text):
  """Finds the last box's content by trying every pair of ends."""
  found = None
  for start in range(len(text)):
    opening = re.match(r"\\boxed\s*\{", text[start:])
    inside = start + opening.end() if opening else len(text)
    for end in range(inside, len(text)):
      depths = [(c == "{") - (c == "}") for c in text[inside:end]]
      depths = list(itertools.accumulate(depths, initial=0))
      if text[end] == "}" and min(depths) == depths[-1] == 0:
        found = text[inside:end].strip()
        break
  return found


PIECES = {"1": r"\boxed{", "2": "\\boxed \n{", "3": r"\boxed", "4": r"\{"}


@hypothesis.settings(max_examples=500)
@hypothesis.given(st.text("11234{}}}} ab\\", max_size=14))
def test_boxed_answer_equals_brute_force_search(pieces):
  text = "".join(PIECES.get(piece, piece) for piece in pieces)
  expected = oracle(text)
  assert search_o1.boxed(text) == expected
  spans = (
    types.Span(MODEL, r"\boxed{first}"),
    types.Span(ENVIRONMENT, r"\boxed{shown}"),
    types.Span(MODEL, text),
    types.Span(ENVIRONMENT, r"\boxed{shown}"),
  )
  assert search_o1.answer(spans) == ("first" if expected is None else expected)


@pytest.mark.parametrize(
  ("text", "expected"),
  [
    (r"\boxed{\text{Jane Austen}}", "Jane Austen"),
    (r"\boxed{\textbf{Jane} \text {Austen}}", "Jane Austen"),
    (r"\boxed{42 \text{ km}}", "42  km"),
  ],
)
def test_boxed_answer_content(text, expected):
  assert search_o1.boxed(text) == expected


def test_boxed_answer_takes_linear_time():
  growth.assert_linear(search_o1.boxed, r"\boxed{" * 120_000)
  assert search_o1.boxed(r"\boxed{" * 30_000) is None


@pytest.mark.parametrize(
  ("used", "regime"),
  [
    *((0, "HIGH"), (300, "HIGH"), (301, "MEDIUM"), (700, "MEDIUM")),
    *((701, "LOW"), (900, "LOW"), (901, "CRITICAL"), (1000, "CRITICAL")),
  ],
)
def test_regime_boundaries(used, regime):
  assert bats.regime(1000, used) == regime
  assert f"Used: {used}, Query Budget Remaining: {1000 - used}. {regime}" in (
    systems.environment("bats").after_search(1000, used)
  )


def test_regime_is_critical_at_budget_zero():
  assert bats.regime(0, 0) == "CRITICAL"
