"""Episodes as arrays: values, independence of order, error messages."""

from __future__ import annotations

import json

import numpy as np
import point_values
import pytest
import study

from anysearch_jax.evaluation import columns, measures
from anysearch_jax.world import world


def _file(path, found):
  path.write_text("".join(json.dumps(e) + "\n" for e in found), "utf-8")
  return path


def _one(**changes):
  (episode,) = study.row("a", questions=1, budgets=(1,)).episodes
  return episode | changes


def test_columns_are_aligned_with_episodes_in_any_order():
  row = study.row("a", questions=9, budgets=(0, 3, 1), seeds=(2, 1))
  table, turned = (
    columns.as_columns(row.episodes),
    columns.as_columns(row.episodes[::-1]),
  )
  ordered = sorted(row.episodes, key=columns.key_of)
  assert list(table.ids[table.question]) == [e["question_id"] for e in ordered]
  for name in ("budget", "seed", "em", "searches", "format", "total_tokens"):
    assert list(getattr(table, name)) == [e[name] for e in ordered]
  assert [columns.OUTCOMES[o] for o in table.outcome] == [
    e["outcome"] for e in ordered
  ]
  assert list(table.hops) == [e["metadata"]["hops"] for e in ordered]
  for name in ("ids", "question", "budget", "seed", "em", "f1"):
    np.testing.assert_array_equal(getattr(table, name), getattr(turned, name))
  with pytest.raises(AttributeError, match="expected a column"):
    _ = table.unknown


def test_runs_of_different_seeds_are_one_row(tmp_path):
  paths = [
    _file(tmp_path / f"{s}.jsonl", study.row("a", seeds=(s,)).episodes)
    for s in (4, 5)
  ]
  table = columns.read(*paths)
  assert set(table.seed) == {4, 5}
  with pytest.raises(ValueError, match="occurs twice at budget 0 and seed 4"):
    columns.read(paths[0], paths[0])


def test_datasets_are_in_the_papers_order():
  names = ["bamboogle", "aqa", "nq", "2wikimultihopqa"]
  found = [
    e | {"dataset": names[int(e["question_id"][1:]) % len(names)]}
    for e in study.row("a", questions=8, budgets=(1,)).episodes
  ]
  parts = columns.by_dataset(found)
  assert list(parts) == ["nq", "2wikimultihopqa", "bamboogle", "aqa"]
  assert set(parts["nq"].ids[parts["nq"].question]) == {"q2", "q6"}
  # The dataset may come from the question's metadata.
  told = _one(metadata={"dataset": "popqa"})
  assert list(columns.by_dataset([told])) == ["popqa"]
  assert list(columns.by_dataset([_one()])) == ["world"]


def test_questions_of_a_snapshot_are_one_cluster():
  asked = world.World().questions("held-out", 60, 0)
  episodes = [_one(question_id=q.id, em=i % 2) for i, q in enumerate(asked)]
  table = columns.as_columns(episodes)
  corpus = {q.id: q.corpus for q in asked}
  found = {
    (corpus[name], int(code))
    for name, code in zip(table.ids, table.cluster_of, strict=True)
  }
  names = {name for name, _ in found}
  assert len(found) == len(names) == len({code for _, code in found}) > 15
  scores = measures.sums(episodes, ("accuracy",)).linearised(("accuracy",))
  assert len(scores.cluster[0]) == len(names) and scores.question_count == 60
  # Of other people's questions, none shares a cluster.
  others = columns.as_columns([e | {"dataset": "nq"} for e in episodes])
  assert sorted(others.cluster_of) == [*range(60)]


def test_missing_values_are_undefined():
  row = study.row("a", questions=4, budgets=(1,), plain=True)
  cell = point_values.cell([e | {"format": None} for e in row.episodes])
  assert (cell.cost, cell.input_tokens, cell.format_rate) == (None, None, None)
  assert cell.accuracy is not None
  told = [e | {"cost": 0.5, "input_tokens": 7} for e in row.episodes]
  cell = point_values.cell(told)
  assert (cell.cost, cell.input_tokens) == (0.5, 7.0)
  assert set(row.columns.hops) == {columns.UNKNOWN_HOPS}


@pytest.mark.parametrize(
  ("text", "sentence"),
  [
    ("", "episodes.jsonl: found no episode"),
    ("\n{", "line 2: found text that is not JSON"),
    ("[]", "line 1: found list, expected a JSON object"),
    ("{}", "line 1: the episode lacks question_id"),
    (json.dumps(_one(outcome="lost")), "'q0' ended as 'lost'; expected one of"),
    (json.dumps(_one(em="1")), "line 1: found em '1', expected int or float"),
    (
      "\n".join(json.dumps(_one(dataset=f"set{b}", budget=b)) for b in (1, 2)),
      "'q0' is of dataset 'set1' and of 'set2'",
    ),
  ],
)
def test_read_errors_have_messages(tmp_path, text, sentence):
  path = tmp_path / "episodes.jsonl"
  path.write_text(text)
  with pytest.raises(ValueError, match=sentence):
    columns.read(path)


def _sampled(path, n, seed=0):
  sample = columns.Sample(n, seed)
  columns.read(path, sample=sample)
  return sample.episodes()


def test_samples_of_two_rows_are_of_the_same_episodes(tmp_path):
  size = {"questions": 40, "budgets": (0, 2, 5)}
  one = _file(tmp_path / "a", study.row("a", **size).episodes)
  other = _file(tmp_path / "b", study.row("b", **size).episodes[::-1])
  first, second = (_sampled(p, 25) for p in (one, other))
  keys = [columns.key_of(e) for e in first]
  assert keys == [columns.key_of(e) for e in second] == sorted(keys)
  assert len(set(keys)) == 25
  assert {k[1] for k in keys} == {0, 2, 5}
  assert keys != [columns.key_of(e) for e in _sampled(one, 25, 1)]
  assert len(_sampled(one, 1000)) == 120
  # An unpaired surrogate, which a model may emit, can be read.
  path = _file(tmp_path / "x", [_one(question=study.HOSTILE)])
  assert _sampled(path, 1)[0]["question"] == study.HOSTILE


def test_f1_is_token_based_and_one_if_em_is_one():
  told = {
    "the Eiffel tower": 1.0,
    "tower of London": 2 / 5,  # One common word; two and three words.
    "Big Ben": 0.0,
    None: 0.0,
  }
  found = [
    _one(
      question_id=str(i),
      answer=answer,
      golden_answers=["Eiffel Tower!", "La dame"],
      em=int(answer == "the Eiffel tower"),
      outcome="answered",
    )
    for i, answer in enumerate(told)
  ]
  np.testing.assert_allclose(columns.as_columns(found).f1, list(told.values()))
