"""Comparisons of all pairs of rows: values, families, undefined tests."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import study

from anysearch_jax.evaluation import (
  comparison,
  metrics,
  significance,
)

FEW = {"draws": 300}


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


def _by_cell(lines):
  return {(d.measure, d.dataset, d.budget): d for d in lines}


def test_lines_of_one_set_are_the_comparison_of_two_rows():
  ours, theirs = _rows("a", "b", questions=60, budgets=(0, 2, 4))
  found = _by_cell(comparison.pairwise([ours, theirs], **FEW))
  table = comparison.compare(comparison.pair(ours, theirs))
  for line in table:
    accuracy = found["accuracy", None, line.budget]
    assert accuracy.n == line.n
    assert accuracy.estimate.value == pytest.approx(line.difference.value)
    tp = found["tp", None, line.budget]
    assert tp.estimate.value == (
      None
      if line.tp_difference.value is None
      else pytest.approx(line.tp_difference.value)
    )
  at = next(line for line in table if line.budget == 2)
  assert found["accuracy", None, 2].mcnemar == pytest.approx(
    significance.mcnemar(at.wins, at.losses)
  )
  assert {key[1] for key in found} == {None}


def test_all_sets_together_are_averaged_by_set():
  names = ("musique", "nq")
  ours, theirs = _rows("a", "b", sets=names, questions=60, budgets=(1, 3))
  found = _by_cell(comparison.pairwise([ours, theirs], **FEW))
  assert [d for d in dict.fromkeys(key[1] for key in found)] == [
    None,
    "nq",
    "musique",
  ]
  for measure, budget in itertools.product(("accuracy", "tp"), (None, 1, 3)):
    own = [found[measure, name, budget].estimate.value for name in names]
    together = found[measure, None, budget]
    assert together.estimate.value == pytest.approx(np.mean(own))
    assert together.n == sum(found[measure, s, budget].n for s in names)
  sizes = {found["accuracy", name, 1].n for name in names}
  assert len(sizes) == 2


def test_identical_rows_do_not_differ():
  (row,) = _rows("a", questions=30, budgets=(2,))
  lines = comparison.pairwise([row, metrics.Row("again", row.episodes)], **FEW)
  for line in lines:
    if line.measure != "cost":  # These episodes record no cost.
      assert line.estimate.value == 0
      # Thirty questions without a change do not rule out changes on others.
      answered = line.measure in ("accuracy", "tp")
      assert (line.estimate.low < 0 < line.estimate.high) == answered
      assert line.p == line.adjusted == 1.0
  assert _by_cell(lines)["accuracy", None, 2].mcnemar == 1.0


def test_undefined_differences_are_none():
  ours, theirs = _rows("a", "b", questions=20, budgets=(0,))
  found = _by_cell(comparison.pairwise([ours, theirs], **FEW))
  line = found["tp", None, 0]
  assert line.estimate == (None, None, None)
  assert line.p is line.adjusted is None
  assert found["accuracy", None, None].n == 0
  assert found["accuracy", None, None].estimate.value is None
  assert found["cost", None, 0].estimate.value is None


def test_mcnemar_needs_one_pair_per_question():
  ours, theirs = _rows("a", "b", questions=30, budgets=(2, 3), seeds=(1, 2))
  found = _by_cell(comparison.pairwise([ours, theirs], ("accuracy",), **FEW))
  assert all(line.mcnemar is None for line in found.values())
  assert all(line.p is not None for line in found.values())
  assert found["accuracy", None, 2].n > found["accuracy", None, 2].questions


def test_every_seed_is_reported():
  names = ("musique", "nq")
  size = {"questions": 40, "budgets": (0, 2, 5), "seeds": (7, 3)}
  rows = _rows("a", "b", sets=names, **size)
  found = _by_cell(comparison.pairwise(rows, ("accuracy", "tp"), **FEW))
  for place, seed in enumerate((3, 7)):
    alone = [
      metrics.Row(r.label, tuple(e for e in r.episodes if e["seed"] == seed))
      for r in rows
    ]
    own = _by_cell(comparison.pairwise(alone, ("accuracy", "tp"), **FEW))
    for key, line in found.items():
      value = own[key].estimate.value
      assert line.by_seed[place] == (value and pytest.approx(value)), key
      assert own[key].by_seed == (line.by_seed[place],)


def test_holm_is_over_all_pairs_at_one_level_of_detail():
  rows = _rows("a", "b", "c", questions=40, budgets=(1, 2, 3))
  lines = comparison.pairwise(rows, ("accuracy", "searches"), **FEW)
  assert [(d.ours, d.theirs) for d in lines[:: len(lines) // 3]] == [
    ("a", "b"),
    ("a", "c"),
    ("b", "c"),
  ]
  for measure in ("accuracy", "searches"):
    family = [d for d in lines if d.measure == measure and d.budget is not None]
    assert len(family) == 9
    np.testing.assert_allclose(
      [d.adjusted for d in family],
      significance.holm([d.p for d in family]),
    )
    pooled = [d for d in lines if d.measure == measure and d.budget is None]
    np.testing.assert_allclose(
      [d.adjusted for d in pooled],
      significance.holm([d.p for d in pooled]),
    )


def test_a_real_difference_is_found_and_equal_ones_repeat():
  rows = _rows("a", "b", questions=150, budgets=(2, 4))
  found = comparison.pairwise(rows, ("accuracy",), **FEW)
  line = _by_cell(found)["accuracy", None, None]
  assert line.estimate.above()
  assert line.adjusted < 0.05
  assert found == comparison.pairwise(rows, ("accuracy",), **FEW)


def _trained(label, trainings, *, seeds=(1,), **size):
  """Builds a row of several trainings with the same evaluation seeds."""
  return metrics.Row(
    label,
    tuple(
      e | {"run": f"{label}{i}"}
      for i in range(trainings)
      for e in study.row(f"{label}{i}", seeds=seeds, **size).episodes
    ),
  )


def test_trainings_of_one_seed_are_matched_in_order():
  size = {"questions": 10, "budgets": (1, 3)}
  ours, theirs = _trained("a", 3, **size), _trained("b", 3, **size)
  pairs = comparison.pair(ours, theirs)
  assert pairs.unpaired == 0
  assert (pairs.ours.run == pairs.theirs.run).all()
  assert len(pairs) + pairs.failed == 3 * 20
  # With another order of the same trainings, each still meets itself.
  again = metrics.Row("again", tuple(reversed(ours.episodes)))
  pairs = comparison.pair(ours, again)
  names = [
    [side.runs[code] for code in side.run]
    for side in (pairs.ours, pairs.theirs)
  ]
  assert names[0] == names[1]
  assert (pairs.ours.em == pairs.theirs.em).all()


def test_a_single_training_is_matched_with_each():
  size = {"questions": 10, "budgets": (1, 3)}
  ours, theirs = _trained("a", 3, **size), _trained("b", 1, **size)
  for pairs in (comparison.pair(ours, theirs), comparison.pair(theirs, ours)):
    assert pairs.unpaired == 0
    assert len(pairs) + pairs.failed == 3 * 20
  (line,) = [
    d
    for d in comparison.pairwise([ours, theirs], ("accuracy",), **FEW)
    if d.budget == 1
  ]
  assert line.trainings == (3, 1)
  assert line.between is None


def test_trainings_that_cannot_be_matched_are_counted():
  size = {"questions": 10, "budgets": (1,)}
  pairs = comparison.pair(_trained("a", 3, **size), _trained("b", 2, **size))
  assert pairs.unpaired == 10
  assert len(pairs) + pairs.failed == 20


def test_several_trainings_are_compared_as_methods():
  size = {"questions": 60, "budgets": (2,)}
  rows = [
    _trained("a", 4, skill=0.9, **size),
    _trained("b", 4, skill=0.2, **size),
  ]
  found = _by_cell(comparison.pairwise(rows, ("accuracy", "searches"), **FEW))
  line = found["accuracy", None, 2]
  assert line.trainings == (4, 4)
  # All trainings of one row are better: one of 70 ways, doubled.
  assert line.between == pytest.approx(2 / 70)
  assert line.estimate.above() and line.p < 0.05
  # The p value belongs to the interval.
  for line in found.values():
    outside = line.estimate.above() or line.estimate.below()
    assert outside == (line.p < 0.05)
  assert line.mcnemar is None


def test_detectable_effects_shrink_with_the_questions():
  found = []
  for questions in (30, 120):
    rows = _rows("a", "b", questions=questions, budgets=(2,))
    found.append(_by_cell(comparison.pairwise(rows, ("accuracy",), **FEW)))
  few, many = (f["accuracy", None, 2].detectable for f in found)
  assert few == pytest.approx(2 * many, rel=0.4)
