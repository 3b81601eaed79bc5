"""Tests the generated world: facts, passages, questions, ranks, tokenizer."""

from __future__ import annotations

import collections
import functools
import hashlib
import itertools

import numpy as np
import pytest

from anysearch_jax import types
from anysearch_jax.environment import protocol
from anysearch_jax.policy import tokenizer
from anysearch_jax.retrieval import lexical
from anysearch_jax.world import world as world_lib
from anysearch_jax.world import world_tokenizer

WORLD = world_lib.World()
CODEC = tokenizer.Tokenizer(world_tokenizer.build_tokenizer(WORLD))


@functools.cache
def stated(corpus: str) -> dict[tuple[str, str], str]:
  """Returns the true facts, read from the passages alone."""
  names = {
    wording: relation.name
    for relation in world_lib.RELATIONS
    for wording in (relation.name, relation.alternative)
  }
  facts = {}
  for passage in WORLD.corpus(corpus):
    wording, value, *_ = passage.text.split()
    if wording in names and not passage.id.endswith("/twin"):
      assert (passage.title, names[wording]) not in facts
      facts[passage.title, names[wording]] = value
  return facts


def test_the_world_is_the_one_of_earlier_trainings():
  digest = hashlib.sha256()
  for index in (0, 33, 37):
    s = WORLD.snapshot(index)
    for array in (s.values, s.alternative, s.twins, s.twin_first):
      digest.update(np.ascontiguousarray(array).tobytes())
    # Without the fields that passages have got since.
    passages = repr(WORLD.corpus(s.name)).replace(
      f", source={types.Source()}", ""
    )
    digest.update(passages.encode())
  for question in WORLD.questions("train", 200, 3):
    digest.update(repr(question).encode())
  assert digest.hexdigest() == (
    "761ba93d7325658a2448a6f6788d0fdc998b1859530cd68032ecec352344979d"
  )


@pytest.mark.parametrize("split", world_lib.SPLITS)
def test_golden_answers_follow_the_passages(split):
  for question in WORLD.questions(split, 300, 0):
    entity, *relations, mark = question.text.split()
    assert mark == "?"
    path = [entity]
    for relation in relations:
      path.append(stated(question.corpus)[path[-1], relation])
    assert question.golden_answers == (path[-1],)
    assert len(set(path)) == len(path)
    assert len(set(relations)) == len(relations)
    facts = question.metadata["facts"]
    assert [fact["entity"] for fact in facts] == path[:-1]
    assert [fact["relation"] for fact in facts] == relations
    assert [fact["value"] for fact in facts] == path[1:]
    index = question.corpus.removeprefix("snapshot-")
    assert question.id == f"{split}/{index}/{entity}/{'-'.join(relations)}"


def test_metadata_agrees_with_memory_and_passages():
  for question in WORLD.questions("train", 300, 1):
    texts = collections.defaultdict(list)
    for passage in WORLD.corpus(question.corpus):
      texts[passage.title].append(passage.text.split())
    needed = 0
    for fact in question.metadata["facts"]:
      relation = world_lib.RELATIONS[world_lib.INDEX[fact["relation"]]]
      index = WORLD.index[fact["entity"]], world_lib.INDEX[relation.name]
      memory = None
      if WORLD.memory[index] >= 0:
        memory = WORLD.entities[WORLD.memory[index]]
      about = texts[fact["entity"]]
      usual = [t for t in about if t[0] == relation.name]
      other = [t for t in about if t[0] == relation.alternative]
      assert fact["known"] == (memory is not None)
      assert fact["stale"] == (memory not in (None, fact["value"]))
      assert fact["alternative"] == relation.alternative
      assert fact["misses"] == bool(other) == (not usual)
      assert fact["contradicted"] == (len(usual + other) == 2)
      assert fact["reliability"] == WORLD.reliability(relation.name)
      if memory != fact["value"]:
        needed += 1 + bool(other) + (len(usual + other) == 2)
    assert question.metadata["min_searches"] == needed


def test_splits_share_no_chain_and_no_snapshot():
  chains, corpora = {}, {}
  for split in world_lib.SPLITS:
    questions = WORLD.questions(split, 600, 0)
    chains[split] = {question.text for question in questions}
    corpora[split] = {question.corpus for question in questions}
    assert len({(q.corpus, q.text) for q in questions}) == 600
  for one, other in itertools.combinations(world_lib.SPLITS, 2):
    assert not chains[one] & chains[other]
    assert not corpora[one] & corpora[other]
  assert corpora["held-out"] == {f"snapshot-{i}" for i in range(38, 62)}


@pytest.mark.parametrize(
  ("call", "sentence"),
  [
    (lambda: WORLD.questions("test", 1, 0), "Found split 'test'"),
    (lambda: WORLD.questions("dev", 9000, 0), "900 were asked for"),
    (lambda: WORLD.snapshot(62), "Found snapshot 62"),
    (lambda: WORLD.corpus("wiki"), "Found corpus 'wiki'.*Agent.load"),
    (lambda: WORLD.corpus("snapshot-99"), "Found snapshot 99"),
  ],
)
def test_invalid_arguments_are_refused(call, sentence):
  with pytest.raises(ValueError, match=sentence):
    call()


