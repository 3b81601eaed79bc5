"""The evidence that questions of each source have."""

from __future__ import annotations

import dataclasses
import json
import pathlib

import commands
import pytest
import question_rows
from absl import flags

from anysearch_jax import config as config_lib
from anysearch_jax import types
from anysearch_jax.data import (
  dataset_iterator,
  evidence,
  formats,
  prepared,
  preparing,
)
from anysearch_jax.launch import train
from anysearch_jax.world import world as world_lib

ROOT = pathlib.Path(__file__).resolve().parents[2]
WORLD = world_lib.World()


def read(name: str) -> types.Question:
  """Reads a question from a row of its source."""
  row, format_, _ = question_rows.ROWS[name]
  found = formats.read(row, format_)
  return types.Question(
    found.id, found.question, found.answers, metadata=found.metadata
  )


@pytest.mark.parametrize(
  ("name", "passages", "keys"),
  [
    # Steps contain earlier answers.
    ("MuSiQue", ("Emma By J.",), (("Emma >> author",), ("J >> born",))),
    (
      "StepSearch",
      ("Emma By J.",),
      (("Emma author", "who wrote Emma"), ("Austen born",)),
    ),
    ("FlashRAG with the evidence of HotpotQA", ("B y", "A x"), ()),
    ("HotpotQA", ("A x y", "B z"), ()),
  ],
)
def test_rows_have_evidence(name, passages, keys):
  assert evidence.gold(read(name)) == (passages, keys)


@pytest.mark.parametrize("name", ["FlashRAG", "2WikiMultihopQA"])
def test_question_without_passage_texts_is_rejected(name):
  with pytest.raises(ValueError, match="1 of 1 questions without evidence"):
    evidence.gold(read(name))


def test_check_covers_every_question_and_lists_the_first_failures():
  good, bad = read("MuSiQue"), read("NQ-open")
  evidence.check([good] * 3)
  bad = [dataclasses.replace(bad, id=f"nq/{i}") for i in range(7)]
  with pytest.raises(
    ValueError,
    match=r"7 of 9 .*\(nq/0, nq/1, .*nq/4, and 2 more\); .*--evidence",
  ):
    evidence.check([good, *bad, good])


def _lines(path, rows):
  path.write_text("".join(json.dumps(row) + "\n" for row in rows))
  return path


def _prepared(folder, *, only=False):
  """MuSiQue mixed with NQ, where one question in four has evidence."""
  mix = ("musique",) if only else ("musique", "nq")
  settings = preparing.Settings(mix=mix, evidence=only)
  musique = question_rows.ROWS["MuSiQue"][0]
  nq = question_rows.ROWS["NQ-open"][0]
  folder.mkdir()
  rows = [{**musique, "id": f"2hop__{i}", "question": f"m{i}"} for i in "ab"]
  others = [{**nq, "id": f"{i}", "question": f"n{i}"} for i in range(6)]
  parts, listed = preparing.prepare(
    [
      preparing.Input(_lines(folder / "m.jsonl", rows), "musique", "train"),
      preparing.Input(_lines(folder / "n.jsonl", others), "nq", "train"),
    ],
    settings,
  )
  mixed = preparing.mix(parts, settings)
  prepared.write(folder / "qa", parts, mixed, {"inputs": listed})
  return parts, str(folder / "qa")


def _configured(path):
  config = config_lib.ExperimentConfig()
  return config_lib.changed(
    config,
    policy=str(ROOT / "configs" / "graded_world_policy"),
    method={"name": "stepsearch"},
    data={"source": "prepared", "path": path},
    retrieval={"kind": "http", "url": "http://127.0.0.1:9"},
  )


def test_training_checks_all_of_its_questions_first(tmp_path):
  _, path = _prepared(tmp_path / "all")
  config = _configured(path)
  stream = prepared.Prepared(path).questions("train", 100, config.seed)
  assert len(list(dataset_iterator.distinct(stream))) == 8
  # Even if the first question has evidence.
  said = "6 of 8 questions without evidence"
  with commands.defined(train), pytest.raises(ValueError, match=said):
    flags.FLAGS.mark_as_parsed()
    train._begin(config)


def test_evidence_flag_drops_questions_without_evidence(tmp_path):
  parts, path = _prepared(tmp_path / "some", only=True)
  assert parts["nq_train"].dropped == {"no evidence": 6}
  found = [e.id for e in parts["musique_train"].entries]
  assert found == ["musique/2hop__a", "musique/2hop__b"]
  evidence.check(prepared.Prepared(path).rows("train"))


def test_named_passages_are_found_in_a_corpus(tmp_path):
  rows = [{"id": i, "contents": f'"T{i}"\ntext {i}'} for i in ("7", "3", "5")]
  corpus = _lines(tmp_path / "corpus.jsonl", rows)
  known = {"gold_doc_ids": ["3", "7"], "level": "hard"}
  own = {"gold_doc_ids": ["9"], "supporting": [{"title": "A", "text": "x"}]}
  found = preparing.add_supporting(
    [json.dumps(known), json.dumps(own), "{}"], corpus
  )
  first, second, third = map(json.loads, found)
  assert evidence.of_metadata(first) == (("T3 text 3", "T7 text 7"), ())
  assert first["level"] == "hard" and second == own and third == {}
  known["gold_doc_ids"].append("8")
  with pytest.raises(ValueError, match=r"1 of 3 passages .*\(8\)"):
    preparing.add_supporting([json.dumps(known)], corpus)
  with pytest.raises(ValueError, match="row 1: found no passage"):
    preparing.add_supporting([], _lines(corpus, [{"id": "1"}]))
  one, other = ({"id": "7", "contents": f'"T"\n{x}'} for x in "ab")
  asked = [json.dumps({"gold_doc_ids": ["7"]})]
  with pytest.raises(formats.DataError, match="two passages with the id '7'"):
    preparing.add_supporting(asked, _lines(corpus, [one, other]))
  (found,) = preparing.add_supporting(asked, _lines(corpus, [one, one]))
  assert json.loads(found)["supporting"][0]["text"] == "a"


def test_world_evidence_equals_its_passages():
  questions = WORLD.questions("train", 200, 0)
  told_of = world_lib.with_evidence(WORLD, questions)
  for told, question in zip(told_of, questions):
    assert told.metadata.items() >= question.metadata.items()
    passages, keys = evidence.gold(told)
    facts = question.metadata["facts"]
    assert len(passages) == len(keys)
    assert len(keys) == len(facts) + sum(f["contradicted"] for f in facts)
    passages_of = WORLD.corpus(question.corpus)
    corpus = {f"{p.title} {p.text}": p.id for p in passages_of}
    assert not any(corpus[passage].endswith("/twin") for passage in passages)
    stated = [passage.split()[:3] for passage in passages]
    verdicts = [e for e, word, _ in stated if word == world_lib.VERDICT]
    assert verdicts == [f["entity"] for f in facts if f["contradicted"]]
    facts_stated = [s for s in stated if s[1] != world_lib.VERDICT]
    for fact, (entity, wording, value) in zip(facts, facts_stated, strict=True):
      assert (entity, value) == (fact["entity"], fact["value"])
      other = "alternative" if fact["misses"] else "relation"
      assert wording == fact[other]
    # A passage's search key is its subject and the wording of its relation.
    assert [key for (key,) in keys] == [f"{s[0]} {s[1]}" for s in stated]
