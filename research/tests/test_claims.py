"""Tables over trainings, against means and t tests by hand."""

from __future__ import annotations

import dataclasses
import itertools
import pathlib

import commands
import numpy as np
import pytest
from scipy import stats

from research import claims, outcomes, study

BUDGETS = (0, 1, 4)
LABELS = {"a": "AnySearch", "b": "Other", "c": "Alike"}
OTHER = "research/other_worlds.py:{}"
EVIDENCE_PAGE = pathlib.Path(__file__).parents[2] / "docs" / "evidence.md"


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


def cells(table):
  """Returns the cells of a table in Markdown, by row and column."""
  head, _, *lines = (
    [cell.strip() for cell in line.split("|")[1:-1]]
    for line in table.splitlines()
  )
  return {line[0]: dict(zip(head, line, strict=True)) for line in lines}


def test_the_table_has_the_means_of_each_budget_and_pooled(rows):
  found = cells(claims.accuracy(rows, LABELS))
  for name, label in LABELS.items():
    right = np.stack([one.right for one in rows[name]])
    line = found[label]
    assert line["trainings"] == "3"
    assert line["B = 1"] == f"{right[:, 1].mean():.3f}"
    assert line["B = 4"] == f"{right[:, 2].mean():.3f}"
    pooled, searches = right[:, 1:].mean(), 2 if name == "b" else 1
    assert line["pooled"].startswith(f"{pooled:.3f} [")
    assert line["TP"].startswith(f"{pooled / searches:.3f} [")
    assert line["searches"] == f"{searches}.00 [{searches}.00, {searches}.00]"


def test_a_difference_is_about_that_of_a_t_test_over_trainings(rows):
  effect = claims.difference(rows["a"], rows["b"], "accuracy")
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
  paired = claims.difference(better, rows["a"], "accuracy")
  assert paired.estimate.value == pytest.approx(10 / 800)
  assert 0 < paired.estimate.low and paired.p < 0.01
  # Other seeds: as independent trainings, whose spread hides the difference.
  others = [dataclasses.replace(one, seed=one.seed + 10) for one in better]
  apart = claims.difference(others, rows["a"], "accuracy")
  assert apart.estimate.value == pytest.approx(10 / 800)
  assert apart.p > 0.3
  # A training without a partner does not count, where others have one.
  alone = training("d", 7, 0.1)
  more = claims.difference([*better, alone], rows["a"], "accuracy")
  assert more.estimate == paired.estimate
  claim = claims.Claim("more right", "d", "a", "accuracy")
  (found,) = claims.decide([claim], {"a": rows["a"], "d": [*better, alone]})
  assert found.word == "reproduced"


def test_every_row_is_compared_with_the_first(rows):
  found = cells(claims.against("a", rows, LABELS))
  assert list(found) == ["Other", "Alike"]
  assert found["Other"]["accuracy"].startswith("-0.199 [-0.304, -0")
  assert float(found["Other"]["accuracy p"]) < 0.05
  assert "[-" in found["Alike"]["accuracy"]
  assert ", +" in found["Alike"]["accuracy"]
  assert float(found["Alike"]["accuracy p"]) > 0.05
  assert found["Other"]["searches"] == "+1.00 [+1.00, +1.00]"


def test_claims_are_reproduced_refuted_or_not_resolved(rows):
  asked = [
    claims.Claim("more right", "a", "b", "accuracy"),
    claims.Claim("at tight budgets", "a", "b", "accuracy", (1,)),
    claims.Claim("the reverse", "b", "a", "tp"),
    claims.Claim("alike", "a", "c", "accuracy"),
    claims.Claim("absent", "a", "d", "accuracy"),
  ]
  found = claims.decide(asked, rows)
  assert [one.word for one in found] == [
    "reproduced",
    "reproduced",
    "refuted",
    "not resolved",
    "not run",
  ]
  # Holm: the largest of four p values is not multiplied, the smallest by 4.
  alone = [
    claims.difference(rows[c.more], rows[c.less], c.measure, c.budgets)
    for c in asked[:4]
  ]
  smallest = min(range(4), key=lambda i: alone[i].p)
  assert found[smallest].p == pytest.approx(4 * alone[smallest].p)
  assert found[3].p == pytest.approx(alone[3].p)
  page = claims.claims_table(found)
  assert "| more right (accuracy) | +0.199 [" in page
  assert "not resolved (detectable: 0.1" in page
  with pytest.raises(ValueError, match=r"no answers at budgets \[8\]"):
    claims.decide([claims.Claim("", "a", "b", "tp", (8,))], rows)


def test_a_single_training_decides_no_claim(rows):
  asked = [
    claims.Claim("more right", "a", "b", "accuracy"),
    claims.Claim("one of them", "a", "single", "accuracy"),
  ]
  found = claims.decide(asked, rows | {"single": rows["b"][:1]})
  assert [one.word for one in found] == ["reproduced", "one training"]
  # It is no claim that Holm's correction counts.
  assert found[0].p == claims.decide(asked[:1], rows)[0].p
  assert np.isnan(found[1].p) and found[1].effect is not None


def test_rows_of_other_questions_are_not_compared(rows):
  other = [training("b", 0, 0.5, digest="other")]
  with pytest.raises(ValueError, match="a and b were asked different"):
    claims.difference(rows["a"], other, "tp")


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
  """Returns the lines of the pages of all stored outcomes."""
  made = set()
  worlds = ("configs/quickstart.py", *map(OTHER.format, (1, 2)))
  for place, config in enumerate(worlds):
    root, name = tmp_path_factory.mktemp(f"pages{place}"), "ablations"
    said = commands.run(
      study,
      *(f"--study={name}", f"--config={config}", "--pages"),
      f"--output={root}",
    )
    assert said == ""
    made |= {*(root / "evidence.md").read_text().splitlines()}
  return made


def test_what_the_evidence_page_quotes_is_what_the_outcomes_say(pages):
  quoted = [
    line
    for line in EVIDENCE_PAGE.read_text().splitlines()
    if line.startswith("|") and line.count("[") and "](" not in line
  ]
  assert len(quoted) == 7
  assert [line for line in quoted if line not in pages] == []


def test_claims_are_about_rows():
  base = study.load_config("configs/quickstart.py")
  for kind in study.STUDIES.values():
    names = [row.name for row in kind.rows(base)]
    assert len(set(names)) == len(names)
    for claim in itertools.chain.from_iterable(kind.CLAIMS.values()):
      assert {claim.more, claim.less} <= {*names}, claim.text
