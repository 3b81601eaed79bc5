"""The generated world: facts, passages, questions, ranks, tokenizer."""

from __future__ import annotations

import itertools
import pathlib

import numpy as np
import pytest
import transformers

from anysearch_jax import prompts, protocol, tokenizer, types
from anysearch_jax.data import world as world_lib
from anysearch_jax.data import world_tokenizer
from retrieval import lexical

WORLD = world_lib.World()
HF = world_tokenizer.build_tokenizer(WORLD)
CODEC = tokenizer.Tokenizer(HF)
E, R = WORLD.known.shape


def relation_of(question: types.Question) -> tuple[str, ...]:
  return tuple(fact["relation"] for fact in question.metadata["facts"])


def chain_of(question: types.Question) -> tuple[str, ...]:
  return (question.text.split()[0], *relation_of(question))


def stated(corpus: str) -> dict[tuple[str, str], str]:
  """The right facts, read from the passages alone."""
  passages = WORLD.corpus(corpus)
  wordings = {
    wording: relation.name
    for relation in world_lib.RELATIONS
    for wording in (relation.name, relation.alternative)
  }
  facts = {}
  for passage in passages:
    word, value, *_ = passage.text.split()
    if word in wordings and not passage.id.endswith("/twin"):
      assert (passage.title, wordings[word]) not in facts
      facts[passage.title, wordings[word]] = value
  return facts


def test_equal_seeds_make_equal_worlds():
  again = world_lib.World()
  assert again.entities == WORLD.entities
  np.testing.assert_array_equal(again.memory, WORLD.memory)
  # Snapshots do not depend on what was drawn before them.
  assert again.corpus("snapshot-5") == WORLD.corpus("snapshot-5")
  assert again.questions("dev", 60, 3) == WORLD.questions("dev", 60, 3)
  assert again.questions("dev", 60, 3) != WORLD.questions("dev", 60, 4)
  other = world_lib.World(world_lib.WorldConfig(seed=1))
  assert other.entities != WORLD.entities


def test_parametric_facts_hold_everywhere_and_others_do_not():
  values = np.stack([WORLD.snapshot(i).values for i in range(38)])
  assert (values[:, WORLD.known] == WORLD.facts[WORLD.known]).all()
  others = values[:, (values[0] >= 0) & ~WORLD.known]
  assert len(others.T) + WORLD.known.sum() == 590
  assert (others[0] == others[1]).mean() < 0.1
  assert 0.3 < WORLD.known.sum() / 590 < 0.42


def test_memory_is_right_but_for_a_stale_tenth():
  assert ((WORLD.memory >= 0) == WORLD.known).all()
  stale = WORLD.memory != WORLD.facts
  assert stale.sum() == round(0.1 * WORLD.known.sum())
  for e, r in np.argwhere(WORLD.known):
    name = world_lib.RELATIONS[r].name
    value = WORLD.recall(WORLD.entities[e], name)
    assert value in WORLD.objects(name)
    assert (value == WORLD.entities[WORLD.facts[e, r]]) != stale[e, r]


@pytest.mark.parametrize("index", [0, 33, 37])
def test_twins_are_other_values_of_facts_that_memory_lacks(index):
  snapshot = WORLD.snapshot(index)
  contradicted = snapshot.twins >= 0
  unknown = (snapshot.values >= 0) & ~WORLD.known
  assert contradicted.sum() == round(0.2 * unknown.sum())
  assert contradicted.sum(1).max() == 1
  assert not (contradicted & WORLD.known).any()
  for e, r in np.argwhere(contradicted):
    twin = snapshot.twins[e, r]
    assert twin not in (e, snapshot.values[e, r])
    objects = WORLD.objects(world_lib.RELATIONS[r].name)
    assert WORLD.entities[twin] in objects
  # Neither the truth nor its twin tends to come first.
  firsts = [WORLD.snapshot(i) for i in range(10)]
  share = np.mean(
    np.concatenate([s.twin_first[s.twins >= 0] for s in firsts])
  )
  assert 0.4 < share < 0.6


@pytest.mark.parametrize("split", world_lib.SPLITS)
def test_golden_answers_follow_the_passages(split):
  questions = WORLD.questions(split, 300, 0)
  for question in questions:
    entity, *relations, mark = question.text.split()
    assert mark == "?"
    facts = stated(question.corpus) if False else FACTS(question.corpus)
    path = [entity]
    for relation in relations:
      path.append(facts[path[-1], relation])
    assert question.golden_answers == (path[-1],)
    assert len(set(path)) == len(path)
    assert len(set(relations)) == len(relations)
    metadata = question.metadata
    assert [f["entity"] for f in metadata["facts"]] == path[:-1]
    assert [f["value"] for f in metadata["facts"]] == path[1:]
    index = int(question.corpus.removeprefix("snapshot-"))
    assert question.id == f"{split}/{index}/{entity}/{'-'.join(relations)}"