@pytest.mark.parametrize("index", [0, 36])
def test_bm25_ranks_facts_then_fillers(index):
  """Checks the ranks of a search for every fact of a snapshot."""
  search = lexical.LexicalRetriever(WORLD.corpus, reads=WORLD.searched).lookup
  snapshot = WORLD.snapshot(index)

  def labels(query):
    found = search(query, 3, snapshot.name)
    assert all(passage.title == query.split()[0] for passage in found)
    return [passage.id.split("/", 2)[2] for passage in found]

  fillers = ["filler-0", "filler-1", "filler-2"]
  for e, name in enumerate(WORLD.entities):
    settled = ["verdict"] * int(snapshot.twins[e].max() >= 0)
    assert labels(f"{name} verdict") == [*settled, *fillers][:3]
    for r in np.flatnonzero(snapshot.values[e] >= 0):
      relation = world_lib.RELATIONS[r]
      hit = [relation.name]
      if snapshot.twins[e, r] >= 0:
        at = 0 if snapshot.twin_first[e, r] else 1
        hit.insert(at, f"{relation.name}/twin")
      wordings = [relation.name, relation.alternative]
      if snapshot.alternative[e, r]:
        wordings.reverse()
      assert labels(f"{name} {wordings[0]}") == [*hit, *fillers][:3]
      assert labels(f"{name} {wordings[1]}") == fillers


def test_a_search_reads_one_subject_and_one_relation():
  e, other, *_ = WORLD.entities
  one, two = "birthplace", "born"
  assert WORLD.searched(f"{e} {one}") == f"{e} {one}"
  assert WORLD.searched(f"{one.upper()}, {e}: confirmed also") == f"{e} {one}"
  assert WORLD.searched(f"{e} {one} {e} {one}") == f"{e} {one}"
  assert WORLD.searched(f"{e} also here") == e
  for query in (
    *(f"{e} {one} {two}", f"{e} {one} verdict", f"{e} {other} {one}"),
    *("", "also confirmed"),
  ):
    assert not WORLD.searched(query)
    search = lexical.LexicalRetriever(WORLD.corpus, reads=WORLD.searched)
    assert not search.lookup(query, 3, "snapshot-0")


def test_memories_have_the_reliability_that_is_asked_for():
  world = world_lib.World(0, 0.35)
  assert (world.memory == WORLD.memory).all()
  assert {world.reliability(r.name) for r in world_lib.RELATIONS} == {0.35}
  values = np.stack([world.snapshot(i).values for i in range(32)])
  right = (values == world.memory)[:, world.known]
  assert right.mean() == pytest.approx(0.35, abs=0.01)


def test_every_word_is_one_token_in_every_context():
  words = world_tokenizer.vocabulary(WORLD)
  assert len(words) == len(CODEC.hf) == len(set(words))
  plain = [word for word in words if word not in world_tokenizer.CONTROL]
  for word in plain:
    (token,) = CODEC.encode(word)
    assert CODEC.decode([token]) == word
    (tag,) = CODEC.encode("</search>")
    assert CODEC.encode(f"<search>{word}</search>")[1:] == [token, tag]
    assert CODEC.encode(f"\n {word} \n") == [token]


def pieces(text: str) -> list[str]:
  return CODEC.hf.convert_ids_to_tokens(CODEC.encode(text))


def test_the_texts_of_the_environment_have_few_tokens():
  one, other = WORLD.entities[:2]
  passages = [
    types.Passage("", one, f"born {other} also"),
    types.Passage("", other, "here"),
  ]
  assert pieces(protocol.observation(passages)) == [
    *("<information>", "Doc 1(Title:", one, ")", "born", other, "also"),
    *("Doc 2(Title:", other, ")", "here", "</information>"),
  ]
  assert pieces(protocol.observation([])) == [
    *("<information>", "No results found.", "</information>")
  ]
  assert pieces(protocol.budget_line(12, 4)) == [
    *("<budget>", "remaining=", "8", ";", "used=", "4", ";"),
    *("total=", "12", "</budget>"),
  ]
  assert CODEC.hf.unk_token in pieces("unheard of")


def test_a_saved_tokenizer_is_reproducible_and_loads(tmp_path):
  world_tokenizer.build_tokenizer(WORLD).save_pretrained(tmp_path / "one")
  again = world_tokenizer.build_tokenizer(world_lib.World())
  again.save_pretrained(tmp_path / "two")
  files = sorted(path.name for path in (tmp_path / "one").iterdir())
  assert "tokenizer.json" in files
  for file in files:
    one, two = (tmp_path / folder / file for folder in ("one", "two"))
    assert one.read_bytes() == two.read_bytes()
  read = tokenizer.Tokenizer.from_folder(tmp_path / "one")
  text = f"<think> need {WORLD.entities[7]} born ; </think>"
  assert read.encode(text) == CODEC.encode(text)
  assert read.hf.decode(read.encode(text)) == text
  assert read.render("budget 3") == CODEC.render("budget 3")
  assert read.control_tokens == CODEC.control_tokens
  assert read.end_of_turn_ids == CODEC.end_of_turn_ids
  # The template frames one user message.
  text, ids = CODEC.render("budget 3 question")
  assert text == "<|user|> budget 3 question <|end|> <|assistant|>"
  assert CODEC.hf.convert_ids_to_tokens(ids) == text.split()
  assert CODEC.end_of_turn_ids == {CODEC.hf.eos_token_id}
  assert set(CODEC.control_tokens) == set(world_tokenizer.CONTROL)
