"""Tests observations as JSON values, and those of earlier files."""

from __future__ import annotations

import functools
import json

import pytest

from anysearch_jax import types
from anysearch_jax.environment import observed, protocol

EMMA = types.Passage("1", '"Emma (novel)"', "Austen: ##> (Emma) Doc 8, 1815.")
BATH = types.Passage("b/2", "Bath", "A city.")
MARKED = functools.partial(
  protocol.observation, layout="Doc {rank}<## Title: {title} ##> {text}"
)
QUERY = "<think>t</think><search>q</search>"


def told(*blocks, query=QUERY):
  """Returns the spans of turns and what the environment said after each."""
  spans = []
  for block in blocks:
    spans.append({"author": "model", "text": query})
    if block is not None:
      spans.append({"author": "environment", "text": block})
  return spans


def old(spans, *shown):
  documents = [[{"id": p.id, "title": p.title} for p in each] for each in shown]
  queries = [f"q{n}" for n in range(len(shown))]
  return {"spans": spans, "queries": queries, "documents": documents}


def test_observations_survive_json():
  made = (
    types.Observation("search", "é", 0, (EMMA, BATH), 7),
    types.Observation("fetch", "Bath", 2),
  )
  stored = json.loads(json.dumps({"observations": observed.to_values(made)}))
  assert observed.from_values(stored) == made
  assert made[0].documents == (("1", '"Emma (novel)"'), ("b/2", "Bath"))


@pytest.mark.parametrize("layout", [protocol.observation, MARKED])
def test_an_old_file_gives_passages_and_turns_from_its_blocks(layout):
  spans = told(layout((EMMA, BATH)), "\nNo action.\n", layout((BATH,)))
  assert observed.from_values(old(spans, (EMMA, BATH), (BATH,))) == (
    types.Observation("search", "q0", 0, (EMMA, BATH)),
    types.Observation("search", "q1", 2, (BATH,)),
  )


def test_an_older_file_without_documents_gives_titles_and_texts():
  spans = told(protocol.observation((EMMA, BATH)))
  (found,) = observed.from_values({"spans": spans, "queries": ["q"]})
  assert [p.id for p in found.passages] == ["", ""]
  assert [(p.title, p.text) for p in found.passages] == [
    (p.title, p.text) for p in (EMMA, BATH)
  ]


def test_a_last_search_that_no_turn_followed_has_no_passages():
  spans = told(protocol.observation((BATH,)), None)
  assert observed.from_values(old(spans, (BATH,), ())) == (
    types.Observation("search", "q0", 0, (BATH,)),
    types.Observation("search", "q1", -1, ()),
  )


def test_marks_of_another_kind_give_documents_without_texts():
  shown = "<|begin_search_result|>A city.<|end_search_result|>"
  found = observed.from_values(old(told(shown), (BATH,)))
  assert found == (
    types.Observation("search", "q0", -1, (types.Passage("b/2", "Bath", ""),)),
  )
