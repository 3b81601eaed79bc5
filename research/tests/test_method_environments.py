"""The environments of the plug-ins, tested by readable transcripts."""

from __future__ import annotations

import pathlib

import pytest
import scripted
import transcripts

import anysearch_jax as aj
from research import methods
from research.methods import (
  autorefine,
  bats_verify,
  early_answers,
  hiprag,
  r1_searcher,
  research,
)

FOLDER = pathlib.Path(__file__).parent / "golden" / "environments"
# By the name of its file, the value of `episode.prompts`.
NAMES = {
  name: f"{methods.method_name(system)}#{name}"
  for system in (*methods.COMPARED, "bats_verify")
  for name in aj.get_method(methods.method_name(system)).environments
  if not name.startswith("search_r1")
}
# Tags besides the paper's five.
OWN_TAGS = {
  "research": research.SEARCH.markers,
  "autorefine": (*autorefine.SEARCH.markers, "<refine>", "</refine>"),
  "r1_searcher": r1_searcher.SEARCH.markers,
  "hiprag": (
    *hiprag.SEARCH.markers,
    *("<step>", "</step>", "<reasoning>", "</reasoning>"),
    *("<conclusion>", "</conclusion>"),
  ),
}


def test_environments_and_golden_files_match():
  assert sorted(path.stem for path in FOLDER.iterdir()) == sorted(NAMES)


@pytest.mark.parametrize("name", sorted(NAMES))
def test_episode_equals_its_golden_transcript(name):
  path = FOLDER / f"{name}.txt"
  played = transcripts.played_again(NAMES[name], path, early_answers.step)
  assert played == path.read_text("utf-8")


def one_search(name):
  """A turn that searches for Emma and one that answers."""
  if name == "r1_searcher":
    begin, end = r1_searcher.SEARCH.opens, r1_searcher.SEARCH.closes
    return f"{begin}who wrote Emma{end}", scripted.answer("Jane Austen")
  if name == "research":
    boxed = scripted.answer(r"\boxed{Jane Austen}")
    return scripted.search("who wrote Emma"), boxed
  return scripted.search("who wrote Emma"), scripted.answer("Jane Austen")


@pytest.mark.parametrize("name", sorted(NAMES))
def test_passages_cannot_contain_markers_or_answers(name):
  transcripts.assert_no_forgery(
    NAMES[name], one_search(name), OWN_TAGS.get(name, ())
  )


@pytest.mark.parametrize("name", sorted(NAMES))
def test_a_prompt_states_the_budget_and_the_question_once(name):
  transcripts.assert_states_budget_and_question_once(NAMES[name])


@pytest.mark.parametrize("system", methods.COMPARED)
def test_other_environments_are_those_of_search_r1(system):
  name = methods.method_name(system)
  for prompts in aj.get_method(name).environments:
    if prompts.startswith("search_r1"):
      own = aj.get_environment(f"{name}#{prompts}")
      assert own == aj.get_environment(prompts)


@pytest.mark.parametrize(
  ("text", "accepted"),
  [
    ('{"decision": "SUCCESS"}', True),
    ('{"decision": "CONTINUE"}', False),
    ('```json\n{"verification": [],\n"decision" : "PIVOT"}\n```', False),
    ('{"decision": "CONTINUE", "justi', False),
    ('"decision": "SUCCESS", "CONTINUE"? {"decision": "PIVOT"}', False),
    ('{"decision": null}', True),
    ("It stands.", True),
    ("", True),
    ("[" * 100_000, True),
  ],
)
def test_verification_accepts_or_rejects_an_answer(text, accepted):
  assert bats_verify.accepted(text) is accepted
