"""Outcomes keep what tables of a study need, and nothing else."""

from __future__ import annotations

import json

import numpy as np
import pytest

import anysearch_jax as aj
from research import outcomes


def episode(question, budget, *, em=0, searches=0, **changes):
  return {
    "question_id": question,
    "question": "?",
    "golden_answers": ["a"],
    "budget": budget,
    "scaffold": False,
    "seed": 7,
    "spans": [],
    "answer": "a" if em else "b",
    "em": em,
    "format": 1,
    "searches": searches,
    "queries": [],
    "violation": False,
    "outcome": "answered",
    "generated_tokens": 3,
    "retrieved_tokens": 0,
    "total_tokens": 5,
    **changes,
  }


# Ten questions at two budgets, so that a byte of bits is not enough.
RIGHT = {0: {2}, 2: {0, 2, 8, 9}}
SEARCHES = {0: [0] * 10, 2: [2, 1, 0, 2, 2, 2, 1, 1, 0, 2]}


def played(seed=0, budgets=(0, 2)):
  return [
    episode(f"q{i}", b, em=int(i in RIGHT[b]), searches=SEARCHES[b][i])
    for b in budgets
    for i in np.random.default_rng(seed).permutation(10)
  ]


def made(row="anysearch", seed=42, settings="s", **changes):
  episodes = played(seed, **changes)
  return outcomes.of(episodes, row=row, seed=seed, settings=settings)


def test_a_file_gives_back_what_was_written(tmp_path):
  path = tmp_path / "outcomes.jsonl"
  outcomes.write(path, [made(seed=43), made()])
  again = outcomes.read(path)
  assert [one.key for one in again] == [("anysearch", 42), ("anysearch", 43)]
  for one in again:
    assert one.budgets == (0, 2)
    for place, b in enumerate(one.budgets):
      assert set(np.flatnonzero(one.right[place])) == RIGHT[b]
      assert one.searches[place].tolist() == SEARCHES[b]
  first = path.read_bytes()
  outcomes.write(path, again)
  assert path.read_bytes() == first
  # Two bits and two characters, not two records, for the two budgets.
  assert len(first) / 40 < 20


def test_measures_are_those_of_the_episodes():
  names = ("accuracy", "tp", "searches")
  sums = outcomes.sums([made()])
  found = sums.linearised(names, np.array([[True, True], [False, True]]))
  # By hand: 5 of 20 right; TP counts B >= 1 only, 4 right by 13 searches.
  pooled = [5 / 20, 4 / 13, 13 / 20]
  np.testing.assert_allclose(found.value, [*pooled, 4 / 10, 4 / 13, 13 / 10])
  theirs = aj.measures.sums(played(), names).linearised(names)
  np.testing.assert_allclose(theirs.value, pooled)
  np.testing.assert_allclose(
    sums.linearised(names).cluster[0], theirs.cluster[0]
  )


def test_questions_of_a_snapshot_are_one_cluster(tmp_path):
  ids = [f"held-out/{38 + i % 3}/name{i}/river" for i in range(10)]
  episodes = [
    e | {"question_id": ids[int(e["question_id"][1:])]} for e in played()
  ]
  one = outcomes.of(episodes, row="r", seed=1, settings="")
  assert one.clusters == (4, 3, 3)
  outcomes.write(tmp_path / "o.jsonl", [one])
  (again,) = outcomes.read(tmp_path / "o.jsonl")
  found = outcomes.sums([again]).linearised(("accuracy",))
  theirs = aj.measures.sums(episodes, ("accuracy",)).linearised(("accuracy",))
  np.testing.assert_allclose(found.cluster[0], theirs.cluster[0])
  # By hand: 2 of 8 right, 0 of 6 and 3 of 6; without one, by the rest.
  without = np.array([3 / 12, 5 / 14, 2 / 14])
  np.testing.assert_allclose(
    found.cluster[0][:, 0], 5 / 20 - without, atol=1e-12
  )
  assert made().clusters == (1,) * 10


def test_trainings_of_a_row_agree_in_what_they_are():
  assert outcomes.sums([made(), made(seed=43)]).values.shape == (2, 10, 2, 5)
  for changes, found in (
    ({"settings": "t"}, "seeds 42 and 43 have different settings, s and t"),
    ({"budgets": (2,)}, "different budgets"),
  ):
    with pytest.raises(ValueError, match=found):
      outcomes.sums([made(), made(seed=43, **changes)])


def test_what_is_not_an_evaluation_of_one_training_is_refused():
  failed = {"outcome": "failed"}
  for episodes, found in (
    (played()[1:], r"asked \[0, 1\] times at a budget, expected"),
    ([*played(), episode("q0", 0, seed=8)], r"asked \[1, 2\] times"),
    ([*played()[1:], played()[0] | failed], "a failed episode"),
  ):
    with pytest.raises(ValueError, match=found):
      outcomes.of(episodes, row="r", seed=1, settings="")


def test_a_damaged_file_is_refused_by_line(tmp_path):
  path = tmp_path / "outcomes.jsonl"
  outcomes.write(path, [made(), made(seed=43)])
  lines = path.read_text().splitlines()
  cut = json.loads(lines[1])
  cut["searches"]["2"] = cut["searches"]["2"][1:]
  for second, found in (
    (lines[1][:-20], "line 2: not the outcomes"),
    (json.dumps(cut), "line 2: .*budget 2: expected 10 questions"),
    ("{}", "line 2: .*does not say which questions share a snapshot"),
    (lines[0], "line 2: found anysearch with seed 42 a second time"),
  ):
    path.write_text(f"{lines[0]}\n{second}\n")
    with pytest.raises(ValueError, match=found):
      outcomes.read(path)
