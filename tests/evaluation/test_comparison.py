"""Paired comparisons, and the verdicts based on them."""

from __future__ import annotations

import numpy as np
import pytest
import study

from anysearch_jax.evaluation import columns, comparison, metrics, verdicts


def _row(
  label, results, *, budget=2, seed=1, outcome="answered", dataset="world"
):
  """Builds a row from {question: (em, searches)}."""
  return metrics.Row(
    label,
    tuple(
      {
        "question_id": question,
        "budget": budget,
        "seed": seed,
        "em": em,
        "searches": searches,
        "outcome": outcome,
        "scaffold": False,
        "answer": "",
        "golden_answers": ["x"],
        "format": 1,
        "queries": [],
        "spans": [],
        "violation": False,
        "generated_tokens": 10,
        "retrieved_tokens": 20 * searches,
        "total_tokens": 10 + 20 * searches,
        "dataset": dataset,
      }
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


def test_failed_pairs_are_left_out_and_counted():
  ours = _row("a", {"q1": (1, 1)})
  theirs = _row("b", {"q1": (0, 1)}, outcome="failed")
  pairs = comparison.pair(ours, theirs)
  assert (pairs.failed, pairs.questions) == (1, 0)
  assert comparison.compare(pairs) == []


def test_subset_is_compared_on_common_questions():
  ours = _row("a", {f"q{i}": (1, 1) for i in range(5)})
  theirs = _row("b", {f"q{i}": (0, 1) for i in range(3)})
  for one, other in ((ours, theirs), (theirs, ours)):
    pairs = comparison.pair(one, other)
    assert (len(pairs), pairs.unpaired) == (3, 2)


def test_rows_on_different_questions_are_rejected():
  ours = _row("a", {"q1": (1, 1), "q2": (1, 1)})
  theirs = _row("b", {"q2": (0, 1), "q3": (0, 1), "q4": (0, 1)})
  with pytest.raises(ValueError, match="1 only in the first, 2 only in the"):
    comparison.pair(ours, theirs)


def test_rows_without_common_episodes_are_rejected():
  with pytest.raises(ValueError, match="no budget and seed in common"):
    comparison.pair(_row("a", {"q": (1, 1)}), _row("b", {"q": (1, 1)}, seed=2))


def test_budgets_of_one_row_only_are_ignored():
  ours = study.row("a", budgets=(0, 1, 2), questions=5)
  theirs = study.row("b", budgets=(1, 2, 3), questions=5)
  pairs = comparison.pair(ours, theirs)
  assert set(np.unique(pairs.budget)) <= {1, 2}
  assert pairs.unpaired == 0


def test_the_early_stopping_table_of_one_set():
  def both(label, em):
    nq = _row(label, {"nq/1": (em, 1), "nq/2": (em, 2)}, dataset="nq")
    musique = _row(label, {"musique/1": (1 - em, 1)}, dataset="musique")
    return metrics.Row(label, nq.episodes + musique.episodes)

  pairs = comparison.pair(both("a", 0), both("b", 1))
  parts = pairs.by_dataset()
  assert list(parts) == ["nq", "musique"]
  (line, _) = comparison.compare(parts["nq"])
  assert (line.n, line.losses, line.losses_unused, line.net) == (2, 2, 1, -2)
  (line, _) = comparison.compare(pairs)
  assert (line.n, line.wins, line.losses) == (3, 1, 2)


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
    found = list(
      zip(
        side.ids[side.question],
        side.budget,
        side.seed,
        side.em,
        side.searches,
      )
    )
    assert found == [
      (*key, own[key]["em"], own[key]["searches"]) for key in common
    ]


def test_pairing_narrows_the_interval():
  rng = np.random.default_rng(0)
  hard = rng.random(400) < 0.5
  nudge = rng.random(400) < 0.05
  ours = {
    f"q{i}": (int(not h or n), 1) for i, (h, n) in enumerate(zip(hard, nudge))
  }
  theirs = {f"q{i}": (int(not h), 1) for i, h in enumerate(hard)}
  pairs = comparison.pair(_row("a", ours), _row("b", theirs))
  (effect,) = comparison.differences(pairs, pools=[[2]])
  found = effect.estimate
  assert found.above()
  # Unpaired, the difference of two rates near 1/2 has a half-width of 0.07.
  assert found.high - found.low < 0.07


def test_knowledge_of_a_policy_that_searches_what_it_lacks():
  found = comparison.knowledge(
    study.row("a", questions=80, thrift=0.1),
  )
  assert found["known"].estimate.value < 0.2
  assert found["unknown"].estimate.value > 0.9
  assert found["gap"].estimate.above()
  assert found["stale"].n > 0
  assert comparison.knowledge(study.row("a", questions=3, plain=True)) == {}


def _verdicts(system, *others, controls=()):
  compared = {}
  for row in others:
    pairs = comparison.pair(system, row)
    compared[row.label] = pairs, comparison.compare(pairs)
  found = verdicts.verdicts(
    [system, *others],
    controls,
    compared=compared,
    recalled=comparison.knowledge(system),
  )
  return [v.met for v in found], found


def test_verdicts_of_a_good_policy():
  good = study.row("good", skill=0.9, questions=150, run="a")
  scaffolded = tuple(e | {"scaffold": True} for e in good.episodes)
  met, found = _verdicts(
    good,
    study.row("control", skill=0.5, thrift=0.95, questions=150, run="b"),
    metrics.Row("with", scaffolded, "a"),
    controls=["control"],
  )
  assert met == [True, True, True, True, True]
  assert [len(v.numbers) for v in found] == [4, 1, 4, 1, 1]
  assert all("only" in v.scope for v in found)


def test_few_questions_leave_equivalence_undecided():
  size = {"skill": 0.9, "questions": 12, "budgets": (0, 1, 5)}
  met, found = _verdicts(
    study.row("good", run="a", **size),
    study.row("control", run="b", **size),
    study.row("with", run="a", scaffold=True, **size),
    controls=["control"],
  )
  assert met[3:] == [None, None]
  assert all(v.text.startswith("Undecided: ") for v in found[3:])
  # A difference of the margin would not be found.
  assert all(v.numbers[0].detectable > verdicts.MARGIN for v in found[3:])


def _of_run(row, run):
  return tuple(e | {"run": run} for e in row.episodes)


def test_rows_of_several_trainings_are_judged_as_methods():
  size = {"questions": 30, "budgets": (0, 1, 5)}

  def trained(label, **policy):
    rows = [study.row(f"{label}{i}", **size, **policy) for i in range(3)]
    return metrics.Row(
      label, sum((_of_run(r, f"{label}{i}") for i, r in enumerate(rows)), ())
    )

  _, found = _verdicts(
    trained("good", skill=0.9),
    trained("control", skill=0.2),
    controls=["control"],
  )
  assert {v.scope for v in found} == {""}
  _, found = _verdicts(
    trained("good", skill=0.9), study.row("one", **size), controls=["one"]
  )
  assert found[0].scope == ""
  assert "one has one training" in found[1].scope
  # Each training has its own seed, and the rows share one of them.
  ours, theirs = (
    metrics.Row(
      label,
      sum(
        (
          _of_run(study.row(label, seeds=(seed,), **size), f"{label}{seed}")
          for seed in seeds
        ),
        (),
      ),
    )
    for label, seeds in (("good", (1, 2)), ("control", (2, 3)))
  )
  _, found = _verdicts(ours, theirs, controls=["control"])
  assert found[0].scope == ""
  assert "good, control have one training" in found[1].scope


def test_verdicts_of_a_bad_policy_say_so():
  met, found = _verdicts(
    study.row("bad", skill=0.3, thrift=0.95, questions=150, run="a"),
    study.row("control", skill=0.95, questions=150, run="b"),
    study.row("with", skill=0.95, questions=150, run="a", scaffold=True),
    controls=["control"],
  )
  assert met[1:] == [False, False, False, False]
  assert all(v.text.startswith("Not met: ") for v in found[1:])
  assert "below control" in found[4].text


def test_searching_without_gain_is_not_met():
  flat = study.row("flat", questions=40)
  episodes = tuple(e | {"em": 1, "outcome": "answered"} for e in flat.episodes)
  met, _ = _verdicts(metrics.Row("flat", episodes))
  assert met[0] is False


def test_unmeasured_claims_are_not_judged():
  met, found = _verdicts(study.row("a", questions=8, budgets=(5,), plain=True))
  assert met == [None] * 5
  assert all(v.text.startswith("Not judged: ") for v in found)


def test_the_scaffold_row_is_of_the_same_policy():
  system = study.row("a", questions=8, budgets=(1,), run="a")
  other = study.row("b", questions=8, budgets=(1,), run="b", scaffold=True)
  met, _ = _verdicts(system, other)
  assert met[3] is None
  assert isinstance(verdicts.Verdict("c", None, "t").numbers, tuple)
