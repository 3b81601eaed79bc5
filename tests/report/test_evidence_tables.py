"""Tables over trainings, against means and t tests by hand."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from scipy import stats

from anysearch_jax.evaluation import outcomes
from anysearch_jax.report import evidence_tables, tables

BUDGETS = (0, 1, 4)
LABELS = {"a": "AnySearch", "b": "Other", "c": "Alike"}


def training(row, seed, rate, *, searches=1, questions=400, digest="q"):
  rng = np.random.default_rng([seed, questions, int(1e6 * rate)])
  right = rng.random((len(BUDGETS), questions)) < rate
  made = np.full((len(BUDGETS), questions), searches)
  made[0] = 0
  return outcomes.Outcomes(row, seed, "s", digest, BUDGETS, right, made)


@pytest.fixture(scope="module")
def rows():
  # Rates of trainings differ by more than 400 questions blur them.
  return {
    "a": [training("a", s, r) for s, r in enumerate((0.70, 0.72, 0.74))],
    "b": [
      training("b", s, r, searches=2) for s, r in enumerate((0.5, 0.53, 0.51))
    ],
    "c": [training("c", s, r) for s, r in enumerate((0.71, 0.73, 0.72))],
  }


def test_the_table_has_the_means_of_each_budget_and_pooled(rows):
  found = evidence_tables.accuracy(rows, LABELS)
  assert [c.full_name for c in found.columns] == [
    "trainings",
    "B = 1",
    "B = 4",
    "pooled",
    "TP",
    "searches",
  ]
  for line, name in zip(found.lines, rows, strict=True):
    right = np.stack([one.right for one in rows[name]])
    cells = [cell.value for cell in line.cells]
    assert line.keys == (LABELS[name],)
    assert cells[0] == 3
    np.testing.assert_allclose(cells[1:3], right.mean(axis=(0, 2))[1:])
    pooled = right[:, 1:].mean()
    np.testing.assert_allclose(cells[3], pooled)
    searches = 2 if name == "b" else 1
    np.testing.assert_allclose(cells[4:], [pooled / searches, searches])
    low, high = line.cells[3].low, line.cells[3].high
    assert low < pooled < high
  assert "AnySearch" in tables.to_markdown(found)


def test_a_difference_is_about_that_of_a_t_test_over_trainings(rows):
  effect = evidence_tables.difference(rows["a"], rows["b"], "accuracy")
  ours, theirs = (
    np.array([one.right[1:].mean() for one in rows[name]]) for name in "ab"
  )
  assert effect.estimate.value == pytest.approx(ours.mean() - theirs.mean())
  plain = stats.ttest_rel(ours, theirs)
  assert effect.p < 0.02 and plain.pvalue < 0.02
  # Questions are drawn too, but their part in the spread between trainings is
  # not counted twice.
  half = (effect.estimate.high - effect.estimate.low) / 2
  narrow = plain.confidence_interval()
  assert 0.8 < half / ((narrow.high - narrow.low) / 2) < 2.5


def test_trainings_with_equal_seeds_are_paired(rows):
  better = [
    dataclasses.replace(one, row="d", right=one.right.copy())
    for one in rows["a"]
  ]
  for one in better:
    # Ten more right answers of each: the rows differ by little, but always.
    wrong = np.argwhere(~one.right[1:])[:10]
    one.right[1:][tuple(wrong.T)] = True
  paired = evidence_tables.difference(better, rows["a"], "accuracy")
  assert paired.estimate.value == pytest.approx(10 / 800)
  assert 0 < paired.estimate.low and paired.p < 0.01
  # Other seeds: as independent trainings, whose spread hides the difference.
  others = [dataclasses.replace(one, seed=one.seed + 10) for one in better]
  apart = evidence_tables.difference(others, rows["a"], "accuracy")
  assert apart.estimate.value == pytest.approx(10 / 800)
  assert apart.p > 0.3
  # A training without a partner does not count, where others have one.
  alone = training("d", 7, 0.1)
  more = evidence_tables.difference([*better, alone], rows["a"], "accuracy")
  assert more.estimate == paired.estimate
  claim = evidence_tables.Claim("more right", "d", "a", "accuracy")
  (found,) = evidence_tables.verdicts(
    [claim], {"a": rows["a"], "d": [*better, alone]}
  )
  assert found.trainings == 3 and found.word == "reproduced"


def test_every_row_is_compared_with_the_first(rows):
  found = evidence_tables.against("a", rows, LABELS)
  assert [line.keys for line in found.lines] == [("Other",), ("Alike",)]
  other, alike = (
    dict(zip([c.full_name for c in found.columns], line.cells, strict=True))
    for line in found.lines
  )
  assert other["accuracy difference"].high < 0
  assert other["accuracy p"].value < 0.05
  assert (
    alike["accuracy difference"].low < 0 < alike["accuracy difference"].high
  )
  assert alike["accuracy p"].value > 0.05
  assert other["searches difference"].value == pytest.approx(1)


def test_claims_are_reproduced_refuted_or_not_resolved(rows):
  claims = [
    evidence_tables.Claim("more right", "a", "b", "accuracy"),
    evidence_tables.Claim("at tight budgets", "a", "b", "accuracy", (1,)),
    evidence_tables.Claim("the reverse", "b", "a", "tp"),
    evidence_tables.Claim("alike", "a", "c", "accuracy"),
    evidence_tables.Claim("absent", "a", "d", "accuracy"),
  ]
  found = evidence_tables.verdicts(claims, rows)
  assert [one.word for one in found] == [
    "reproduced",
    "reproduced",
    "refuted",
    "not resolved",
    "not run",
  ]
  # Holm: the largest of four p values is not multiplied, the smallest by 4.
  alone = [
    evidence_tables.difference(rows[c.more], rows[c.less], c.measure, c.budgets)
    for c in claims[:4]
  ]
  smallest = min(range(4), key=lambda i: alone[i].p)
  assert found[smallest].p == pytest.approx(4 * alone[smallest].p)
  assert found[3].p == pytest.approx(alone[3].p)
  page = evidence_tables.claims_table(found)
  assert "| more right (accuracy) | +0.199 [" in page
  assert "not resolved (detectable: 0.1" in page
  with pytest.raises(ValueError, match=r"no answers at budgets \[8\]"):
    evidence_tables.verdicts(
      [evidence_tables.Claim("", "a", "b", "tp", (8,))], rows
    )


def test_a_single_training_decides_no_claim(rows):
  claims = [
    evidence_tables.Claim("more right", "a", "b", "accuracy"),
    evidence_tables.Claim("one of them", "a", "single", "accuracy"),
  ]
  single = {"single": rows["b"][:1]}
  found = evidence_tables.verdicts(claims, rows | single)
  assert [one.word for one in found] == ["reproduced", "one training"]
  # It is no claim that Holm's correction counts.
  assert found[0].p == evidence_tables.verdicts(claims[:1], rows)[0].p
  assert found[1].p is None and found[1].effect is not None


def test_rows_of_other_questions_are_not_compared(rows):
  other = [training("b", 0, 0.5, digest="other")]
  with pytest.raises(ValueError, match="a and b were asked different"):
    evidence_tables.difference(rows["a"], other, "tp")
