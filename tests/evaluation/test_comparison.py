"""Paired comparisons of rows: values, families, trainings."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import study

from anysearch_jax.evaluation import columns, comparison, inference, metrics


def _row(label, results, *, seed=1, outcome="answered"):
  """Builds a row with a budget of 2 from {question: (em, searches)}."""
  (base,) = study.row("a", questions=1, budgets=(2,), plain=True).episodes
  base |= {"seed": seed, "outcome": outcome, "dataset": "world"}
  return metrics.Row(
    label,
    tuple(
      base | {"question_id": question, "em": em, "searches": searches}
      for question, (em, searches) in results.items()
    ),
  )


def test_the_early_stopping_table_by_hand():
  ours = _row("a", {"q1": (1, 1), "q2": (0, 1), "q3": (0, 2), "q4": (1, 0)})
  theirs = _row("b", {"q1": (0, 2), "q2": (1, 2), "q3": (1, 2), "q4": (1, 2)})
  table = comparison.compare(comparison.pair(ours, theirs))
  assert [line.budget for line in table] == [2, None]
  line = table[0]
  assert (line.n, line.wins, line.losses) == (4, 1, 2)
  assert line.losses_unused == 1  # q2 left one search of two; q3 used both.
  assert line.net == -1
  assert line.difference.value == pytest.approx(-0.25)
  assert line.tp_difference.value == pytest.approx(2 / 4 - 3 / 8)


def test_what_cannot_be_paired_is_left_out_and_counted():
  ours = _row("a", {f"q{i}": (1, 1) for i in range(5)})
  theirs = _row("b", {f"q{i}": (0, 1) for i in range(3)})
  for one, other in ((ours, theirs), (theirs, ours)):
    pairs = comparison.pair(one, other)
    assert (len(pairs), pairs.unpaired, pairs.failed) == (3, 2, 0)
  failed = _row("b", {f"q{i}": (0, 1) for i in range(5)}, outcome="failed")
  pairs = comparison.pair(ours, failed)
  assert (pairs.failed, len(pairs)) == (5, 0)
  assert comparison.compare(pairs) == []


@pytest.mark.parametrize(
  ("questions", "seed", "sentence"),
  [
    (("q2", "q3", "q4"), 1, "1 only in the first, 2 only in the second"),
    (("q1", "q2"), 2, "no budget and seed in common"),
  ],
)
def test_rows_that_cannot_be_compared_are_rejected(questions, seed, sentence):
  ours = _row("a", {"q1": (1, 1), "q2": (1, 1)})
  theirs = _row("b", dict.fromkeys(questions, (0, 1)), seed=seed)
  with pytest.raises(ValueError, match=sentence):
    comparison.pair(ours, theirs)


def test_pairs_equal_a_naive_join():
  ours = study.row("a", questions=12, budgets=(0, 1, 3), seeds=(3, 1))
  theirs = study.row("b", questions=9, budgets=(3, 0, 5), seeds=(1, 2))
  left, right = (
    {columns.key_of(e): e for e in row.episodes if e["outcome"] != "failed"}
    for row in (ours, theirs)
  )
  common = sorted(left.keys() & right.keys())
  pairs = comparison.pair(ours, theirs)
  assert len(pairs) == len(common) > 10
  for side, own in ((pairs.ours, left), (pairs.theirs, right)):
    ids = side.ids[side.question]
    found = zip(ids, side.budget, side.seed, side.em, side.searches)
    assert list(found) == [
      (*key, own[key]["em"], own[key]["searches"]) for key in common
    ]


def _rows(*labels, sets=("nq",), **size):
  rows = []
  for place, label in enumerate(labels):
    row = study.row(label, skill=0.9 - 0.3 * place, **size)
    found = [
      e | {"dataset": sets[int(e["question_id"][1:]) % 3 % len(sets)]}
      for e in row.episodes
    ]
    rows.append(metrics.Row(label, tuple(found)))
  return rows


def _pairwise(rows, *names):
  return comparison.pairwise(rows, names or comparison.MEASURES)


def _by_cell(lines):
  return {(d.measure, d.dataset, d.budget): d for d in lines}


def test_lines_of_one_set_are_the_comparison_of_two_rows():
  ours, theirs = _rows("a", "b", questions=60, budgets=(0, 2, 4))
  found = _by_cell(_pairwise([ours, theirs]))
  table = comparison.compare(comparison.pair(ours, theirs))
  for line in table:
    accuracy = found["accuracy", None, line.budget]
    assert accuracy.n == line.n
    assert accuracy.estimate == pytest.approx(line.difference)
    tp, wanted = found["tp", None, line.budget].estimate, line.tp_difference
    assert tp == (pytest.approx(wanted) if line.budget != 0 else wanted)
  assert {key[1] for key in found} == {None}
  # Undefined: without a search, and without a recorded cost.
  assert found["tp", None, 0].estimate == (None, None, None)
  # One training each decides nothing.
  assert {line.p for line in found.values()} == {None}
  assert {line.adjusted for line in found.values()} == {None}
  assert found["cost", None, 2].estimate.value is None


def test_all_sets_together_are_averaged_by_set():
  names = ("musique", "nq")
  ours, theirs = _rows("a", "b", sets=names, questions=60, budgets=(1, 3))
  found = _by_cell(_pairwise([ours, theirs]))
  assert list(dict.fromkeys(key[1] for key in found)) == [None, "nq", "musique"]
  for measure, budget in itertools.product(("accuracy", "tp"), (None, 1, 3)):
    own = [found[measure, name, budget].estimate.value for name in names]
    together = found[measure, None, budget]
    assert together.estimate.value == pytest.approx(np.mean(own))
    assert together.n == sum(found[measure, s, budget].n for s in names)
  sizes = {found["accuracy", name, 1].n for name in names}
  assert len(sizes) == 2


def test_identical_rows_do_not_differ():
  (row,) = _rows("a", questions=30, budgets=(2,))
  lines = _pairwise([row, metrics.Row("again", row.episodes)])
  for line in lines:
    if line.measure != "cost":  # These episodes record no cost.
      assert line.estimate.value == 0
      # Many questions without a change do not rule out changes on others.
      answered = line.measure in ("accuracy", "tp")
      assert (line.estimate.low < 0 < line.estimate.high) == answered


def test_holm_is_over_all_pairs_at_one_level_of_detail():
  size = {"questions": 60, "budgets": (1, 2, 3), "seeds": (1,)}
  rows = [
    study.trained(label, 3, skill=skill, **size)
    for label, skill in (("a", 0.9), ("b", 0.6), ("c", 0.3))
  ]
  lines = _pairwise(rows, "accuracy", "searches")
  assert [(d.ours, d.theirs) for d in lines[:: len(lines) // 3]] == [
    ("a", "b"),
    ("a", "c"),
    ("b", "c"),
  ]
  for measure, pooled in itertools.product(
    ("accuracy", "searches"), (True, False)
  ):
    family = [
      d for d in lines if d.measure == measure and (d.budget is None) == pooled
    ]
    assert len(family) == (3 if pooled else 9)
    np.testing.assert_allclose(
      [d.adjusted for d in family], inference.holm([d.p for d in family])
    )
  # A real difference is found.
  line = next(d for d in lines if (d.ours, d.theirs) == ("a", "c"))
  assert line.budget is None and line.estimate.above() and line.adjusted < 0.05


@pytest.mark.parametrize(
  ("ours", "theirs", "pairs", "unpaired"),
  [(3, 3, 3, 0), (3, 1, 3, 0), (1, 3, 3, 0), (3, 2, 2, 20)],
)
def test_trainings_of_one_seed_are_matched(ours, theirs, pairs, unpaired):
  """A single training is matched with each; others in their order."""
  size = {"questions": 10, "budgets": (1, 3), "seeds": (1,)}
  rows = [study.trained("a", ours, **size), study.trained("b", theirs, **size)]
  found = comparison.pair(*rows)
  assert (found.unpaired, len(found) + found.failed) == (unpaired, pairs * 20)
  (line,) = (d for d in _pairwise(rows, "accuracy") if d.budget == 1)
  assert (line.p is None) == (min(ours, theirs) < 3)


def test_a_training_meets_itself_in_any_order():
  ours = study.trained("a", 3, seeds=(1,), questions=10, budgets=(1, 3))
  again = metrics.Row("again", tuple(reversed(ours.episodes)))
  pairs = comparison.pair(ours, again)
  names = [
    [side.runs[code] for code in side.run]
    for side in (pairs.ours, pairs.theirs)
  ]
  assert names[0] == names[1]
  assert (pairs.ours.em == pairs.theirs.em).all()


def test_several_trainings_are_compared_as_methods():
  size = {"questions": 60, "budgets": (2,), "seeds": (1,)}
  rows = [
    study.trained("a", 4, skill=0.9, **size),
    study.trained("b", 4, skill=0.2, **size),
  ]
  found = _by_cell(_pairwise(rows, "accuracy", "searches"))
  line = found["accuracy", None, 2]
  assert line.trainings == (4, 4)
  assert line.estimate.above() and line.p < 0.05
  # The p value belongs to the interval.
  for line in found.values():
    outside = line.estimate.above() or line.estimate.below()
    assert outside == (line.p < 0.05)
