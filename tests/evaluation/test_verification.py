"""How often what passages say is checked: by hand, then as shares by budget."""

from __future__ import annotations

import pytest
import study

from anysearch_jax.evaluation import columns, episodes, verification

FACT = {"entity": "kal", "relation": "mayor", "alternative": "head"}
FILLER = ("kal", "here once")


def passages(*found):
  docs = "\n".join(
    f"Doc {rank}(Title: {title}) {text}"
    for rank, (title, text) in enumerate(found, 1)
  )
  return f"\n\n<information>{docs}</information>\n\n"


def episode(searches, *, budget=3, outcome="answered", question="q", **changes):
  """Makes an episode of (query, observation) pairs; the answer is `tir`."""
  spans = []
  for query, told in searches:
    spans += [("model", f"<search>{query}</search>"), ("environment", told)]
  spans.append(("model", "<answer>tir</answer>"))
  (like,) = study.row("a", questions=1, budgets=(0,)).episodes
  return {
    **like,
    "question_id": question,
    "golden_answers": ["Tir"],
    "budget": budget,
    "spans": [{"author": a, "text": text} for a, text in spans],
    "queries": [query for query, _ in searches],
    "searches": len(searches),
    "outcome": outcome,
    "metadata": {"facts": [FACT]},
    **changes,
  }


RIGHT = ("kal mayor", passages(("kal", "mayor tir once"), FILLER))
MISSED = ("kal mayor", passages(FILLER, ("ton", "mayor nir")))
TWO = ("kal head", passages(("kal", "head tir once"), ("kal", "head nir also")))
VERDICT = ("kal verdict", passages(("kal", "verdict tir confirmed")))
ELSEWHERE = ("ton mayor", passages(("ton", "mayor nir")))


@pytest.mark.parametrize(
  "searches, expected",
  [
    ([RIGHT], (1, 0, 0, 0)),
    ([RIGHT, ELSEWHERE], (1, 1, 0, 0)),
    ([MISSED, RIGHT], (1, 0, 0, 0)),
    # The third search of three cannot be checked.
    ([MISSED, MISSED, RIGHT], (0, 0, 0, 0)),
    ([MISSED, MISSED, TWO], (0, 0, 0, 0)),
    ([TWO], (1, 0, 1, 0)),
    ([TWO, VERDICT], (1, 1, 1, 1)),
    # Another search follows, but about something else.
    ([TWO, ELSEWHERE], (1, 1, 1, 0)),
    ([], (0, 0, 0, 0)),
  ],
)
def test_checks_by_hand(searches, expected):
  assert episodes.checks(episode(searches)) == expected


def test_what_is_no_decision_does_not_count():
  ended = {"outcome": "truncated"}
  assert not any(episodes.checks(episode([TWO, VERDICT], **ended)))
  # One observation is missing: which search it was of is not known.
  lost = episode([TWO, ("kal mayor", "\nnothing\n")])
  assert not any(episodes.checks(lost))


def test_two_values_are_of_the_fact_that_was_asked_for():
  others = passages(("kal", "river tir"), ("kal", "river nir"))
  twice = passages(("kal", "mayor tir once"), ("kal", "mayor tir also"))
  title = passages(("ton", "mayor tir"), ("ton", "mayor nir"))
  for told in (others, twice, title):
    found = episodes.checks(episode([("kal mayor", told), VERDICT]))
    assert found.contradicted == 0 and found.shown == 1
  # The two values are of the fact, but the query was for another one.
  found = episodes.checks(episode([("kal river", TWO[1]), VERDICT]))
  assert found.contradicted == 0


def test_passages_without_facts_have_only_right_answers():
  plain = episode([RIGHT, ELSEWHERE], metadata={})
  assert episodes.checks(plain) == (1, 1, 0, 0)
  one = 'Doc 1<## Title: kal ##> the mayor is "Tir."'
  one = f"<information>{one}</information>"
  other = episode([("who", one), ("why", one)], metadata={})
  assert episodes.checks(other) == (1, 1, 0, 0)
  # A part of a word is no answer.
  within = passages(("kal", "mayor tirana"))
  assert not any(episodes.checks(episode([("x", within)], metadata={})))


def test_an_observation_in_two_pieces_is_one():
  split = episode([TWO, VERDICT])
  at = next(
    i for i, s in enumerate(split["spans"]) if s["author"] == "environment"
  )
  text = split["spans"][at]["text"]
  split["spans"][at : at + 1] = [
    {"author": "environment", "text": part}
    for part in ("\n<budget>remaining=2</budget>", text)
  ]
  assert episodes.checks(split) == (1, 1, 1, 1)


def test_shares_by_budget_by_hand():
  played = {
    2: [[TWO], [TWO, VERDICT], [RIGHT], [MISSED, RIGHT]],
    3: [[TWO, VERDICT], [TWO, VERDICT], [MISSED, RIGHT], [MISSED, RIGHT, TWO]],
  }
  made = [
    episode(searches, budget=budget, question=f"q{i}")
    for budget, of_budget in played.items()
    for i, searches in enumerate(of_budget)
  ]
  made.append(episode([RIGHT], budget=1, question="q9"))
  found = verification.checked(made)
  values = {
    kind: {budget: share.value for budget, share in by.items()}
    for kind, by in found.items()
  }
  # At B = 2 the second search is the last: the fourth episode has no choice.
  assert values["a right answer"] == {2: pytest.approx(1 / 3), 3: 0.75}
  assert values["two values of a fact"] == {2: 0.5, 3: 1.0}
  for by in found.values():
    for share in by.values():
      assert 0 <= share.low <= share.value <= share.high <= 1
      assert share.low < share.high


def test_columns_hold_the_counts_and_nothing_is_nothing():
  table = columns.of([episode([TWO, VERDICT])])
  assert [getattr(table, name)[0] for name in episodes.Checks._fields] == [
    1
  ] * 4
  assert verification.checked([episode([])]) == {}
