"""What questions of every source know of the way to their answers."""

from __future__ import annotations

import pytest
import question_rows

from anysearch_jax import types
from anysearch_jax.data import formats
from anysearch_jax.data import world as world_lib
from anysearch_jax.methods import evidence

WORLD = world_lib.World()


def read(name: str) -> types.Question:
  """A question as its source's row says it."""
  row, format_, _ = question_rows.ROWS[name]
  found = formats.read(row, format_)
  return types.Question(
    found.id, found.question, found.answers, metadata=found.metadata
  )


def test_musique_s_steps_name_the_answers_before_them():
  assert evidence.gold(read("MuSiQue")) == (
    ("Emma By J.",),
    (("Emma >> author",), ("J >> born",)),
  )


def test_stepsearch_s_rows_have_several_queries_a_step():
  assert evidence.gold(read("StepSearch")) == (
    ("Emma By J.",),
    (("Emma author", "who wrote Emma"), ("Austen born",)),
  )


def test_a_step_that_does_not_exist_stays_as_it_is_written():
  steps = [{"question": "#0 and #2 >> x", "answer": "y"}]
  question = types.Question("q", "?", (), metadata={"sub_questions": steps})
  assert evidence.gold(question) == ((), (("#0 and #2 >> x",),))


@pytest.mark.parametrize(
  "name", ["FlashRAG", "FlashRAG with the evidence of HotpotQA"]
)
def test_questions_with_titles_alone_or_nothing_are_refused(name):
  with pytest.raises(ValueError, match="neither supporting passages"):
    evidence.gold(read(name))


def test_passages_that_are_named_are_found_in_a_corpus():
  question = types.Question(
    "q", "?", ("a",), metadata={"gold_doc_ids": ["7", "3"], "level": "hard"}
  )
  with pytest.raises(ValueError, match="of_corpus"):
    evidence.gold(question)
  told = evidence.of_corpus(
    question, lambda id_: types.Passage(id_, f"T{id_}", f"text {id_}")
  )
  assert evidence.gold(told) == (("T7 text 7", "T3 text 3"), ())
  assert told.metadata["level"] == "hard"
  assert (told.id, told.golden_answers) == ("q", ("a",))


def test_the_world_s_evidence_is_what_its_passages_state():
  questions = WORLD.questions("train", 200, 0)
  for told, question in zip(evidence.of_world(WORLD, questions), questions):
    assert told.metadata.items() >= question.metadata.items()
    passages, keys = evidence.gold(told)
    facts = question.metadata["facts"]
    assert len(passages) == len(keys)
    assert len(keys) == len(facts) + sum(f["contradicted"] for f in facts)
    corpus = {
      f"{p.title} {p.text}": p.id for p in WORLD.corpus(question.corpus)
    }
    assert not any(corpus[passage].endswith("/twin") for passage in passages)
    stated = [passage.split()[:3] for passage in passages]
    verdicts = [e for e, word, _ in stated if word == world_lib.VERDICT]
    assert verdicts == [f["entity"] for f in facts if f["contradicted"]]
    facts_stated = [s for s in stated if s[1] != world_lib.VERDICT]
    for fact, (entity, wording, value) in zip(facts, facts_stated, strict=True):
      assert (entity, value) == (fact["entity"], fact["value"])
      other = "alternative" if fact["misses"] else "relation"
      assert wording == fact[other]
    # The key of a passage is its subject and its wording.
    assert [key for (key,) in keys] == [f"{s[0]} {s[1]}" for s in stated]
