"""Tables over trainings, against means and t tests by hand."""

from __future__ import annotations

import dataclasses
import itertools
import pathlib
import re

import commands
import numpy as np
import pytest

from research import claims, outcomes, study

BUDGETS = (0, 1, 4)
LABELS = {"a": "AnySearch", "b": "Other", "c": "Alike"}
EVIDENCE_PAGE = pathlib.Path(__file__).parents[2] / "docs" / "evidence.md"


def training(row, seed, rate, *, searches=1, questions=400, digest="q"):
  rng = np.random.default_rng([seed, questions, int(1e6 * rate)])
  right = rng.random((len(BUDGETS), questions)) < rate
  made = np.full((len(BUDGETS), questions), searches)
  made[0] = 0
  clusters = (1,) * questions
  return outcomes.Outcomes(
    row, claims.FIRST_SEED + seed, "s", digest, clusters, BUDGETS, right, made
  )


def decide(asked, rows):
  return claims.decide(asked, rows, trainings=3)


@pytest.fixture(scope="module")
def rows():
  # Rates of trainings differ by more than 400 questions blur them.
  return {
    "a": [training("a", s, r) for s, r in enumerate((0.70, 0.72, 0.74))],
    "b": [
      training("b", s, r, searches=2) for s, r in enumerate((0.5, 0.52, 0.54))
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
    assert line["B = 1"] == f"{right[:, 1].mean():.3f}"
    assert line["B = 4"] == f"{right[:, 2].mean():.3f}"
    pooled, searches = right[:, 1:].mean(), 2 if name == "b" else 1
    assert line["pooled"].startswith(f"{pooled:.3f} [")
    assert line["TP"].startswith(f"{pooled / searches:.3f} [")
    assert line["searches"] == f"{searches}.00 [{searches}.00, {searches}.00]"


def with_ten_more_right(trainings):
  """Returns row `d`: the same trainings with ten more right answers each."""
  better = [
    dataclasses.replace(one, row="d", right=one.right.copy())
    for one in trainings
  ]
  for one in better:
    wrong = np.argwhere(~one.right[1:])[:10]
    one.right[1:][tuple(wrong.T)] = True
  return better


def test_trainings_of_two_rows_are_independent_also_with_equal_seeds(rows):
  # By pairs of seeds the difference would be certain.
  better = with_ten_more_right(rows["a"])
  effect = claims.difference(better, rows["a"], "accuracy")
  assert effect.estimate.value == pytest.approx(10 / 800)
  assert effect.p > 0.3
  others = [dataclasses.replace(one, seed=one.seed + 10) for one in better]
  assert claims.difference(others, rows["a"], "accuracy") == effect


def test_rows_that_evaluate_the_same_policies_are_paired(rows):
  asked = [claims.Claim("d is above a", "d", "a", "accuracy")]
  by_row = {**rows, "d": with_ten_more_right(rows["a"])}
  for trained_as, is_decided in (({}, False), ({"d": "a"}, True)):
    (finding,) = claims.decide(asked, by_row, 3, trained_as)
    assert finding.effect.estimate.value == pytest.approx(10 / 800)
    assert (finding.word == "reproduced") == is_decided


def test_every_row_is_compared_with_the_first(rows):
  found = cells(claims.against("a", rows, LABELS))
  assert list(found) == ["Other", "Alike"]
  assert found["Other"]["accuracy"].startswith("-0.200 [-0.283, -0")
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
  found = decide(asked, rows)
  assert [one.word for one in found] == [
    "reproduced",
    "reproduced",
    "refuted",
    "not resolved",
    "not decided: 0 of 3 trainings",
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
  # All are listed, in their order, the refuted one too.
  lines = [line.split(" (")[0][2:] for line in page.splitlines()[2:]]
  assert lines == [one.text for one in asked]
  assert "| more right (accuracy) | +0.200 [" in page
  assert "not resolved (detectable: 0.1" in page
  with pytest.raises(ValueError, match=r"no answers at budgets \[8\]"):
    decide([claims.Claim("", "a", "b", "tp", (8,))], rows)


def test_a_claim_is_decided_once_all_its_trainings_are_there(rows):
  """The rule is fixed before: no look at fewer, and none at more."""
  more = {
    "a": [*rows["a"], *(training("a", s, 0.72) for s in range(3, 10))],
    "b": [*rows["b"], training("b", 3, 0.5), training("b", 4, 0.5)],
  }
  asked = [claims.Claim("more right", "a", "b", "accuracy")]
  ten = [asked[0]._replace(ten=True)]
  for wanted, found, word in (
    (asked, claims.decide(asked, rows), "not decided: 3 of 5 trainings"),
    (asked, claims.decide(asked, more), "reproduced"),
    (ten, claims.decide(ten, more), "not decided: 5 of 10 trainings"),
    # Fewer than three decide nothing, whatever was planned.
    (asked, claims.decide(asked, rows, 2), "not decided: 2 of 2 trainings"),
    (asked, claims.decide(asked, rows, 1), "not decided: 1 of 1 trainings"),
  ):
    (one,) = found
    assert (one.claim, one.word) == (wanted[0], word)
    assert np.isnan(one.p) == (word != "reproduced")
  # Trainings beyond the five, and claims that wait, change nothing.
  (plain,) = claims.decide(asked, more)
  five = {name: found[:5] for name, found in more.items()}
  assert claims.decide([*asked, *ten], five)[0] == plain
  more["b"] += [training("b", s, 0.5) for s in range(5, 10)]
  later, tenth = claims.decide([*asked, *ten], more)
  assert later.effect == plain.effect and tenth.word == "reproduced"
  assert tenth.effect.trainings == 10
  page = claims.claims_table([tenth])
  assert "| more right (accuracy, 10 trainings) | +0.2" in page


def test_a_page_has_rows_of_equal_seeds_and_names_the_others(rows):
  base = [claims.Row(n, label, "t") for n, label in LABELS.items()]
  family = {"Of a and b": [claims.Claim("more", "a", "b", "accuracy")]}
  found = [*rows["a"], *rows["b"], *rows["c"][:2], training("a", 3, 0.1)]
  page = claims.page("T", base, family, found, 3)
  assert "a training with each of the seeds 42, 43, 44." in page
  assert "Left out, with fewer of these trainings: Alike (2)." in page
  assert "| Alike |" not in page
  # The fourth training of a row does not count.
  assert claims.accuracy({n: rows[n] for n in "ab"}, LABELS) in page
  assert "the 1 claims of this table that are decided, with 3 tr" in page
  assert "Left out" not in claims.page("T", base, family, found[:6], 3)


def test_rows_of_other_questions_are_not_compared(rows):
  other = [training("b", 0, 0.5, digest="other")]
  with pytest.raises(ValueError, match="a and b were asked different"):
    claims.difference(rows["a"], other, "tp")


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
  """Returns the lines of the page of the stored outcomes."""
  root = tmp_path_factory.mktemp("pages")
  said = commands.run(study, "--study=ablations", "--pages", f"--output={root}")
  assert said == ""
  return (root / "evidence.md").read_text().splitlines()


def test_what_the_evidence_page_quotes_is_what_the_outcomes_say(pages):
  quoted = [
    line
    for line in EVIDENCE_PAGE.read_text().splitlines()
    if re.match(r"\| (?!beside)", line) and line.count("[") == 3
  ]
  assert quoted
  known = [re.sub(r"(?<!\d)0\.", ".", line).split(" | ") for line in pages]
  for line in quoted:
    row = line.split(" | ")  # Some of the columns.
    found = [iter(each) for each in known if each[0] == row[0]]
    assert any(all(cell in left for cell in row) for left in found), line


def test_claims_are_about_rows():
  base = study.load_config("configs/quickstart.py")
  for kind in study.STUDIES.values():
    names = [row.name for row in kind.rows(base)]
    assert len(set(names)) == len(names)
    for claim in itertools.chain.from_iterable(kind.CLAIMS.values()):
      assert {claim.more, claim.less} <= {*names}, claim.text
